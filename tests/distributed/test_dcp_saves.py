"""Saves by `DcpWriter`: layouts, plan caching, background saves, plain values, errors, kills."""

import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tensorkeep
from distributed.sharded_states import full_tensor, mesh, save
from ranks import outcomes, run_ranks
from tensorkeep.distributed import DcpWriter
from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference

WEIGHT = (13, 6)
"""Not divisible by the numbers of ranks."""


def whole(seed: int = 0) -> dict[str, Any]:
    """Return the state that ranks save together."""
    return {
        "model": {"weight": full_tensor(WEIGHT, seed), "short": full_tensor((2, 3), seed + 1), "bias": torch.ones(3)},
        "optimizer": {"groups": [{"lr": 0.1 + seed, "params": ["weight"]}], "step": torch.tensor(5.0)},
        "random": ("PCG64", np.arange(seed, seed + 4), 1),
        "step": 7,
        "nothing": None,
        "empty": [],
        "unsized": torch.zeros(0, 4),
    }


def divided(layout: str, seed: int = 0) -> dict[str, Any]:
    """Return the same state with two tensors divided among the ranks."""
    state, ranks = whole(seed), dist.get_world_size()
    over, placements = {
        "rows": (mesh(), [Shard(0)]),
        "columns": (mesh(), [Shard(1)]),
        "replicated": (mesh(), [Replicate()]),
        "hsdp": (mesh(2, ranks // 2), [Replicate(), Shard(0)]),
        "rows and columns": (mesh(2, ranks // 2), [Shard(0), Shard(1)]),
    }[layout]
    for name in ("weight", "short"):
        state["model"][name] = distribute_tensor(state["model"][name], over, placements)
    return state


def save_layout(path: Path, layout: str, seed: int = 0, **options: Any) -> None:
    save(divided(layout, seed), DcpWriter(path, **options))


@pytest.mark.parametrize(
    ("layout", "ranks"), [("rows", 3), ("columns", 2), ("replicated", 2), ("hsdp", 4), ("rows and columns", 4)]
)
def test_every_layout_loads_in_one_process(layout: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, save_layout, tmp_path / "c", layout)
    assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    assert tensorkeep.verify(tmp_path / "c").ok
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_options_and_metadata_are_those_of_a_save(tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "c", "rows", compression="lossless", metadata={"run": 3})
    with tensorkeep.open(tmp_path / "c") as checkpoint:
        assert checkpoint.metadata == {"run": 3}
    assert tensorkeep.info(tmp_path / "c").details["compression"] == "lossless"


def test_a_save_builds_on_an_earlier_one(tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "1", "rows", incremental=True)
    run_ranks(2, save_layout, tmp_path / "2", "rows", base=tmp_path / "1")
    assert difference(whole(), tensorkeep.load(tmp_path / "2")) is None
    inodes = [{file.stat().st_ino for file in (tmp_path / name).iterdir()} for name in ("1", "2")]
    assert inodes[0] & inodes[1]


def save_by_stages(path: Path) -> None:
    """Save a state of which each rank has other keys, as pipeline parallelism does."""
    rank = dist.get_rank()
    save({"stages": {f"layer{rank}": full_tensor((2, 2), rank), "rank": {str(rank): rank}}}, DcpWriter(path))


def test_keys_may_differ_by_rank(tmp_path: Path) -> None:
    run_ranks(3, save_by_stages, tmp_path / "c")
    loaded = tensorkeep.load(tmp_path / "c")["stages"]
    assert {name: loaded[name].tolist() for name in ("layer0", "layer1", "layer2")} == {
        f"layer{rank}": full_tensor((2, 2), rank).tolist() for rank in range(3)
    }
    assert loaded["rank"] == {"0": 0, "1": 1, "2": 2}


class CachingPlanner(dcp.DefaultSavePlanner):
    """A planner with a cache of its own, as planners are known by the name of their class."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def save_many_times(folder: Path, times: int) -> bool:
    """Save other values each time, by a planner that has not planned again; return whether it has used its cache."""
    writer = DcpWriter()
    for number in range(times):
        writer.reset(folder / str(number))
        save(divided("rows", number), writer, CachingPlanner())
    return CachingPlanner.__name__ in dcp.SavePlanner._cached_final_save_plan


def test_plans_may_be_cached(tmp_path: Path) -> None:
    assert run_ranks(2, save_many_times, tmp_path, 4) == [True, True]
    for number in range(4):
        assert difference(whole(number), tensorkeep.load(tmp_path / str(number))) is None, number


def save_in_the_background(path: Path, kind: str, times: int) -> None:
    import multiprocessing

    # Those of tests are daemons, which Python does not let have children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    state = divided("rows")
    local = state["model"]["weight"].to_local()
    for number in range(times):
        saved = dcp.async_save(
            state,
            storage_writer=DcpWriter(path / str(number)),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            planner=CachingPlanner(),
        )
        local.mul_(2)  # the state may change as soon as the call returns
        saved.result()


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_saves_in_the_background(kind: str, tmp_path: Path) -> None:
    run_ranks(2, save_in_the_background, tmp_path, kind, 3, seconds=120)
    for number in range(3):
        expected = whole()
        expected["model"]["weight"] *= 2**number
        assert difference(expected, tensorkeep.load(tmp_path / str(number))) is None, number


def test_a_writer_is_pickled_with_its_options(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path / "first", compression="lossless", overwrite=True, threads=2)
    writer.reset(tmp_path / "c")
    copied = pickle.loads(pickle.dumps(writer))
    assert copied.checkpoint_id == tmp_path / "c"
    save(whole(), copied)
    assert tensorkeep.info(tmp_path / "c").details["compression"] == "lossless"


def failures(path: Path, change: Any = None, **options: Any) -> dict[int, tuple[str, str]]:
    """Save; return the class and the text of the error of each rank that has failed."""
    state = divided("rows", 100)
    if change is not None:
        change(state)
    try:
        with pytest.raises(CheckpointException) as caught:
            save(state, DcpWriter(path, **options))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {rank: (type(error).__name__, str(error)) for rank, (error, _) in caught.value.failures.items()}


def add_code(state: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        state["model"]["hook"] = print


def limit_files(state: dict[str, Any]) -> None:
    """Let this process write no file of more than a page, as if the disk were full."""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        state["large"] = torch.zeros(1000, 1000)


def change_dtype(state: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        state["model"]["weight"] = state["model"]["weight"].double()


def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_saved(tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "c", "rows")
    for change, kind, text in (
        (add_code, "UnsupportedLeafError", "model.hook"),
        (limit_files, "StoreError", "too large"),
        (change_dtype, "RanksDisagreeError", "float64 on rank 1"),
    ):
        found = run_ranks(2, failures, tmp_path / "c", change, overwrite=True)
        assert found[0] == found[1]
        assert [(kind in each[0], text in each[1].lower()) for each in found[0].values()] == [(True, True)], found
        assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    found = run_ranks(2, failures, tmp_path / "c")
    assert found[0] == found[1] and found[0][0][0] == "DestinationExistsError"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    run_ranks(2, save_layout, tmp_path / "c", "rows", 9, overwrite=True)
    assert difference(whole(9), tensorkeep.load(tmp_path / "c")) is None


class DyingPlanner(dcp.DefaultSavePlanner):
    """Kills one rank, before it writes or when it has written."""

    def __init__(self, rank: int, method: str) -> None:
        super().__init__()
        self._death = rank, method

    def finish_plan(self, new_plan: Any) -> Any:
        self._die("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._die("resolve_data")
        return super().resolve_data(write_item)

    def _die(self, method: str) -> None:
        if (dist.get_rank(), method) == self._death:
            os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(path: Path, rank: int, method: str) -> None:
    save(divided("rows", 100), DcpWriter(path, overwrite=True), DyingPlanner(rank, method))


@pytest.mark.parametrize("method", ["finish_plan", "resolve_data"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_leaves_the_old_checkpoint(rank: int, method: str, tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "c", "rows")
    found = outcomes(2, save_and_die, tmp_path / "c", rank, method, group_seconds=5)
    assert found[rank].exit_code == -signal.SIGKILL and found[1 - rank].error is not None
    assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    run_ranks(2, save_layout, tmp_path / "c", "rows", 9, overwrite=True)
    assert difference(whole(9), tensorkeep.load(tmp_path / "c")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no option 'nonsense'"):
        DcpWriter(tmp_path / "c", nonsense=1)
    with pytest.raises(UsageError, match="auto"):
        DcpWriter(tmp_path / "c", compression="auto")
    with pytest.raises(CheckpointException, match="no path is given"):
        save({"a": torch.ones(1)}, DcpWriter())
    with pytest.raises(UsageError, match="without collectives"):
        DcpWriter(tmp_path / "c").set_up_storage_writer(True, rank=0, use_collectives=False)


def test_dcp_finds_no_stager_and_no_truth_value_in_a_writer() -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    assert not isinstance(DcpWriter("c"), AsyncStager)
    assert bool(DcpWriter("c"))
