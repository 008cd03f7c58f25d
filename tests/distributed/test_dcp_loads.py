"""Loads by `DcpReader`: checkpoints of every format and number of ranks, into every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorkeep
from distributed.sharded_states import full_tensor, load, mesh, save
from ranks import run_ranks
from tensorkeep.distributed import DcpReader, DcpWriter

WEIGHT = (11, 6)


def trained() -> dict[str, Any]:
    weight = full_tensor(WEIGHT, 3)
    return {
        "model": {"weight": weight, "tied": weight, "turned": weight.t(), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"moment": full_tensor(WEIGHT, 4)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "random": ("PCG64", np.arange(4), np.float32(2)),
        "step": 7,
    }


def emptied(placements: list[Any] | None) -> dict[str, Any]:
    """Return a state to load into, with the tensors of that shape divided among the ranks."""
    state = trained()
    for place, name in (
        (state["model"], "weight"),
        (state["model"], "tied"),
        (state["optimizer"]["state"][0], "moment"),
    ):
        place[name] = torch.zeros(WEIGHT)
        if placements is not None:
            place[name] = distribute_tensor(place[name], mesh(), placements)
    state["model"]["turned"] = torch.zeros(WEIGHT[::-1])
    if placements is not None:
        state["model"]["turned"] = distribute_tensor(state["model"]["turned"], mesh(), placements)
    state["model"]["bias"] = torch.zeros(3, dtype=torch.bfloat16)
    return {**state, "random": None, "step": 0}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return what tests compare, with full tensors as lists."""
    tensors = {**state["model"], "moment": state["optimizer"]["state"][0]["moment"]}
    found = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).tolist() for name, each in tensors.items()
    }
    return {**found, "groups": state["optimizer"]["groups"], "random": str(state["random"]), "step": state["step"]}


def loaded_by(path: Path, placements: list[Any] | None, **options: Any) -> dict[str, Any]:
    state = emptied(placements)
    load(state, DcpReader(path, **options))
    return flat(state)


def one_process(**options: Any) -> Callable[[Path], None]:
    return lambda path: tensorkeep.save(trained(), path, **options)


SAVED: dict[str, Callable[[Path], Any]] = {
    "native": one_process(),
    "lossless": one_process(compression="lossless"),
    "dcp": one_process(format="dcp"),
    "by ranks": lambda path: run_ranks(4, save_by_ranks, path),
}


def save_by_ranks(path: Path) -> None:
    state = trained()
    for name in ("weight", "tied"):
        state["model"][name] = distribute_tensor(state["model"][name].clone(), mesh(), [Shard(0)])
    save(state, DcpWriter(path))


@pytest.mark.parametrize("saved", SAVED)
def test_every_checkpoint_is_loaded_by_ranks(saved: str, tmp_path: Path) -> None:
    SAVED[saved](tmp_path / "c")
    for count, placements in (3, [Shard(0)]), (2, [Shard(1)]), (1, None):
        for found in run_ranks(count, loaded_by, tmp_path / "c", placements):
            assert found == flat(trained()), (count, placements)


def test_ranks_load_what_they_share_and_the_last_step_of_a_run(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, trained()).wait()
    assert run_ranks(2, loaded_by, tmp_path / "run", [Replicate()]) == [flat(trained())] * 2


def load_without_a_state(path: Path) -> tuple[Any, ...]:
    state: dict[str, Any] = {}
    _load_state_dict(state, DcpReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state["model"]["weight"].tolist(), state["step"], state["random"][0], state["random"][1].tolist()


def test_a_state_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    tensorkeep.save(trained(), tmp_path / "c")
    assert load_without_a_state(tmp_path / "c") == (full_tensor(WEIGHT, 3).tolist(), 7, "PCG64", [0, 1, 2, 3])


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensorkeep.save({"model": {"weight": torch.ones(4, 2)}, "step": 1}, tmp_path / "c")
    for state, message in (
        ({"model": {"weight": torch.zeros(4, 2, dtype=torch.float64)}}, "float64 .* in the state, float32 .* saved"),
        ({"model": {"weight": torch.zeros(2, 2)}}, r"\[4, 2\].*\[2, 2\]"),
        ({"model": {"bias": torch.zeros(2)}}, "model.bias"),
    ):
        before = {name: each.clone() for name, each in state["model"].items()}
        with pytest.raises(CheckpointException, match=message):
            load(state, DcpReader(tmp_path / "c"))
        assert all(torch.equal(before[name], each) for name, each in state["model"].items())
    tensorkeep.save([torch.ones(2)], tmp_path / "list")
    for path, message in ("list", "loads dicts only"), ("missing", "does not exist"):
        with pytest.raises(CheckpointException, match=message):
            load({"a": torch.zeros(2)}, DcpReader(tmp_path / path))
    with pytest.raises(CheckpointException, match="no checkpoint is given"):
        load({"a": torch.zeros(2)}, DcpReader())
