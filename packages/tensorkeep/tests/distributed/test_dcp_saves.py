"""Saves by `DcpWriter`: layouts, plan caching, background saves, plain values, errors, kills."""

import multiprocessing
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

import tensorkeep
from checkpoint.ranks import cases
from distributed.calls import DyingPlanner, errors_of, full_tensor, save
from ranks import outcomes, run_ranks
from tensorkeep.distributed.dcp import DcpWriter
from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

WEIGHT = (13, 6)
"""Not divisible by the numbers of ranks."""


def whole(seed: int = 0) -> dict[str, Any]:
    return {
        "model": {"weight": full_tensor(WEIGHT, seed), "short": full_tensor((2, 3), seed + 1)},
        "optimizer": {"groups": [{"lr": 0.1 + seed, "params": ["weight"]}], "step": torch.tensor(5.0)},
        "random": ("PCG64", np.arange(seed, seed + 4), 1),
        "bias": torch.ones(3),
        "step": 7,
        "nothing": None,
        "empty": [],
        "unsized": torch.zeros(0, 4),
    }


def divided(layout: str, seed: int = 0) -> dict[str, Any]:
    """Return the same state with the tensors of the model divided among the ranks."""
    return cases.divided(whole(seed), layout)


def save_layout(path: Path, layout: str, seed: int = 0, **options: Any) -> None:
    save(divided(layout, seed), DcpWriter(path, **options))


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        pytest.param("rows", 3, {}, marks=pytest.mark.exhaustive),
        ("columns", 2, {"compression": "lossless", "metadata": {"run": 3}}),
        ("replicated", 2, {}),
        ("replicas of shards", 4, {"threads": 1}),
        ("rows and columns", 4, {}),
    ],
)
def test_every_layout_loads_in_one_process(layout: str, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(ranks, save_layout, tmp_path / "c", layout, **options)
    assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    assert tensorkeep.verify(tmp_path / "c").ok
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    info = tensorkeep.info(tmp_path / "c")
    assert info.metadata == options.get("metadata", {})
    assert info.details["compression"] == options.get("compression", "none")


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
    assert all(torch.equal(loaded[f"layer{rank}"], full_tensor((2, 2), rank)) for rank in range(3))
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
    assert run_ranks(2, save_many_times, tmp_path, 3) == [True, True]
    for number in range(3):
        assert difference(whole(number), tensorkeep.load(tmp_path / str(number))) is None, number


def save_in_the_background(path: Path, kind: str, times: int) -> None:
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


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_saves_in_the_background(kind: str, tmp_path: Path) -> None:
    run_ranks(2, save_in_the_background, tmp_path, kind, 2, seconds=120)
    for number in range(2):
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


def failures(path: Path, what: str, **options: Any) -> dict[int, str]:
    """Save, while rank 1 has what it cannot save, or what differs from the other rank's; return the errors."""
    state = divided("rows", 100)
    if dist.get_rank() == 1:
        if what == "code":
            state["model"]["hook"] = print
        elif what == "dtype":
            state["model"]["weight"] = state["model"]["weight"].double()
        elif what == "full disk":  # the process writes no file of more than a page
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            state["large"] = torch.zeros(1000, 1000)
    try:
        return errors_of(save, state, DcpWriter(path, **options))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_saved(tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "c", "rows")
    for what, kind, text in (
        ("code", "UnsupportedLeafError", "model.hook"),
        ("full disk", "StoreError", "too large"),
        ("dtype", "RanksDisagreeError", "float64 on rank 1"),
    ):
        found = run_ranks(2, failures, tmp_path / "c", what, overwrite=True)
        assert found[0] == found[1]
        assert [(each.startswith(kind), text in each.lower()) for each in found[0].values()] == [(True, True)], found
        assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    found = run_ranks(2, failures, tmp_path / "c", "nothing")
    assert found[0] == found[1] and found[0][0].startswith("DestinationExistsError")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    run_ranks(2, save_layout, tmp_path / "c", "rows", 9, overwrite=True)
    assert difference(whole(9), tensorkeep.load(tmp_path / "c")) is None


def save_and_die(path: Path, rank: int, method: str) -> None:
    save(divided("rows", 100), DcpWriter(path, overwrite=True), DyingPlanner(rank, method))


# `test_dcp_beside_ours.py` has the first of those that are left out.
DEATHS = [(0, "resolve_data"), *exhaustive((1, "finish_plan"), (0, "finish_plan"), (1, "resolve_data"))]


@pytest.mark.parametrize(("rank", "method"), DEATHS)
def test_a_killed_rank_leaves_the_old_checkpoint(rank: int, method: str, tmp_path: Path) -> None:
    run_ranks(2, save_layout, tmp_path / "c", "rows")
    found = outcomes(2, save_and_die, tmp_path / "c", rank, method, group_seconds=5)
    assert found[rank].exit_code == -signal.SIGKILL and found[1 - rank].error is not None
    assert difference(whole(), tensorkeep.load(tmp_path / "c")) is None
    run_ranks(2, save_layout, tmp_path / "c", "rows", 9, overwrite=True)
    assert difference(whole(9), tensorkeep.load(tmp_path / "c")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_arguments_are_checked(tmp_path: Path) -> None:
    for options, message in (({"nonsense": 1}, "no option 'nonsense'"), ({"compression": "auto"}, "auto")):
        with pytest.raises(UsageError, match=message):
            DcpWriter(tmp_path / "c", **options)
    with pytest.raises(CheckpointException, match="no path is given"):
        save({"a": torch.ones(1)}, DcpWriter())
    with pytest.raises(UsageError, match="without collectives"):
        DcpWriter(tmp_path / "c").set_up_storage_writer(True, rank=0, use_collectives=False)


def test_dcp_finds_no_stager_and_no_truth_value_in_a_writer() -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    assert not isinstance(DcpWriter("c"), AsyncStager)
    assert bool(DcpWriter("c"))
