"""Cells that take turns with the baseline, and cells of several ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bench.training.test_training import data, references, shared_references, task, tiny
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.training import cell as cell
from tensorkeep.bench.training.arms import check_arm, missing_for
from tensorkeep.bench.training.ranks import joined
from tensorkeep.bench.training.turns import Partner, PartnerTask, StepTimer
from tensorkeep.bench.training.workload import WORKLOAD
from tensorkeep.errors import TensorkeepError, UsageError
from train.tiny_training import CONFIG

__all__ = ["data", "references", "shared_references", "tiny"]  # fixtures


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
    assert speeds == [None, None, None, 100.0, None, 50.0, None]
    assert timer.seconds == 24.0


def test_a_cell_takes_turns_with_the_baseline(data: Path, tmp_path: Path) -> None:
    one = task(data, tmp_path, {"techniques.activation-checkpointing": "on"}, turn=0.001)
    alone = WORKLOAD.measure(one)
    assert alone.turns == {}
    found = WORKLOAD.measure(msgspec.structs.replace(one, baseline={}, directory=str(tmp_path / "turns")))
    pairs = found.turns[cell.SPEED]
    assert len(pairs) >= 2
    assert all(ours > 0 and theirs > 0 for ours, theirs in pairs)
    # The baseline changes neither the losses nor the memory of the cell.
    assert {name: found.figures[name] for name in (cell.LOSS, cell.MEMORY)} == {
        name: alone.figures[name] for name in (cell.LOSS, cell.MEMORY)
    }


def test_a_baseline_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    given = PartnerTask(CONFIG.as_dict(), str(tmp_path / "none"), str(tmp_path / "run"), 1, 0.1, None)
    with pytest.raises(TensorkeepError, match="the process of the baseline ended with exit code 1"):
        Partner(given)


@pytest.mark.parametrize("threads", [None, "3"])
def test_the_baseline_has_the_threads_of_a_cell_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in a rank
    environments = []

    def start(*arguments: Any, env: dict[str, str], **options: Any) -> None:
        environments.append(env)
        raise OSError

    monkeypatch.setattr("tensorkeep.bench.training.turns.subprocess.Popen", start)
    with pytest.raises(OSError):
        Partner(PartnerTask(CONFIG.as_dict(), "", "", 1, 0.1, threads))
    assert environments[0].get("OMP_NUM_THREADS") == threads
    assert "PATH" in environments[0]


@pytest.mark.slow
def test_a_cell_of_two_ranks_shares_the_memory(data: Path, tmp_path: Path) -> None:
    plain, split = ({"loop.batch_size": 4, "model.dropout": 0.0} for _ in range(2))
    split |= {"ranks": 2, "techniques.ddp": "on"}
    folders = [tmp_path / name for name in ("plain", "split")]
    for folder in folders:
        folder.mkdir()
    alone = WORKLOAD.measure(task(data, folders[0], plain))
    found = WORKLOAD.measure(msgspec.structs.replace(task(data, folders[1], split, turn=0.001), baseline=plain))
    assert found.status == "ok", found.reason
    assert "over 2 processes" in found.observed["ddp"]
    assert found.figures[cell.TOKENS] == alone.figures[cell.TOKENS]
    assert found.figures[cell.LOSS] == pytest.approx(alone.figures[cell.LOSS], rel=1e-5)
    assert found.figures[cell.MEMORY] < alone.figures[cell.MEMORY]
    assert len(found.turns[cell.SPEED]) >= 1


def test_ranks_have_one_outcome() -> None:
    figures = [{cell.SPEED: 5.0, cell.MEMORY: 1.0}, {cell.SPEED: 6.0, cell.MEMORY: 3.0}]
    found = joined([Outcome(figures=each) for each in figures])
    assert found.figures == {cell.SPEED: 5.0, cell.MEMORY: 3.0}
    lost = Outcome("failed", "RanksDisagreeError: another rank of the run has ended")
    assert joined([lost, Outcome("gate", "the loss")]).status == "gate"
    assert joined([Outcome(), lost]).status == "failed"


def test_the_number_of_ranks_is_checked() -> None:
    check_arm({"ranks": 2, "techniques.ddp": "on"})
    assert "torchrun" in str(missing_for({"techniques.ddp": "on"}))
    assert missing_for({"ranks": 2, "techniques.ddp": "on"}) is None
    for wrong in (0, "2", True, 2000):
        with pytest.raises(UsageError, match="ranks is"):
            check_arm({"ranks": wrong})
