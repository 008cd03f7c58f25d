"""What the ranks of `test_loading` do; each function runs on every rank of a gloo group."""

import warnings
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorkeep
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.load import ranges
from tensorkeep.checkpoint.manager import place
from tensorkeep.distributed import PerRank
from tensorkeep.errors import BusyError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.cuts import Grid
from tensorkeep.formats.native.pieces import writer


def sharded(value: torch.Tensor) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save(state: Any, path: str) -> None:
    tensorkeep.save(state, path, group=dist.group.WORLD, timeout=10)


def load(path: str, **options: Any) -> Any:
    return tensorkeep.load(path, group=dist.group.WORLD, timeout=10, **options)


def plain_values_of_ranks(path: str) -> list[Any]:
    rank = dist.get_rank()
    save({"seed": PerRank(100 + rank), "more": PerRank({"k": rank + 5, "x": torch.full((2,), rank)})}, path)
    x = torch.zeros(2, dtype=torch.int64)
    loaded = load(path, into={"seed": PerRank(0), "more": PerRank({"k": 0, "x": x})})
    assert loaded["more"].value["x"] is x
    return [loaded["seed"].value, loaded["more"].value["k"], x.tolist()]


def plain_values_of_more_ranks(path: str) -> tuple[Any, list[str]]:
    given = {"seed": PerRank(-1), "more": PerRank({"k": -1, "x": torch.zeros(2).long()})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(path, into=given)
    return loaded["seed"].value, [str(each.message) for each in caught]


def untied_into_tied(path: str) -> list[float]:
    save({"a": sharded(torch.ones(4, 2)), "b": sharded(torch.zeros(4, 2))}, path)
    tensor = sharded(torch.full((4, 2), 7.0))
    try:
        load(path, into={"a": tensor, "b": tensor})
    finally:
        assert (tensor.to_local() == 7).all()
    raise AssertionError("loaded")


def tied_into_untied(path: str) -> None:
    tied = sharded(torch.arange(24.0).reshape(8, 3))
    save({"a": tied, "b": tied}, path)
    first, second = sharded(torch.zeros(8, 3)), sharded(torch.zeros(8, 3))
    with mock.patch.object(ranges, "allocate", side_effect=AssertionError("the full tensor is allocated")):
        load(path, into={"a": first, "b": second})
    assert torch.equal(first.to_local(), tied.to_local())
    assert torch.equal(second.to_local(), tied.to_local())


def coarse_blocks(path: str) -> int:
    """Save with blocks of 64 MiB, the largest that the format allows, and load other boxes of them."""
    grid = Grid(64 * 1024**2)
    tensor = torch.arange(6_000_000.0).view(2000, 3000)
    with mock.patch.multiple(writer, RAW_GRID=grid, CODED_GRID=grid):
        save({"w": sharded(tensor)}, path)
    columns = distribute_tensor(torch.zeros_like(tensor), init_device_mesh("cpu", (2,)), [Shard(1)])
    load(path, into={"w": columns})
    start = 1500 * dist.get_rank()
    assert torch.equal(columns.to_local(), tensor[:, start : start + 1500])
    with open_reader(path, OpenSettings()) as reader:
        return reader.buffers


def other_paths(path: str, into: bool) -> None:
    for number in (0, 1):
        save({"w": torch.full((4,), number)}, f"{path}/{number}")
    load(f"{path}/{dist.get_rank()}", **({"into": {"w": torch.zeros(4).long()}} if into else {}))


def manager(root: str) -> tensorkeep.CheckpointManager:
    return tensorkeep.CheckpointManager(root, keep_best=1, metric="loss", group=dist.group.WORLD, timeout=5)


def restore_fails_on_one_rank(root: str) -> None:
    with manager(root) as steps:
        for step in (1, 2):
            steps.save(step, {"w": torch.full((4,), step)}, metrics={"loss": 1.0}).wait()
        steps.restore(into={"w": torch.zeros(5 if dist.get_rank() == 0 else 4).long()})


def one_rank_gives(root: str, what: str) -> None:
    """Call a manager or `load` with what is wrong on rank 1 only."""
    wrong = dist.get_rank() == 1
    with manager(root) as steps:
        if what == "step":
            steps.save(-1 if wrong else 2, {"w": torch.ones(2)}, metrics={"loss": 1})
        elif what == "restore":
            steps.restore(9 if wrong else 1)
        else:
            load(f"{root}/step-000001", memory_budget="a lot" if wrong else "64MiB")


def metrics_of_rank_0(root: str) -> Any:
    with manager(root) as steps:
        steps.save(1, {"w": torch.ones(2)}, metrics={"loss": 0.5} if dist.get_rank() == 0 else None).wait()
        latest = steps.latest()
        return latest and latest.metrics["loss"]


def delete_locked(root: str) -> None:
    with manager(root) as steps, mock.patch.object(place, "FolderLock", side_effect=BusyError("another writes")):
        steps.delete(1)


class Nested:
    def state_dict(self) -> dict[str, Any]:
        return {"value": PerRank(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def per_rank_within_an_object(path: str) -> None:
    save({"object": Nested()}, path)
