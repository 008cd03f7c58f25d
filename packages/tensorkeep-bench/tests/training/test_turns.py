"""Cells that take turns with the baseline, and cells of several ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from forked_modules import FORKING, forks
from tensorkeep.errors import TensorkeepError, UsageError
from tensorkeep_bench.training import cell as cell
from tensorkeep_bench.training.cell import Partner, PartnerTask, StepTimer, joined
from tensorkeep_bench.training.workload import WORKLOAD, check_arm, missing_for
from tensorkeep_bench.workload import Outcome
from tiny_training import CONFIG
from training.test_training import data, shared_references, task, tiny

__all__ = ["data", "shared_references", "tiny"]  # fixtures


def timed(seconds: list[float], *, warmup: int, turn: float) -> tuple[StepTimer, list[float | None]]:
    """Return the timer of a run whose steps take so many seconds, of 100 tokens each, and what each step returned."""
    run = SimpleNamespace(clock=SimpleNamespace(seconds={}), progress=SimpleNamespace(tokens=0))
    run.speed = SimpleNamespace(flops=0)
    timer, speeds = StepTimer(cast(Any, run), warmup, turn), []
    for index, each in enumerate(seconds):
        run.progress.tokens += 100
        if index:  # the clock does not count the first step
            run.clock.seconds["train"] = run.clock.seconds.get("train", 0.0) + each
        speeds.append(timer.add_step())
    return timer, speeds


def test_first_step_warm_up_and_first_step_of_a_turn_are_not_timed() -> None:
    timer, speeds = timed([9.0, 8.0, 1.0, 1.0, 5.0, 2.0, 7.0], warmup=1, turn=2.0)
    assert [step[:2] for step in timer.steps] == [(1.0, 100), (1.0, 100), (2.0, 100)]
    assert (speeds, timer.seconds) == ([None, None, None, 100.0, None, 50.0, None], 24.0)


@pytest.mark.exhaustive
@forks
def test_a_cell_takes_turns_with_the_baseline(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep_bench.training.cell.subprocess", FORKING)
    one = task(data, tmp_path, {"techniques.activation-checkpointing": "on"}, turn=0.001)
    alone = WORKLOAD.measure(one)
    assert alone.turns == {}
    found = WORKLOAD.measure(msgspec.structs.replace(one, baseline={}, directory=str(tmp_path / "turns")))
    pairs = found.turns[cell.SPEED]
    assert len(pairs) >= 2 and all(min(pair) > 0 for pair in pairs)
    # The baseline changes neither the losses nor the memory of the cell.
    for name in (cell.LOSS, cell.MEMORY):
        assert found.figures[name] == alone.figures[name], name
    # A baseline that cannot run is an error.
    given = PartnerTask(CONFIG.as_dict(), str(tmp_path / "none"), str(tmp_path / "run"), 1, 0.1, None)
    with pytest.raises(TensorkeepError, match="the process of the baseline ended with exit code 1"):
        Partner(given)


def test_the_baseline_has_the_threads_of_a_cell_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in a rank
    start = mock.Mock(side_effect=OSError)
    monkeypatch.setattr("tensorkeep_bench.training.cell.subprocess.Popen", start)
    for threads in (None, "3"):
        with pytest.raises(OSError):
            Partner(PartnerTask(CONFIG.as_dict(), "", "", 1, 0.1, threads))
        assert start.call_args.kwargs["env"].get("OMP_NUM_THREADS") == threads
        assert "PATH" in start.call_args.kwargs["env"]


@pytest.mark.exhaustive
def test_a_cell_of_two_ranks_shares_the_memory(data: Path, tmp_path: Path) -> None:
    plain = {"loop.batch_size": 4, "model.dropout": 0.0}
    alone = WORKLOAD.measure(task(data, tmp_path / "plain", plain))
    split = task(data, tmp_path / "split", {**plain, "ranks": 2, "techniques.ddp": "on"}, turn=0.001)
    found = WORKLOAD.measure(msgspec.structs.replace(split, baseline=plain))
    assert found.status == "ok", found.reason
    assert "over 2 processes" in found.observed["ddp"]
    assert found.figures[cell.TOKENS] == alone.figures[cell.TOKENS]
    assert found.figures[cell.LOSS] == pytest.approx(alone.figures[cell.LOSS], rel=1e-5)
    assert found.figures[cell.MEMORY] < alone.figures[cell.MEMORY]
    assert len(found.turns[cell.SPEED]) >= 1


def test_ranks_have_one_outcome_and_a_valid_number() -> None:
    figures = [{cell.SPEED: 5.0, cell.MEMORY: 1.0}, {cell.SPEED: 6.0, cell.MEMORY: 3.0}]
    found = joined([Outcome(figures=each) for each in figures])
    assert found.figures == {cell.SPEED: 5.0, cell.MEMORY: 3.0}
    lost = Outcome("failed", "RanksDisagreeError: another rank of the run has ended")
    assert joined([lost, Outcome("gate", "the loss")]).status == "gate"
    assert joined([Outcome(), lost]).status == "failed"
    # The number of ranks is checked.
    check_arm({"ranks": 2, "techniques.ddp": "on"})
    assert "torchrun" in str(missing_for({"techniques.ddp": "on"}))
    assert missing_for({"ranks": 2, "techniques.ddp": "on"}) is None
    for wrong in (0, "2", True, 2000):
        with pytest.raises(UsageError, match="ranks is"):
            check_arm({"ranks": wrong})
