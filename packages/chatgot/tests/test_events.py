"""Events of a run in logs and on a terminal: saves, the best step, memory, suggested learning rates."""

import io
import json
import math
import mmap
import random
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from chatgot.cli.train import ProgressLines, document, print_summary
from chatgot.data.dataset import Dataset
from chatgot.loop import TrainingSummary, train
from chatgot.optim.schedules import RangeTest
from chatgot.run.folder import METRIC, RunFolder
from chatgot.run.log import TensorBoard, TrainingLog
from chatgot.run.setup import open_run
from chatgot.step.device import peak_memory
from chatgot.step.state import TrainingProgress
from tensorkeep import CheckpointManager
from tensorkeep.checkpoint.background import SaveJob
from tensorkeep.cli.output import Output, counter
from tensorkeep.errors import StoreError
from tensorkeep.machine import resident_bytes
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, Trained, Witness, lines, poison, run

TRAINED = {"loss": 1.5, "tokens_per_second": 2000.0, "mfu": 0.25, "peak_memory_bytes": 3_000_000}
SAVED = {"path": "x", "durable_seconds": 0.5, "stall_seconds": 0.01, "new_bytes": 2_000_000}


def test_save_is_reported_when_it_is_durable(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), SaveJob.write

    def write_after_the_gate(job: SaveJob) -> None:
        gate.wait(60)
        write(job)

    class LetsThrough(Witness):
        """Lets what is saved be written, once step 6 has been done."""

        def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
            super().on_event(step, kind, values)
            if (step, kind) == (6, "train"):
                gate.set()
                for thread in threading.enumerate():
                    if thread.name == "tensorkeep-save":
                        thread.join()

    monkeypatch.setattr(SaveJob, "write", write_after_the_gate)
    witness = LetsThrough()
    run(CONFIG.changed({"loop.steps": 7, "checkpoint.every": 4}), tmp_path / "run", data, listener=witness)
    reported = [(step, kind) for step, kind, _ in witness.seen]
    # The step with an evaluation and a save is saved once.
    ends = [(4, "save"), (7, "train"), (7, "evaluate"), (7, "save")]
    assert reported == [*((step, "train") for step in range(1, 7)), *ends]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in logged] == reported
    save = logged[6]
    assert save["path"].endswith("step-000004")
    assert save["new_bytes"] > 0
    assert save.keys() == {"step", "kind", "path", "stall_seconds", "durable_seconds", "new_bytes"}


def test_new_best_loss_is_saved_at_its_own_step(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for keep_best, saved, kept in ((1, [4, 8, 12], [(8, 2.0), (12, 2.5)]), (0, [12], [(12, 2.5)])):
        losses, witness, folder = iter([3.0, 2.0, 2.5]), Witness(), tmp_path / str(keep_best)
        monkeypatch.setattr("chatgot.loop.validation_loss", lambda opened, losses=losses: next(losses))
        config = CONFIG.changed({"eval.every": 4, "checkpoint.keep_last": 1, "checkpoint.keep_best": keep_best})
        run(config, folder, data, listener=witness)
        assert witness.of("save") == saved, keep_best
        steps = CheckpointManager(folder / "checkpoints").steps()
        assert [(step.number, step.metrics[METRIC]) for step in steps] == kept, keep_best


def ended(
    config: Any, folder: Path, data: Path, *, resume: bool = False
) -> tuple[dict[str, Any], TrainingSummary, str]:
    """Return the end of a run: as JSON, as an object, and as printed."""
    with open_run(config, RunFolder(folder), Dataset.open(data), resume=resume) as opened:
        summary = train(opened, Witness())
        shown = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", shown)
            Output(json=True).show(document(opened, summary), lambda: None)
            as_json = json.loads(shown.getvalue())
            print_summary(opened, summary)
    return as_json, summary, shown.getvalue().rpartition("}\n")[2]


def test_resuming_an_ended_run_reports_that_nothing_was_left_to_do(tmp_path: Path, data: Path) -> None:
    first, _, shown = ended(CONFIG, tmp_path / "my run", data)
    assert (first["steps"], first["reason"], first["suggested_learning_rate"]) == (12, "done", None)
    for text in ("tokens/s", "peak memory", f"next: tensorkeep generate '{tmp_path / 'my run'}' --prompt TEXT"):
        assert text in shown
    for text in ("nothing was left", "range test"):
        assert text not in shown
    again, summary, shown = ended(CONFIG, tmp_path / "my run", data, resume=True)
    assert (again["steps"], again["reason"], again["tokens_per_second"], again["mfu"]) == (0, "done", None, None)
    assert again["loss"] == first["loss"] == summary.loss
    assert "done, after step 12; no steps were left" in shown
    assert "nan" not in shown
    assert "tokens/s" not in shown
    # A run of one step has no speed.
    document, _, shown = ended(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", data)
    assert document["tokens_per_second"] is None
    assert "nan" not in shown
    assert "first step" in shown


def test_mostly_evaluating_advises_less_data(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(CONFIG, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        summary = train(opened, Witness())
        for evaluating, advised in ((30.0, True), (4.0, False)):
            print_summary(opened, replace(summary, seconds={"evaluate": evaluating, "train": 3.0}))
            assert ("--eval.tokens 26" in capsys.readouterr().out) is advised


def test_peak_memory_is_in_the_log_and_the_summary_and_stays_when_it_is_freed(tmp_path: Path, trained: Trained) -> None:
    summary = trained(CONFIG, tmp_path / "run")
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    peaks = [line["peak_memory_bytes"] for line in logged if line["kind"] == "train"]
    assert len(peaks) == 12
    assert min(*peaks, summary.peak_memory_bytes) > 1024**2
    cpu, more = torch.device("cpu"), 64 * 1024**2
    before = peak_memory(cpu)
    # Not from malloc, which may have kept as much.
    with mmap.mmap(-1, before - resident_bytes() + more) as held:
        np.frombuffer(held, np.uint8).fill(1)
        assert peak_memory(cpu) > before + more // 2
    # Exactly the same it need not be: the kernel counts pages in steps.
    assert peak_memory(cpu) > before + more // 2


def observed(loss: Callable[[float], float]) -> RangeTest:
    found, rates = RangeTest(), [1e-5 * 1e5 ** (number / 499) for number in range(500)]
    for rate in rates:
        if not found.over:
            found.add(rate, loss(rate), steps=len(rates))
    return found


def test_a_range_test_suggests_a_tenth_of_the_rate_with_the_lowest_loss() -> None:
    noise = random.Random(0)

    def loss(rate: float) -> float:  # lowest at a rate of 0.022
        return 4 - 2 / (1 + 1e-3 / rate) + (rate / 0.1) ** 2 + noise.gauss(0, 0.1)

    found = observed(loss)
    assert found.over
    suggestion = found.suggestion()
    assert suggestion is not None
    assert 1e-3 < suggestion < 4e-3
    # A loss that never rose gives no suggestion, and one that is not finite ends the test.
    assert observed(lambda rate: 4 - 2 / (1 + 1e-3 / rate)).suggestion() is None
    assert RangeTest().suggestion() is None
    # A loss that jumps at the end of a long test has risen, though the average has not followed yet.
    jumps = observed(lambda rate: 3.0 if rate < 0.98 else 7.0)
    assert not jumps.over and jumps.smoothed < 3.5
    assert jumps.suggestion() is not None
    assert observed(lambda rate: 3.0 if rate < 0.5 else 13.0).over
    # Not finite from the beginning: there is no rate to suggest, and the test is over.
    nothing = observed(lambda rate: math.nan)
    assert (nothing.suggestion(), nothing.over) == (None, True)
    found = observed(lambda rate: 3 - math.log10(rate) / 10 if rate < 0.1 else math.nan)
    assert found.over
    assert found.suggestion() == pytest.approx(0.01, rel=0.05)


def test_earlier_versions_know_the_progress_of_a_run_without_a_range_test() -> None:
    progress = TrainingProgress(step=3)
    assert progress.state_dict()["range_test"].keys() == {"steps", "smoothed", "lowest", "lowest_rate", "over"}
    other = TrainingProgress()
    other.load_state_dict(progress.state_dict())
    assert other == progress
    progress.range_test.add(0.1, 2.0, steps=4)
    other.load_state_dict(progress.state_dict())
    assert other == progress


RANGE = CONFIG.changed({"schedule.name": "range", "schedule.final": 1e-5, "optim.lr": 30.0, "loop.steps": 30})


@pytest.mark.exhaustive
def test_resumed_range_test_gives_the_same_suggestion(tmp_path: Path, data: Path, trained: Trained) -> None:
    whole = trained(RANGE, tmp_path / "whole")
    assert whole.suggested_learning_rate is not None
    reported = lines(tmp_path / "whole", "suggestion")
    assert [line["learning_rate"] for line in reported] == [whole.suggested_learning_rate]
    for stop_at in (1, 13):
        folder = tmp_path / str(stop_at)
        with case(stop_at):
            run(RANGE, folder, data, stop_at=stop_at)
            parts = run(RANGE, folder, data, resume=True)
            assert parts.suggested_learning_rate == whole.suggested_learning_rate
            assert lines(folder) == lines(tmp_path / "whole")
            again = run(RANGE, folder, data, resume=True)
            assert (again.steps, again.suggested_learning_rate) == (0, whole.suggested_learning_rate)


def test_diverging_range_test_ends_with_a_suggestion(tmp_path: Path, data: Path) -> None:
    summary = run(RANGE, tmp_path / "run", data, arrange=lambda opened: poison(opened, [9]))
    assert (summary.reason, summary.step) == ("early stop", 9)
    assert summary.suggested_learning_rate is not None
    document, _, shown = ended(RANGE, tmp_path / "run", data, resume=True)
    assert document["suggested_learning_rate"] == summary.suggested_learning_rate
    assert f"--optim.lr {summary.suggested_learning_rate:.1g}" in shown


def test_step_lines_are_throttled_and_other_lines_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    time = 100.0
    shown = ProgressLines(2000, now=lambda: time)
    for step in range(10, 200, 10):
        shown.on_event(step, "train", TRAINED)
        time += 1
        if step % 50 == 0:
            shown.on_event(step, "evaluate", {METRIC: 2.0, "best": 1.5})
    shown.on_event(190, "save", SAVED)
    shown.on_event(190, "save", SAVED)
    shown.on_event(190, "suggestion", {"learning_rate": None, "diverged": False})
    errors = capsys.readouterr().err.splitlines()
    reported = [line.split()[1] for line in errors if "loss 1.5000" in line]
    assert reported == ["10/2000", "60/2000", "110/2000", "160/2000"]
    assert errors[0] == "step   10/2000  loss 1.5000  2,000 tokens/s  MFU 25%  3.00 MB"
    assert [line.split()[1] for line in errors if "validation" in line] == ["50/2000", "100/2000", "150/2000"]
    assert sum("saved in 500 ms, training waited 10.0 ms; 2.00 MB written" in line for line in errors) == 2
    assert "no suggestion: the average loss did not rise" in errors[-1]
    shown.on_event(190, "suggestion", {"learning_rate": None, "diverged": True})
    shown = ProgressLines(2000, now=lambda: time)
    shown.on_event(200, "train", TRAINED | {"mfu": 1.0, "outran_peak": True})
    diverged, outran = capsys.readouterr().err.splitlines()
    assert "no suggestion: the loss was not finite" in diverged
    assert "MFU at most 100%" in outran


def test_progress_bar_shows_steps_below_other_events() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, color_system=None, _environ={"TERM": "xterm"})
    with counter(console, total=2000, done=500) as bar:
        shown = ProgressLines(2000, bar)
        shown.on_event(510, "train", {name: TRAINED[name] for name in ("loss", "peak_memory_bytes")})
        shown.on_event(520, "train", TRAINED)
        shown.on_event(520, "evaluate", {METRIC: 2.0, "best": 1.5})
        shown.on_event(520, "sample", {"text": "a [red]fox[/red]\n\x1b[2Jgone"})
        shown.on_event(510, "save", SAVED)
        shown.on_event(520, "suggestion", {"learning_rate": 0.0031, "diverged": True})
    seen = file.getvalue()
    for text in (
        "520/2000",
        "loss 1.5000  2,000 tokens/s  MFU 25%  3.00 MB",
        "step  520/2000  validation loss 2.0000 (best 1.5000)",
        "    a [red]fox[/red]",
        "    \\x1b[2Jgone",
        "step  510/2000  saved in 500 ms",
        "--optim.lr 0.003",
    ):
        assert text in seen, text
    assert "\x1b[2Jgone" not in seen


def test_tensorboard_failure_is_reported_but_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        """Stands in for TensorBoard's writer on a disk that is full."""

        def __init__(self, folder: str, *, purge_step: int) -> None:
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name == "train/loss":
                raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(5, "Input/output error")

    pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Refuses)
    with TrainingLog(tmp_path / "log.jsonl"):
        pass
    assert list(tmp_path.iterdir()) == []  # It was not begun.
    for name, message in (("loss", "No space left"), ("rate", "Input/output error")):
        board = TrainingLog(tmp_path / "log.jsonl", [TensorBoard(RunFolder(tmp_path))])
        with pytest.raises(StoreError, match=f"cannot write the log: {message}") as raised, board as log:
            log.begin(0)
            log.write(1, "train", **{name: 2.0})
        assert name == "rate" or "Input/output error" in raised.value.__notes__[0]


def test_log_and_tensorboard_have_each_step_and_save_once(tmp_path: Path, data: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = CONFIG.changed({"checkpoint.every": 3, "log.tensorboard": True})
    run(config, tmp_path / "run", data, stop_at=7)
    assert [line["step"] for line in lines(tmp_path / "run", "save")] == [3, 6, 7]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000007")
    run(config, tmp_path / "run", data, resume=True)
    assert [line["step"] for line in lines(tmp_path / "run", "save")] == [3, 6, 9, 12]
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in found.Scalars("save/new_bytes")] == [3, 6, 9, 12]
