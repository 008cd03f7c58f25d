"""Loads by several ranks: tied tensors, large blocks, and what only one rank meets.

The functions before each test run on every rank of a gloo group.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorkeep
from ranks import outcomes, run_ranks
from tensorkeep.checkpoint import ranges
from tensorkeep.distributed import PerRank
from tensorkeep.errors import BusyError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile import plan
from tensorkeep.formats.blockfile.plan import Grid
from tensorkeep.formats.finding import open_reader
from tensorkeep.runs import backends
from tensorkeep.testing.cases import case

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


def sharded(value: torch.Tensor, dim: int = 0) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def save(state: Any, path: str) -> None:
    tensorkeep.save(state, path, group=dist.group.WORLD, timeout=100)


def load(path: str, **options: Any) -> Any:
    return tensorkeep.load(path, group=dist.group.WORLD, timeout=100, **options)


def untied_into_tied(path: str) -> None:
    save({"a": sharded(torch.ones(4, 2)), "b": sharded(torch.zeros(4, 2))}, path)
    tensor = sharded(torch.full((4, 2), 7.0))
    try:
        load(path, into={"a": tensor, "b": tensor})
    finally:
        assert (tensor.to_local() == 7).all()


def test_tied_dtensors_do_not_take_tensors_that_were_not_tied(tmp_path: Path) -> None:
    found = outcomes(2, untied_into_tied, str(tmp_path / "c"))
    assert {each.error for each in found} <= {"StateMismatchError", "RanksDisagreeError"}
    assert all("'b' shares memory with 'a' in the state" in each.message for each in found), found


def tied_into_untied(path: str) -> None:
    tied = sharded(torch.arange(24.0).reshape(8, 3))
    save({"a": tied, "b": tied}, path)
    first, second = sharded(torch.zeros(8, 3)), sharded(torch.zeros(8, 3))
    with mock.patch.object(ranges, "allocate", side_effect=AssertionError("the full tensor is allocated")):
        load(path, into={"a": first, "b": second})
    assert all(torch.equal(each.to_local(), tied.to_local()) for each in (first, second))


def test_tied_dtensors_are_loaded_into_separate_ones_without_the_full_tensor(tmp_path: Path) -> None:
    run_ranks(2, tied_into_untied, str(tmp_path / "c"))


def coarse_blocks(path: str) -> int:
    """Save with blocks of 64 MiB, the largest that the format allows, and load other boxes of them."""
    grid = Grid(64 * 1024**2)
    tensor = torch.arange(6_000_000.0).view(2000, 3000)
    with mock.patch.multiple(plan, RAW_GRID=grid, CODED_GRID=grid):
        save({"w": sharded(tensor)}, path)
    columns = sharded(torch.zeros_like(tensor), dim=1)
    load(path, into={"w": columns})
    start = 1500 * dist.get_rank()
    assert torch.equal(columns.to_local(), tensor[:, start : start + 1500])
    with open_reader(path, OpenSettings()) as reader:
        return reader.buffers


def test_blocks_of_the_largest_size_are_read(tmp_path: Path) -> None:
    assert run_ranks(2, coarse_blocks, str(tmp_path / "c")) == [4, 4]


def other_paths(path: str, into: bool) -> None:
    for number in (0, 1):
        save({"w": torch.full((4,), number)}, f"{path}/{number}")
    load(f"{path}/{dist.get_rank()}", **({"into": {"w": torch.zeros(4).long()}} if into else {}))


@pytest.mark.parametrize("into", [False, True])
def test_ranks_that_load_different_checkpoints_raise(tmp_path: Path, into: bool) -> None:
    found = outcomes(2, other_paths, str(tmp_path), into)
    assert [each.error for each in found] == ["RanksDisagreeError"] * 2
    expected = f"rank 0 has opened {tmp_path}/0, and rank 1 has opened another checkpoint, {tmp_path}/1"
    assert all(expected in each.message for each in found), found


def manager(root: str) -> tensorkeep.CheckpointManager:
    return tensorkeep.CheckpointManager(root, keep_best=1, metric="loss", group=dist.group.WORLD, timeout=100)


def metrics_of_rank_0(root: str) -> Any:
    """Save two steps with metrics that only rank 0 gives; return those of the latest one."""
    with manager(root) as steps:
        for step in (1, 2):
            steps.save(step, {"w": torch.ones(2)}, metrics={"loss": step} if dist.get_rank() == 0 else None).wait()
        latest = steps.latest()
        return latest and latest.metrics["loss"]


def one_rank_gives(root: str, what: str) -> None:
    """Call a manager or `load` with what is wrong on one rank only."""
    rank = dist.get_rank()
    with manager(root) as steps:
        if what == "step":
            steps.save(-1 if rank == 1 else 3, {"w": torch.ones(2)}, metrics={"loss": 1})
        elif what == "number":
            steps.restore(9 if rank == 1 else 1)
        elif what == "load":
            load(f"{root}/step-000001", memory_budget="a lot" if rank == 1 else "64MiB")
        elif what == "shape":
            steps.restore(into={"w": torch.zeros(5 if rank == 0 else 2)})
        else:
            with mock.patch.object(backends, "FolderLock", side_effect=BusyError("another writes")):
                steps.delete(1)


def test_what_one_rank_gives_wrongly_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run_ranks(2, metrics_of_rank_0, root) == [2, 2]
    for what, failing, error in (
        *(("step", 1, "UsageError"), ("number", 1, "NotFoundError"), ("load", 1, "UsageError")),
        *(("shape", 0, "StateMismatchError"), ("locked", 0, "BusyError")),
    ):
        with case(what):
            found = outcomes(2, one_rank_gives, root, what)
            assert found[failing].error == error, found
            assert found[1 - failing].error == "RanksDisagreeError", found
            assert f"rank {failing} has failed" in found[1 - failing].message


class Nested:
    def state_dict(self) -> dict[str, Any]:
        return {"value": PerRank(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def per_rank_within_an_object(path: str) -> None:
    save({"object": Nested()}, path)


def test_per_rank_within_the_state_of_an_object_names_the_remedy(tmp_path: Path) -> None:
    found = outcomes(2, per_rank_within_an_object, str(tmp_path / "c"))
    assert all("wrap the object itself: PerRank(object)" in each.message for each in found), found
