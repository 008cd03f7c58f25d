"""A training run that is killed at an exact point resumes and ends like an uninterrupted run, bit for bit."""

import itertools
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import chatgot.run.setup
import forked
import tiny_training
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.generate import Sampling
from chatgot.loop import train
from chatgot.run.folder import LOG, RunFolder
from chatgot.run.resume import branch_point
from chatgot.run.setup import open_run
from chatgot.step.state import StepState
from chatgot.techniques import mixed_precision
from faults import injection as faults
from faults.training_variants import ORIGIN, VARIANTS, Variant, prepare_data
from forked import ended
from tensorkeep import CheckpointManager
from tensorkeep.storage import commit
from tensorkeep.storage.commit import SUFFIX
from tiers import exhaustive
from tiny_training import Witness, lines

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

KINDS = ("train", "evaluate", "sample")
"""The lines of the log that two runs have in common."""

# How a run is killed: each function arranges it


def die(run: StepState) -> None:
    """Kill this process once the last save is durable, so that the step to resume from is known."""
    run.manager.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(run: StepState) -> None:
    """Before the last micro-batch of step 8, when the gradients hold those before it."""
    computed = itertools.count(1)

    def count(*_: object) -> None:
        if (
            run.progress.step == 8
            and torch.is_grad_enabled()
            and next(computed) == run.config.loop.gradient_accumulation_steps
        ):
            die(run)

    run.model.tokens.register_forward_pre_hook(count)


def in_an_evaluation(run: StepState) -> None:
    """In the evaluation of step 9, before its save, while the model holds the averaged weights."""

    def evaluates(*_: object) -> None:
        if run.progress.step == 9 and not run.model.training:
            die(run)

    run.model.tokens.register_forward_pre_hook(evaluates)


def in_a_sample(run: StepState) -> None:
    """After the third token of the sample of step 10."""
    real, drawn = Sampling.choose, itertools.count(1)

    def choose(sampling: Sampling, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        if run.progress.step == 10 and next(drawn) == 4:
            die(run)
        return real(sampling, logits, *rest)

    Sampling.choose = choose


def in_the_writing_of_a_save(run: StepState) -> None:
    """After half of the first block of step 9 was written, in the background."""

    def torn(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            faults.write_short(name, real, args, kwargs)
        finally:
            faults.die(name, real, args, kwargs)

    _during_the_save(run, lambda: _replace(os, "pwrite", torn))


def after_the_rename_of_a_save(run: StepState) -> None:
    """After the rename that makes step 9 visible, before the manager returns."""
    _during_the_save(run, lambda: _replace(commit, "_rename", faults.die_after))


def after_a_save(run: StepState) -> None:
    """Right after step 9 became durable."""
    real = run.manager.save

    def save(step: int, *args: Any, **kwargs: Any) -> Any:
        pending = real(step, *args, **kwargs)
        if step == 9:
            die(run)
        return pending

    run.manager.save = save


def _during_the_save(run: StepState, arrange: Callable[[], None]) -> None:
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

    arrange: Callable[[StepState], None]
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


def live(config: dict[str, Any], folder: Path, data: Path, death: str | None, branch: Path | None) -> None:
    """Train, from the start or the last checkpoint, until the end or until the process is killed."""
    for module in (chatgot.run.setup, mixed_precision):
        module.measured_peak = lambda *args, **kwargs: 1e9
    warnings.simplefilter("error")
    if death in DEATHS_AT_THE_LOG:
        _at_the_log(DEATHS_AT_THE_LOG[death])
    point = None if branch is None else branch_point(branch)
    with open_run(Config.from_dict(config), RunFolder(folder), Dataset.open(data), resume=True, branch=point) as run:
        if death in DEATHS:
            DEATHS[death].arrange(run)
        train(run, Witness())


# The tests


class Whole:
    """An uninterrupted run to compare with, in the folder ``run``, and the same run in others.

    A leg or a branch has its former steps in the folder ``origin``.
    """

    def __init__(self, variant: Variant, data: Path, folder: Path) -> None:
        self.config = variant.config
        self.folder = folder / "run"
        self._variant, self._data, self._origin = variant, data, folder / "origin"
        if variant.begins != "new":
            assert self._train(self.config.changed(ORIGIN), self._origin) == 0
        assert self.start(self.folder) == 0

    def start(self, folder: Path, death: str | None = None) -> int:
        """Start or resume the run in a process of its own; return 0, or minus the signal that killed it."""
        if self._variant.begins == "leg" and not folder.exists():
            shutil.copytree(self._origin, folder)
        return self._train(self.config, folder, death, self._origin if self._variant.begins == "branch" else None)

    def _train(self, config: Config, folder: Path, death: str | None = None, branch: Path | None = None) -> int:
        output = folder.with_name("output")
        process = forked.start(live, config.as_dict(), folder, self._data, death, branch, output=output)
        code = ended(process)
        print(output.read_text())  # pytest shows it if the test fails
        return code


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    variant = VARIANTS[request.param]
    found = Whole(variant, data[variant.data], tmp_path_factory.mktemp("whole"))
    assert {line["kind"] for line in lines(found.folder, *KINDS)} == {*KINDS}
    assert latest(found.folder) == 12
    return found


def latest(folder: Path) -> int | None:
    step = CheckpointManager(folder / "checkpoints").latest()
    return None if step is None else step.number


def check_same(folder: Path, whole: Path) -> None:
    tiny_training.check_same(folder, whole, *KINDS)
    kept, expected = (CheckpointManager(each / "checkpoints").steps() for each in (folder, whole))
    assert [(step.number, step.metrics) for step in kept] == [(step.number, step.metrics) for step in expected]
    assert not list(folder.rglob(f"*{SUFFIX}"))


IN_THE_LOG = ("in a step", *DEATHS_AT_THE_LOG)
LIVES = [
    # Nearly every death, each after the run was resumed from the one before; `tests/run` resumes
    # all kinds of runs.
    (
        "AdamW, averaged, random order",
        (*("in a step", "in an evaluation", "in the writing of a save"), "after the rename of a save", "in a sample")
        + (*DEATHS_AT_THE_LOG,),
    ),
    # Each kind of run and each death.
    *exhaustive(*itertools.product(VARIANTS, (*((death,) for death in DEATHS), IN_THE_LOG))),
]


@pytest.mark.parametrize(("whole", "deaths"), LIVES, indirect=["whole"])
def test_a_killed_run_resumes_exactly(tmp_path: Path, whole: Whole, deaths: Any, record_property: Any) -> None:
    run = tmp_path / "run"
    for death in deaths:
        assert whole.start(run, death) == -signal.SIGKILL
        saved = latest(run)
        if death in DEATHS:
            assert saved == DEATHS[death].saved
        else:
            # The log ends after the last checkpoint until it is rewritten.
            assert (max(line["step"] for line in lines(run, *KINDS)) > saved) == (death == "before the new log")
    assert whole.start(run) == 0
    check_same(run, whole.folder)
    record_property("cases", len(deaths))
