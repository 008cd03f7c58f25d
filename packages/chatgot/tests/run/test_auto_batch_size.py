"""Batches that fill the memory: the choice, what is measured, and runs that compute the same as with a given size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.run import auto_batch_size
from chatgot.run.auto_batch_size import GpuMemory, Peaks, filled, gpu_memory, largest_batch
from chatgot.run.folder import RunFolder
from chatgot.run.resume import branch_point
from chatgot.run.setup import open_run
from chatgot.run.state import OpenRun
from chatgot.step.world import World
from conftest import Trained
from techniques.several_processes import group_of_one
from tensorkeep.errors import OutOfMemoryError, UsageError
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, check_same, lines, run

MEMORY = 1000
FILLING = CONFIG.changed(
    {"loop.batch_size": 3, "loop.gradient_accumulation_steps": 8, "loop.steps": 4, "loop.auto_batch_size": True}
)


class Meter(GpuMemory):
    """Stands in for the memory of a GPU: records calls, and returns what a test gives."""

    def __init__(self, available: int = MEMORY, peaks: Sequence[int] = (), allocated: Sequence[int] = ()):
        self.calls: list[str] = []
        self.available = lambda: available
        self.reset_peak = lambda: self.calls.append("reset")
        self.release = lambda: self.calls.append("release")
        self.peak = partial(self._next, "peak", iter(peaks))
        self.allocated = partial(self._next, "allocated", iter(allocated))

    def _next(self, call: str, values: Iterator[int]) -> int:
        self.calls.append(call)
        return next(values)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step take 100 bytes, and 70 for each sequence of a batch; return the sizes that are measured."""
    sizes: list[int] = []

    def measured(trial: Any, memory: GpuMemory) -> Peaks:
        with trial as built:
            sizes.append(built.config.loop.batch_size)
            assert built.config.loop.gradient_accumulation_steps == min(2, 24 // sizes[-1])
            assert not built.folder.exists()
            return Peaks(100 + 70 * built.config.loop.batch_size, 120)

    monkeypatch.setattr(auto_batch_size, "_measured", measured)
    monkeypatch.setattr("chatgot.run.setup.gpu_memory", lambda device: Meter())
    return sizes


@pytest.mark.parametrize(
    ("sequences", "base", "by_row", "update", "chosen"),
    [
        (24, 100, 70, 0, 8),
        (24, 0, 1, 0, 24),
        (24, 100, 300, 0, 2),
        (24, 100, 500, 0, 1),
        (24, 1000, 1, 0, None),
        # The update does not grow with the batch.
        (24, 10, 20, 899, 24),
        (24, 10, 20, 901, None),
        (7, 100, 70, 0, 7),
        (1, 100, 70, 0, 1),
        (1, 1000, 70, 0, None),
    ],
)
def test_the_largest_divisor_that_fits(sequences: int, base: int, by_row: int, update: int, chosen: int | None) -> None:
    assert largest_batch(sequences, MEMORY, lambda rows: Peaks(base + by_row * rows, update)) == chosen


def test_a_choice_that_does_not_fit_is_not_returned_and_without_a_trial_more_memory_is_left() -> None:
    """Predicted from two small batches, and wrong: memory grows with the square of the batch, or is not enough."""
    sizes: list[int] = []

    def squares(rows: int) -> Peaks | None:
        sizes.append(rows)
        return None if rows > 12 else Peaks(100 + 8 * rows * rows, 0)

    def linear(rows: int) -> Peaks:
        sizes.append(rows)
        return Peaks(20 + 70 * rows, 0)

    assert largest_batch(24, MEMORY, squares) == 8
    assert largest_batch(12, MEMORY, linear) == 12
    assert largest_batch(12, MEMORY, linear, tried=False) == 6
    assert sizes == [1, 2, 24, 12, 8, *(1, 2, 12), *(1, 2)]


def test_the_run_is_that_of_the_chosen_size(tmp_path: Path, data: Path, tried: list[int], trained: Trained) -> None:
    """Of 24 sequences in a step, 8 at once fit into nine tenths of the memory."""
    with open_run(FILLING, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        assert opened.notes == (
            "batches that fill the memory: loop.batch_size is 8, and loop.gradient_accumulation_steps 3, "
            "for 24 sequences a step",
        )
    assert tried == [1, 2, 8]
    trained(FILLING, tmp_path / "filled")
    config = RunFolder(tmp_path / "filled").record().config
    assert (config.loop.batch_size, config.loop.gradient_accumulation_steps) == (8, 3)
    chosen = FILLING.changed(
        {"loop.auto_batch_size": False, "loop.batch_size": 8, "loop.gradient_accumulation_steps": 3}
    )
    run(chosen, tmp_path / "given", data)
    check_same(tmp_path / "filled", tmp_path / "given")


def test_without_dropout_the_losses_are_those_of_any_batch_size(tmp_path: Path, data: Path, tried: list[int]) -> None:
    config = FILLING.changed({"model.dropout": 0.0, "loop.steps": 2})
    run(config, tmp_path / "filled", data)
    run(config.changed({"loop.auto_batch_size": False}), tmp_path / "given", data)
    for found, given in zip(lines(tmp_path / "filled", "train"), lines(tmp_path / "given", "train"), strict=True):
        assert found["loss"] == pytest.approx(given["loss"], rel=1e-5)


def test_a_resumed_run_keeps_the_choice(
    tmp_path: Path, data: Path, tried: list[int], monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    trained(FILLING, tmp_path / "whole")
    run(FILLING, tmp_path / "parts", data, stop_at=2)
    monkeypatch.setattr("chatgot.run.setup.gpu_memory", lambda device: pytest.fail("measured again"))
    run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", data, resume=True)
    check_same(tmp_path / "parts", tmp_path / "whole", "train")


@pytest.mark.integration
def test_ranks_with_data_of_their_own_have_batches_of_their_own(tmp_path: Path, data: Path, tried: list[int]) -> None:
    with group_of_one():
        run(FILLING.changed({"techniques.ddp": "on", "loop.steps": 1}), tmp_path / "run", data)
    assert RunFolder(tmp_path / "run").record().config.loop.batch_size == 8


def test_ranks_choose_together_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has less memory, and needs more. A step has 12 sequences for each."""

    class OfTwo(World):
        def all_gather(self, value: Any) -> list[Any]:
            other = [each + 50 for each in value] if isinstance(value, list) else value - 100
            return [value, other]

    sizes: list[int] = []

    def measured(trial: Any, memory: GpuMemory) -> Peaks:
        with trial as built:
            sizes.append(built.config.loop.batch_size)
            return Peaks(100 + 25 * built.config.loop.batch_size, 0)

    def build(config: Config) -> Any:
        return nullcontext(SimpleNamespace(replicas=2, config=config))

    monkeypatch.setattr(auto_batch_size, "_measured", measured)
    config, _ = filled(FILLING, Meter(), OfTwo(0, 2), build)
    assert sizes == [2, 4]
    # 200 bytes with a row on each rank, and 50 more with each other one, in 0.8 of 900 bytes.
    assert (config.loop.batch_size, config.loop.gradient_accumulation_steps) == (12, 2)


def test_too_little_memory_is_an_error_and_on_a_cpu_the_given_batch_size_is_used(
    tmp_path: Path, data: Path, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatgot.run.setup.gpu_memory", lambda device: Meter(available=150))
    message = "one sequence for each process does not fit into 150 B"
    with pytest.raises(OutOfMemoryError, match=message), built(FILLING, tmp_path / "run", data):
        pass
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert gpu_memory(torch.device("cpu")) is None
    with built(FILLING, tmp_path / "run", data) as opened:
        assert opened.config.loop.batch_size == 3


def test_techniques_that_depend_on_the_batch_size_are_refused() -> None:
    for technique in ("gradient-accumulation", "loss-curriculum", "pipeline-parallel"):
        on = {f"techniques.{technique}": "on"}
        message = rf"loop\.auto_batch_size is true, and {technique} needs the batch size"
        with case(technique), pytest.raises(UsageError, match=message):
            FILLING.changed({**on, "loop.auto_batch_size": True})
        # That of a recipe gives way.
        assert not FILLING.changed(on).loop.auto_batch_size, technique
    # A mode of compile that cannot accumulate is refused before the trials.
    config = FILLING.changed({"techniques.compile.mode": "reduce-overhead"})
    with pytest.raises(UsageError, match='compile in the mode "reduce-overhead" cannot accumulate') as raised:
        filled(config, Meter(), World(), lambda config: pytest.fail("a step was tried"))
    assert raised.value.remedy == "give loop.batch_size, loop.auto_batch_size false, or another mode"


@contextmanager
def built(config: Config, folder: Path, data: Path) -> Iterator[OpenRun]:
    with open_run(config, RunFolder(folder), Dataset.open(data)) as opened:
        yield opened


def test_a_whole_step_is_measured(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gradient is computed before the optimizers have states, which are added to its peak."""
    memory = Meter(peaks=[500, 300, 520], allocated=[200, 260])
    config = FILLING.changed({"loop.auto_batch_size": False})
    with built(config, tmp_path / "run", data) as opened:
        found = auto_batch_size._measured(nullcontext(opened), memory)
        assert all(state for optimizer in opened.optimizers.values() for state in optimizer.state.values())
        # Two gradients, of eight batches each.
        assert opened.batches.position == 16
    assert found == Peaks(gradient=560, update=300)
    assert memory.calls == ["reset", "peak", "allocated", "reset", "peak", "allocated", "reset", "peak"]

    def fail(opened: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    # A batch that runs out of memory does not fit; other errors are raised.
    monkeypatch.setattr(auto_batch_size, "_add_gradients", fail)
    assert auto_batch_size._measured(built(FILLING, tmp_path / "full", data), Meter()) is None
    monkeypatch.setattr(auto_batch_size, "_add_gradients", lambda opened: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        auto_batch_size._measured(built(FILLING, tmp_path / "other", data), Meter())


def test_without_effect_is_noted_for_those_who_asked(tmp_path: Path, data: Path) -> None:
    def notes(config: Config, folder: str, **how: Any) -> tuple[str, ...]:
        with open_run(config, RunFolder(tmp_path / folder), Dataset.open(data), **how) as opened:
            return tuple(note for note in opened.notes if note.startswith("loop.auto_batch_size"))

    plain = FILLING.changed({"loop.auto_batch_size": False})
    assert notes(FILLING, "filled") == ("loop.auto_batch_size has no effect: cpu memory is not only training's",)
    run(FILLING, tmp_path / "filled", data, resume=True)
    run(plain, tmp_path / "plain", data)
    kept = "loop.auto_batch_size has no effect: a resumed run keeps its batches, and so does a branch"
    assert notes(FILLING, "plain", resume=True) == (kept,)
    # From now on it is a setting of the run.
    assert notes(FILLING, "plain", resume=True) == notes(FILLING, "filled", resume=True) == ()
    longer = {"loop.steps": 9}
    assert notes(FILLING.changed(longer), "second", branch=branch_point(tmp_path / "filled")) == ()
    assert notes(FILLING.changed(longer), "third", branch=branch_point(tmp_path / "plain")) == (kept,)
