"""A training run that is killed at an exact point resumes and ends like an uninterrupted run, bit for bit.

Each run is a process of its own.
"""

import itertools
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import forked
import tensorkeep.train.run.setup
from faults import injection as faults
from forked import ended
from tensorkeep import CheckpointManager
from tensorkeep.io import commit
from tensorkeep.io.temporaries import SUFFIX
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.generate import Sampling
from tensorkeep.train.loop import train
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.run.folder import LOG, RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import METRIC, Run

CONFIG = Config(
    recipe="tiny", model=ModelConfig(vocab_size=1, context_length=16, n_layers=2, n_heads=2, d_model=16, dropout=0.1)
).changed(
    {
        "loop.steps": 12,
        "loop.batch_size": 5,
        "loop.threads": 1,
        "schedule.warmup_steps": 2,
        "eval.every": 3,
        "sample.every": 5,
        "sample.prompt": "the",
        "sample.tokens": 8,
        "checkpoint.every": 3,
        "log.every": 1,
    }
)
VARIANTS: dict[str, dict[str, object]] = {
    "AdamW, averaged, random order": {"ema.decay": 0.9, "data.order": "random", "loop.accumulate": 3},
    "Muon, shuffled order": {"optim.name": "muon", "data.order": "shuffled", "loop.accumulate": 3},
    "one batch a step, differences": {"data.order": "shuffled", "checkpoint.incremental": "delta"},
}


# How a run is killed: each function arranges it


def die(run: Run) -> None:
    """Kill this process once the last save is durable, so that the step to resume from is known."""
    run.manager.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(run: Run) -> None:
    """Before the last of three micro-batches of step 8, when the gradients hold the first two."""
    last, real = 8 * run.config.loop.accumulate - 1, run.batches.at

    def at(position: int) -> tuple[torch.Tensor, torch.Tensor]:
        if position == last:
            die(run)
        return real(position)

    run.batches.at = at


def in_an_evaluation(run: Run) -> None:
    """In the evaluation of step 9, before its save, while the model holds the averaged weights."""
    real = run.model.loss

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if run.progress.step == 9 and not run.model.training:
            die(run)
        return real(inputs, targets)

    run.model.loss = loss


def in_a_sample(run: Run) -> None:
    """After the third token of the sample of step 10."""
    real, drawn = Sampling.choose, itertools.count(1)

    def choose(sampling: Sampling, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        if run.progress.step == 10 and next(drawn) == 4:
            die(run)
        return real(sampling, logits, *rest)

    Sampling.choose = choose


def in_the_writing_of_a_save(run: Run) -> None:
    """After half of the first block of step 9 was written, in the background."""

    def torn(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            faults.write_short(name, real, args, kwargs)
        finally:
            faults.die(name, real, args, kwargs)

    _during_the_save(run, lambda: _replace(os, "pwrite", torn))


def after_the_rename_of_a_save(run: Run) -> None:
    """After the rename that makes step 9 visible, before the manager returns."""
    _during_the_save(run, lambda: _replace(commit, "_rename", faults.die_after))


def after_a_save(run: Run) -> None:
    """Right after step 9 became durable."""
    real = run.manager.save

    def save(step: int, *args: Any, **kwargs: Any) -> Any:
        pending = real(step, *args, **kwargs)
        if step == 9:
            die(run)
        return pending

    run.manager.save = save


def _during_the_save(run: Run, arrange: Callable[[], None]) -> None:
    real = run.manager.save

    def save(step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 9:
            run.manager.wait()  # the previous save is not affected
            arrange()
        return real(step, *args, **kwargs)

    run.manager.save = save


def _replace(module: Any, name: str, action: faults.Action) -> None:
    real = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: action(name, real, args, kwargs))


def _at_the_log(action: faults.Action) -> None:
    real = os.replace

    def replace(*names: str) -> None:
        if Path(names[1]).name == LOG:
            action("replace", real, names, {})
        else:
            real(*names)

    os.replace = replace


class Death(NamedTuple):
    """The way a run is killed, and the step of its last complete checkpoint."""

    arrange: Callable[[Run], None]
    saved: int


DEATHS = {
    "in a step": Death(in_a_step, 6),
    "in an evaluation": Death(in_an_evaluation, 6),
    "in a sample": Death(in_a_sample, 9),
    "in the writing of a save": Death(in_the_writing_of_a_save, 6),
    "after the rename of a save": Death(after_the_rename_of_a_save, 9),
    "after a save": Death(after_a_save, 9),
}
DEATHS_AT_THE_LOG = {"before the new log": faults.die, "after the new log": faults.die_after}


# The process of a run


class Silence:
    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


def live(config: dict[str, Any], folder: Path, data: Path, death: str | None) -> None:
    """Train, from the start or the last checkpoint, until the end or until the process is killed."""
    tensorkeep.train.run.setup.measured_peak = lambda *args, **kwargs: 1e9
    warnings.simplefilter("error")
    if death in DEATHS_AT_THE_LOG:
        _at_the_log(DEATHS_AT_THE_LOG[death])
    with open_run(Config.from_dict(config), RunFolder(folder), Dataset.open(data), resume=True) as run:
        if death in DEATHS:
            DEATHS[death].arrange(run)
        train(run, Silence())


# The tests


class Runs:
    """Starts runs in processes of their own."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def __call__(self, config: Config, folder: Path, death: str | None = None) -> int:
        """Return the exit code of a run: 0, or minus the signal that killed it."""
        output = folder.with_name("output")
        code = ended(forked.start(live, config.as_dict(), folder, self._data, death, output=output), 60)
        print(output.read_text())  # pytest shows it if the test fails
        return code


class Whole(NamedTuple):
    """An uninterrupted run to compare with."""

    config: Config
    folder: Path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return Runs(folder / "prepared")


@pytest.fixture(scope="module", params=VARIANTS)
def whole(request: pytest.FixtureRequest, start: Runs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    config, folder = CONFIG.changed(VARIANTS[request.param]), tmp_path_factory.mktemp("whole") / "run"
    assert start(config, folder) == 0
    assert {line["kind"] for line in trace(folder)} == {"train", "evaluate", "sample"}
    assert latest(folder) == 12
    return Whole(config, folder)


def trace(folder: Path) -> list[dict[str, Any]]:
    """Return the log's losses, gradient norms, learning rates and samples, without anything that depends on time."""
    exact = ("step", "kind", "loss", "gradient_norm", "learning_rate", METRIC, "best", "text")
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [
        {key: line[key] for key in exact if key in line}
        for line in lines
        if line["kind"] in ("train", "evaluate", "sample")
    ]


def latest(folder: Path) -> int | None:
    step = CheckpointManager(folder / "checkpoints").latest()
    return None if step is None else step.number


def kept(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(step.number, dict(step.metrics)) for step in CheckpointManager(folder / "checkpoints").steps()]


def last_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = CheckpointManager(folder / "checkpoints").restore()
    # The generators of numpy and of Python are neither seeded nor used.
    for unused in ("numpy", "python"):
        state["rng"].pop(unused, None)
    return state


def check_same(folder: Path, whole: Path) -> None:
    assert trace(folder) == trace(whole)
    assert kept(folder) == kept(whole)
    assert difference(last_state(folder), last_state(whole)) is None
    assert not list(folder.rglob(f"*{SUFFIX}"))


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_run_resumes_exactly(
    tmp_path: Path, start: Runs, whole: Whole, death: str, record_property: Any
) -> None:
    run = tmp_path / "run"
    assert start(whole.config, run, death) == -signal.SIGKILL
    assert latest(run) == DEATHS[death].saved
    assert start(whole.config, run) == 0
    check_same(run, whole.folder)
    record_property("cases", 1)


def test_a_run_killed_while_its_log_is_rewritten_resumes_exactly(
    tmp_path: Path, start: Runs, whole: Whole, record_property: Any
) -> None:
    run = tmp_path / "run"
    for death, last in {"in a step": 7, "before the new log": 7, "after the new log": 6}.items():
        assert start(whole.config, run, death) == -signal.SIGKILL
        assert max(line["step"] for line in trace(run)) == last
    assert start(whole.config, run) == 0
    check_same(run, whole.folder)
    record_property("cases", 3)
