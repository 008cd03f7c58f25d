"""What ``tensorkeep demo --training`` does: train a small model, kill it, go on, and compare what was done twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.steps import Step
from tensorkeep.errors import PathLike, StoreError, TensorkeepError
from tensorkeep.io.parallel import Progress
from tensorkeep.train.data.prepare import Prepared, prepare
from tensorkeep.train.run.folder import RunFolder

RECIPE = "shakespeare-char-cpu"

Note = Callable[[str], None]
"""Is told what is going on, now and then."""

_LOOK_AGAIN = 0.05


@dataclass(frozen=True, slots=True)
class Killed:
    """A run that was killed.

    Attributes
    ----------
    step : int
        The last step that it logged.
    saved : Step
        The last whole checkpoint that it left.
    losses : dict of int to float
        By step.
    """

    step: int
    saved: Step
    losses: dict[int, float]


@dataclass(frozen=True, slots=True)
class Repeated:
    """What was computed twice: before the kill, and again after the checkpoint.

    Attributes
    ----------
    first, last : int
        Steps.
    count : int
        How many losses were compared.
    different : tuple of int
        The steps whose losses differ in any bit.
    """

    first: int
    last: int
    count: int
    different: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether something was compared, and all of it is the same."""
        return self.count > 0 and not self.different


class TrainingStory:
    """A run of training in a folder, in processes of its own.

    Parameters
    ----------
    folder : path-like
        Where the run goes; it must not exist.
    steps : int
    every : int
        Steps between checkpoints.
    source : str
        What to train on.
    """

    def __init__(self, folder: PathLike, *, steps: int, every: int, source: str = "stdlib") -> None:
        self.folder = RunFolder(folder)
        self._steps = steps
        self._every = every
        self._source = source
        self._draw = random.Random()

    def prepare(self, progress: Progress | None = None) -> Prepared:
        """Turn the source into tokens."""
        self.folder.check_new()
        return prepare(self._source, self.folder.data, tokenizer="char", overwrite=True, progress=progress)

    def train_until_killed(self, note: Note) -> Killed:
        """Start the run, and kill it (SIGKILL) at a random step of its middle, some steps after a whole checkpoint."""
        aim = self._draw.randint(self._steps * 2 // 5, self._steps * 3 // 5)
        process = self._start()
        try:
            while (killed := self._caught(process, aim)) is None:
                note(f"training: step {max(self._losses(), default=0)} of {self._steps}, to be killed at a random one")
                time.sleep(_LOOK_AGAIN)
        finally:
            process.kill()
            process.communicate()
        return killed

    def _caught(self, process: subprocess.Popen[str], aim: int) -> Killed | None:
        """Halt the run if it is time to kill it; let it run on if it was saved once more just before it halted."""
        _check_runs(process)
        if self._left(aim) is None:
            return None
        os.kill(process.pid, signal.SIGSTOP)
        # It goes on for an instant. Where it has ended instead, Popen is to find that out.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        _check_runs(process)
        killed = self._left(aim)
        if killed is None:
            os.kill(process.pid, signal.SIGCONT)
        return killed

    def _left(self, aim: int) -> Killed | None:
        """Return what a kill would leave now, or None if that is too early."""
        losses, saved = self._losses(), self._saved()
        step = max(losses, default=0)
        # What is computed twice is what is shown: a kill right after a checkpoint would show nothing.
        if saved is None or step < max(aim, saved.number + max(1, self._every // 3)):
            return None
        return Killed(step, saved, losses)

    def go_on(self, note: Note) -> dict[str, Any]:
        """Resume the run and let it end; return its summary."""
        process = self._start("--resume")
        while process.poll() is None:
            note(f"going on: step {max(self._losses(), default=0)} of {self._steps}")
            time.sleep(_LOOK_AGAIN)
        output, _ = process.communicate()
        if process.returncode:
            raise _failed(process)
        found: dict[str, Any] = json.loads(output)
        return found

    def repeated(self, killed: Killed) -> Repeated:
        """Compare the losses that were computed twice."""
        again = self._losses()
        twice = [step for step in killed.losses if step > killed.saved.number]
        different = tuple(step for step in twice if again.get(step) != killed.losses[step])
        return Repeated(killed.saved.number + 1, killed.step, len(twice), different)

    def last(self) -> Step:
        """Return the last checkpoint."""
        step = self._saved()
        if step is None:
            raise AssertionError("the run has ended, and the last step is always saved")
        return step

    def _start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tensorkeep", "train", RECIPE, "--out", str(self.folder.path), "--json", *more]
        if not more:
            command += ["--data", str(self.folder.data), "--loop.steps", str(self._steps), "--log.every", "1"]
            command += ["--checkpoint.every", str(self._every), "--eval.every", str(self._every), "--eval.batches", "4"]
        # Errors go to a file: nobody reads a pipe while the run goes on.
        with (self.folder.path / "errors.txt").open("w") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _saved(self) -> Step | None:
        try:
            steps = CheckpointManager(self.folder.checkpoints).steps()
        except TensorkeepError:
            return None
        return steps[-1] if steps else None

    def _losses(self) -> dict[int, float]:
        try:
            lines = self.folder.log.read_text().splitlines()
        except FileNotFoundError:
            return {}
        found = {}
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # is being written
            if entry["kind"] == "train":
                found[entry["step"]] = entry["loss"]
        return found


def _check_runs(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        raise _failed(process)


def _failed(process: subprocess.Popen[str]) -> TensorkeepError:
    return StoreError(
        f"the training process ended with exit code {process.returncode}", remedy="see errors.txt in the run's folder"
    )
