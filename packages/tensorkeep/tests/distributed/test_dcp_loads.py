"""Loads by `DcpReader`: checkpoints of every format and number of ranks, into every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

import tensorkeep
from checkpoint.ranks import cases
from distributed.calls import full_tensor, load, save
from ranks import run_ranks
from tensorkeep.distributed.dcp import DcpReader, DcpWriter

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

WEIGHT = (11, 6)


def trained() -> dict[str, Any]:
    weight = full_tensor(WEIGHT, 3)
    return {
        "model": {"weight": weight, "tied": weight, "turned": weight.t(), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"moment": full_tensor(WEIGHT, 4)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "random": ("PCG64", np.arange(4), np.float32(2)),
        "step": 7,
    }


def emptied(layout: str | None) -> dict[str, Any]:
    """Return a state to load into, with the matrices divided among the ranks."""
    state = trained()
    model, moments = state["model"], state["optimizer"]["state"][0]
    zeros = {name: torch.zeros(each.shape) for name, each in {**model, **moments}.items() if each.dim() == 2}
    if layout is not None:
        zeros = cases.divided({"model": zeros}, layout)["model"]
    moments["moment"] = zeros.pop("moment")
    model |= {**zeros, "bias": torch.zeros_like(model["bias"])}
    return {**state, "random": None, "step": 0}


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return what tests compare, with full tensors as lists."""
    tensors = {**state["model"], "moment": state["optimizer"]["state"][0]["moment"]}
    whole = ((name, each.full_tensor() if isinstance(each, DTensor) else each) for name, each in tensors.items())
    found = {name: each.tolist() for name, each in whole}
    return {**found, "groups": state["optimizer"]["groups"], "random": str(state["random"]), "step": state["step"]}


def loaded_by(path: Path, layout: str | None) -> dict[str, Any]:
    state = emptied(layout)
    load(state, DcpReader(path))
    return flat(state)


def save_by_ranks(path: Path) -> None:
    state = trained()
    parts = {name: state["model"][name].clone() for name in ("weight", "tied")}
    state["model"] |= cases.divided({"model": parts}, "rows")["model"]
    save(state, DcpWriter(path))


SAVED: dict[str, Any] = {"native": {}, "lossless": {"compression": "lossless"}, "dcp": {"format": "dcp"}}
SAVED["by ranks"] = None
LOADS = [(3, "rows"), (2, "columns"), (1, None)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("saved", SAVED)
def test_every_checkpoint_is_loaded_by_ranks(saved: str, every: bool, tmp_path: Path) -> None:
    options = SAVED[saved]
    if options is None:
        run_ranks(4, save_by_ranks, tmp_path / "c")
    else:
        tensorkeep.save(trained(), tmp_path / "c", **options)
    for count, layout in LOADS if every else [LOADS[[*SAVED].index(saved) % len(LOADS)]]:
        for found in run_ranks(count, loaded_by, tmp_path / "c", layout):
            assert found == flat(trained()), (count, layout)


def test_ranks_load_what_they_share_and_the_last_step_of_a_run(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, trained()).wait()
    assert run_ranks(2, loaded_by, tmp_path / "run", "replicated") == [flat(trained())] * 2


def test_a_state_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    tensorkeep.save(trained(), tmp_path / "c")
    state: dict[str, Any] = {}
    _load_state_dict(state, DcpReader(tmp_path / "c"), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert torch.equal(state["model"]["weight"], full_tensor(WEIGHT, 3))
    assert (state["step"], state["random"][0], state["random"][1].tolist()) == (7, "PCG64", [0, 1, 2, 3])


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
