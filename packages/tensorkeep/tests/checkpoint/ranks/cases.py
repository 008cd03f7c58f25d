"""What ranks do together, on disk and in object stores; each function runs on every rank of a gloo group."""

import os
import time
import warnings
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import tensorkeep
from tensorkeep.distributed import PerRank
from tensorkeep.ranks import merge

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((-1,), (Shard(0),)),
    "columns": ((-1,), (Shard(1),)),
    "replicated": ((-1,), (Replicate(),)),
    "replicas of shards": ((2, -1), (Replicate(), Shard(0))),
    "rows and columns": ((2, -1), (Shard(0), Shard(1))),
    "strided": ((2, -1), (_StridedShard(0, split_factor=2), Shard(0))),
}


def together(timeout: float = 100) -> dict[str, Any]:
    return {"group": dist.group.WORLD, "timeout": timeout}


def full_state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(7)
    model = {"even": torch.randn(24, 16, generator=draw).bfloat16(), "uneven": torch.randn(7, 5, generator=draw)}
    model |= {"few": torch.randn(1, 6, generator=draw), "empty": torch.zeros(0, 4)}
    model["large"] = torch.arange(3000 * 512.0).reshape(3000, 512).bfloat16()
    return {"model": model, "plain": torch.arange(11), "scalar": torch.tensor(2.5), "step": 12, "names": ["a", "b"]}


def divided(state: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return the state with the tensors of its model divided among the ranks."""
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(torch.empty(dist.get_world_size()).reshape(shape).shape))
    model = {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in state["model"].items()
    }
    return {**state, "model": model}


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, DTensor):
        return torch.equal(first.to_local(), second.to_local())
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def save(path: str, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    report = tensorkeep.save(divided(full_state(), layout), path, **together(), **options)
    return report.as_dict()


def save_async(path: str, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    state = divided(full_state(), layout)
    pending = tensorkeep.save_async(state, path, **together(), **options)
    for tensor in state["model"].values():
        tensor.to_local().zero_()
    return pending.wait().as_dict()


def load(path: str, layout: str) -> bool:
    """Load into another layout, and compare every bit of this rank's part."""
    expected = divided(full_state(), layout)
    given = zeros_like(expected)
    loaded = tensorkeep.load(path, into=given, **together())
    return equal(given, expected) and loaded["step"] == 12 and loaded["names"] == ["a", "b"]


def pipeline(path: str) -> list[Any]:
    """Save and load the stages of a pipeline: each rank has other keys, and values of its own."""
    rank = dist.get_rank()

    def stage(scale: float) -> dict[str, Any]:
        return {f"block{rank}": torch.full((3, 2), rank * scale), "shared": torch.full((4,), scale)}

    def state(scale: float, epoch: int, bits: torch.Tensor) -> dict[str, Any]:
        return {"model": stage(scale), "random": PerRank({"bits": bits, "seed": epoch}), "epoch": PerRank(epoch)}

    tensorkeep.save({**state(1.0, 100 + rank, torch.full((2,), rank)), "step": 3}, path, **together())
    bits = torch.full((2,), 9)
    into = {**state(0.0, -1, bits), "step": 0}
    loaded = tensorkeep.load(path, into=into, **together())
    assert equal(into["model"], stage(1.0))
    assert loaded["step"] == 3
    assert loaded["random"].value["bits"] is bits
    return [sorted(loaded["model"]), bits.tolist(), loaded["random"].value["seed"], loaded["epoch"].value]


def per_rank_of_fewer(path: str) -> list[Any]:
    """Load the values of ranks from a checkpoint that fewer ranks saved; return them, and the warnings."""
    bits = torch.full((2,), 9)
    into = {"random": PerRank({"bits": bits, "seed": -1}), "epoch": PerRank(-1)}
    with warnings.catch_warnings(record=True, action="always") as caught:
        loaded = tensorkeep.load(path, into=into, **together())
    return [bits.tolist(), loaded["epoch"].value, "\n".join(str(each.message) for each in caught)]


def fsdp(path: str, action: str) -> Any:
    """Train a small model with FSDP for a step, and save it; or load it into a new one with a new optimizer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.arange(24.0).reshape(4, 6)

    def take_step() -> float:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    if action == "save":
        take_step()
        tensorkeep.save({"model": model, "optimizer": optimizer}, path, **together())
    else:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        tensorkeep.load(path, into={"model": model, "optimizer": optimizer}, **together())
        kinds = {type(value).__name__ for state in optimizer.state.values() for value in state.values()}
        assert kinds == {"DTensor", "Tensor"}
    return [take_step() for _ in range(3)]


def manage(root: str, incremental: Any) -> list[Any]:
    """Save steps with a manager, delete old ones, restore the last one."""
    state = divided(full_state(), "rows")
    with tensorkeep.CheckpointManager(root, keep_last=2, incremental=incremental, **together()) as manager:
        reports = []
        for step in (1, 2, 3):
            state["model"]["even"].to_local().fill_(step)
            reports.append(manager.save(step, state, metrics={"loss": 1 / step + dist.get_rank()}).wait())
        numbers = [step.number for step in manager.steps()]
        given = zeros_like(state)
        manager.restore(into=given)
        assert equal(given, state)
        loss = manager.latest().metrics["loss"]
        return [numbers, loss, [report.new_bytes for report in reports], reports[0].base_refused]


def restore_damaged(root: str) -> float:
    given = zeros_like(divided(full_state(), "rows"))
    with warnings.catch_warnings(action="ignore"), tensorkeep.CheckpointManager(root, **together()) as manager:
        manager.restore(into=given)
    even = given["model"]["even"].to_local()
    return float(even.flatten()[0]) if even.numel() else -1.0


# Failures


def differing(path: str, what: str) -> None:
    """Save states that differ between two ranks."""
    state, options = full_state(), {"compression": "none", **together()}
    if dist.get_rank() == 1:
        state |= {
            "key": {"plain": state["plain"].float()},
            "shape": {"plain": torch.arange(12)},
            "value": {"step": 13},
            "list": {"names": ["a", "c"]},
            "unsupported": {"code": print},
        }.get(what, {})
        if what == "path":
            path += "-other"
        if what == "compression":
            options["compression"] = "lossless"
    tensorkeep.save(state, path, **options)


def failing(path: str, where: str, how: str) -> None:
    """Save while rank 1 fails, dies or hangs at some point."""

    def act(*_: Any, **__: Any) -> Any:
        if how == "dies":
            os._exit(9)
        if how == "hangs":
            time.sleep(60)
        raise OSError(28, "No space left on device")

    owner, name = (merge.CollectiveWrite, "_write_files") if where == "write" else (merge.GroupSaveCoordinator, where)
    state = divided(full_state(), "rows")
    with pytest.MonkeyPatch.context() as patches:
        if dist.get_rank() == 1:
            patches.setattr(owner, name, act)
        tensorkeep.save(state, path, **together(3 if how == "hangs" else 100), overwrite=True)


def without_group(path: str) -> None:
    tensorkeep.save(divided(full_state(), "rows"), path)


def differing_tensors(path: str) -> list[str]:
    """Save a plain tensor that differs between ranks, as a state of an optimizer of another stage."""
    state = {"momentum": torch.full((4, 3), dist.get_rank()), "same": torch.ones(2)}
    with warnings.catch_warnings(record=True, action="always") as caught:
        tensorkeep.save(state, path, **together())
    return [str(each.message) for each in caught]


# Models


class Tied(torch.nn.Module):
    """A model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 6)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 6)
        self.head = torch.nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight


def reference() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return dict(Tied().state_dict())


def parallel_model(kind: str) -> torch.nn.Module:
    """Return the model, divided among the ranks in one of the ways that torch has."""
    torch.manual_seed(5)
    model = Tied()
    size = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return model
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
        return model
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
    parallelize_module(model, mesh["model"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if kind == "fsdp and tensor parallel":
        fully_shard(model, mesh=mesh["data"])
    return model


def save_model(path: str, kind: str) -> list[str]:
    """Save a model and, as expert parallelism does, tensors under keys of this rank."""
    rank = dist.get_rank()
    model = parallel_model(kind)
    experts = {f"expert{rank}": torch.full((2, 3), rank)}
    tensorkeep.save({"model": model, "experts": experts}, path, **together())
    return [type(parameter).__name__ for parameter in model.parameters()]


def load_model(path: str, kind: str) -> bool:
    """Load a model that was divided in any way into one that is divided in this way; compare every bit."""
    model, expected = parallel_model(kind), parallel_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tensorkeep.load(path, into={"model": model}, **together())
    assert model.head.weight is model.embedding.weight
    return equal(dict(model.state_dict()), dict(expected.state_dict()))
