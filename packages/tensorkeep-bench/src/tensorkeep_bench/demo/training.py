"""Part 4 of the demo: train a small GPT, kill it, resume it, and compare its losses with an unbroken run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatgot.data.prepare import PreparedData, prepare
from chatgot.run.folder import RunFolder
from tensorkeep import CheckpointManager, Step
from tensorkeep.errors import PathLike, StoreError, TensorkeepError
from tensorkeep.ext import counted
from tensorkeep.ext.checkpoint import lines_of

RECIPE = "shakespeare-char-cpu"

_POLL_SECONDS = 0.05
_USUAL = ("--eval.batches", "4")
_QUICK = ("--loop.batch_size", "8", "--eval.batches", "1")


class KilledRun(NamedTuple):
    step: int
    saved: Step
    losses: dict[int, float]


@dataclass(frozen=True, slots=True)
class RepeatedSteps:
    first: int
    last: int
    count: int
    different: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.count > 0 and not self.different


class TrainingDemo:
    def __init__(
        self, folder: PathLike, *, steps: int, every: int, source: str = "stdlib", settings: Sequence[str] = _USUAL
    ) -> None:
        self.folder = RunFolder(folder)
        self._steps = steps
        self._every = every
        self._source = source
        self._settings = settings

    def prepare(self) -> PreparedData:
        self.folder.check_new()
        return prepare(self._source, self.folder.data, tokenizer="char", overwrite=True)

    def train(self, progress: Callable[[str], None]) -> dict[str, Any]:
        return self._finish(self._start(), "training without a break", progress)

    def train_until_killed(self, progress: Callable[[str], None]) -> KilledRun:
        # A random step: the promise holds wherever the run is killed.
        least = random.randint(self._steps * 2 // 5, self._steps * 3 // 5)
        process = self._start()
        try:
            while (killed := self._stop_if_due(process, least)) is None:
                progress(f"training: step {max(self.losses(), default=0)} of {self._steps}, to be killed at random")
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.communicate()
        return killed

    def _stop_if_due(self, process: subprocess.Popen[str], least: int) -> KilledRun | None:
        _check_running(process)
        if self._state_if_killed(least) is None:
            return None
        # Stopped before it is killed: a run that continues may save again after its log was read, and have no steps to
        # repeat.
        os.kill(process.pid, signal.SIGSTOP)
        # Wait until it has stopped. WNOWAIT leaves the exit status to Popen, if it has ended instead.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        _check_running(process)
        killed = self._state_if_killed(least)
        if killed is None:
            # It saved again before it stopped.
            os.kill(process.pid, signal.SIGCONT)
        return killed

    def _state_if_killed(self, least: int) -> KilledRun | None:
        losses, saved = self.losses(), self._last_saved()
        step = max(losses, default=0)
        # Right after a checkpoint there would be no steps to repeat, and nothing to compare.
        if saved is None or step < max(least, saved.number + max(1, self._every // 3)):
            return None
        return KilledRun(step, saved, losses)

    def resume(self, progress: Callable[[str], None]) -> dict[str, Any]:
        return self._finish(self._start("--resume"), "resumed", progress)

    def _finish(self, process: subprocess.Popen[str], doing: str, progress: Callable[[str], None]) -> dict[str, Any]:
        try:
            while process.poll() is None:
                progress(f"{doing}: step {max(self.losses(), default=0)} of {self._steps}")
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            output, _ = process.communicate()
        if process.returncode:
            raise _failed(process)
        summary: dict[str, Any] = json.loads(output)
        return summary

    def repeated(self, killed: KilledRun) -> RepeatedSteps:
        again = self.losses()
        # The steps after the checkpoint were computed before the kill and again after it.
        steps = [step for step in killed.losses if step > killed.saved.number]
        different = tuple(step for step in steps if again.get(step) != killed.losses[step])
        return RepeatedSteps(killed.saved.number + 1, killed.step, len(steps), different)

    def last_checkpoint(self) -> Step:
        step = self._last_saved()
        if step is None:
            raise AssertionError("the run has no checkpoint")
        return step

    def _start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tensorkeep", "train", RECIPE, "--out", str(self.folder.path), "--json", *more]
        # A resumed run has its settings from its folder.
        if not more:
            command += ["--data", str(self.folder.data), "--loop.steps", str(self._steps), "--log.every", "1"]
            command += ["--checkpoint.every", str(self._every), "--eval.every", str(self._every)]
            command += self._settings
        # Errors go to a file, because nothing reads a pipe while the process runs.
        with (self.folder.path / "errors.txt").open("w") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _last_saved(self) -> Step | None:
        try:
            steps = CheckpointManager(self.folder.checkpoints).steps()
        except TensorkeepError:
            return None
        return steps[-1] if steps else None

    def losses(self) -> dict[int, float]:
        log = self.folder.log
        lines = lines_of(log.read_bytes()) if log.exists() else ()
        # The later line wins for a step that was computed again.
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    unbroken: list[float]
    resumed: list[float]
    killed_at: int
    resumed_from: int

    @property
    def same(self) -> int:
        return sum(one == other for one, other in zip(self.unbroken, self.resumed, strict=False))

    @property
    def exact(self) -> bool:
        # A run that lost steps is not exact, even if all its losses are the same.
        return len(self.unbroken) == len(self.resumed) == self.same > 0

    def text(self) -> str:
        verdict = f"all {self.same} losses are the same, bit for bit"
        if not self.exact:
            verdict = f"only {self.same} of {len(self.unbroken)} losses are the same"
        return (
            f"A small GPT trains {counted(len(self.unbroken), 'step')}. The same run is killed (kill -9) at step "
            f"{self.killed_at} and resumes from its checkpoint of step {self.resumed_from}: {verdict}."
        )


def compare_runs(
    folder: Path, progress: Callable[[str], None], *, steps: int, every: int, source: str = "stdlib"
) -> ComparedRuns:
    """Train a run without a break, and the same run with a kill and a resumption, on the same data."""
    runs = []
    for name in ("unbroken", "killed"):
        # Small batches: losses are compared, and nothing is to be learned.
        run = TrainingDemo(folder / name, steps=steps, every=every, source=source, settings=_QUICK)
        run.prepare()
        runs.append(run)
    unbroken, killed = runs
    unbroken.train(progress)
    at = killed.train_until_killed(progress)
    killed.resume(progress)
    return ComparedRuns(_in_order(unbroken.losses()), _in_order(killed.losses()), at.step, at.saved.number)


def _in_order(losses: dict[int, float]) -> list[float]:
    return [losses[step] for step in sorted(losses)]


def _check_running(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        raise _failed(process)


def _failed(process: subprocess.Popen[str]) -> StoreError:
    message = f"the training process ended with exit code {process.returncode}"
    return StoreError(message, remedy="see errors.txt in the run's folder")
