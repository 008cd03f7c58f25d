"""Turns: a cell and the baseline train alternately, for a fraction of a second each, in processes of their own.

The speed of a machine drifts within seconds by more than most techniques change it. Two runs that take turns see the
same machine, so the ratio of their speeds in each pair of turns is much less noisy than that of two whole runs.

``python -m tensorkeep.bench.training.turns TASK`` is the baseline's process, a *partner*: it trains for one turn for
each line that it reads, and prints the speed of that turn.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tensorkeep.bench.results import Settings
from tensorkeep.bench.run.worker import end_with_parent
from tensorkeep.closing import Closing
from tensorkeep.errors import TensorkeepError
from tensorkeep.structs import prepared
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import Silent, train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import OpenRun
from tensorkeep.train.step.world import LAUNCHER_VARIABLES

THREADS = "OMP_NUM_THREADS"
_MARK = "tensorkeep-turn "
_MORE_STEPS = 20
"""The partner can train this many times the steps of a cell, so that it never ends first."""


class PartnerTask(msgspec.Struct, frozen=True):
    """What a partner trains."""

    config: Settings
    data: str
    folder: str
    warmup: int  # steps after the first one that are not timed
    turn: float  # seconds
    # What limits the threads of a cell without ranks. Where that is nothing, torch is given no number either: then MKL
    # may use fewer threads for small matrices. With a number, the baseline was up to 7% slower than itself as an arm.
    threads: str | None


@dataclass
class StepTimer:
    """Times the steps of a run. The first step of a turn only warms caches and threads up and is not timed."""

    run: OpenRun
    warmup: int
    turn: float  # the least seconds of a turn
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, tokens and FLOPs of each timed step
    seconds: float = 0.0  # of training, all steps but the first
    _mark: tuple[float, int, int] = (0.0, 0, 0)
    _untimed: int = -1  # steps that are still not timed; -1 before the first step
    _first: int = 0  # index of the first timed step of this turn

    def add_step(self) -> float | None:
        """Count the step that has just ended; return the tokens per second of a turn that it ends, else None."""
        run = self.run
        before, self._mark = self._mark, (run.clock.seconds.get("train", 0.0), run.progress.tokens, run.speed.flops)
        self.seconds = self._mark[0]
        if self._untimed < 0:
            # The run's clock does not count its first step.
            self._untimed = self.warmup
        elif self._untimed:
            self._untimed -= 1
        else:
            self.steps.append(tuple(now - then for now, then in zip(self._mark, before, strict=True)))  # type: ignore[arg-type]
        seconds = sum(step[0] for step in self.steps[self._first :])
        if seconds < self.turn or not seconds:
            return None
        speed = sum(step[1] for step in self.steps[self._first :]) / seconds
        self._first, self._untimed = len(self.steps), 1
        return speed

    @property
    def warming_up(self) -> bool:
        """Whether no step was timed yet, and the next one will not be either."""
        return not self.steps and self._untimed != 0


class Partner(Closing):
    """The baseline's process; a context manager. It has warmed up, and waits, when it is made.

    Raises TensorkeepError if the process ends.
    """

    def __init__(self, task: PartnerTask) -> None:
        # A rank's partner is a run of its own, with the threads of a run of its own.
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment.pop(THREADS, None)
        environment |= {} if task.threads is None else {THREADS: task.threads}
        command = [sys.executable, "-m", __name__, msgspec.json.encode(task).decode()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def train_turn(self) -> float:
        """Let the baseline train for one turn; return its tokens per second."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write("\n")
            stdin.flush()
        return self._read()

    def _read(self) -> float:
        for line in self._process.stdout or ():
            if line.startswith(_MARK):
                return float(line.removeprefix(_MARK))
        code = self._process.wait()
        self.close()
        raise TensorkeepError(f"the process of the baseline ended with exit code {code}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _run_partner(task: PartnerTask) -> None:
    config = Config.from_dict(task.config)
    config = config.changed({"loop.steps": _MORE_STEPS * config.loop.steps})
    with open_run(config, RunFolder(Path(task.folder)), Dataset.open(task.data)) as run:
        timer = StepTimer(run, task.warmup, task.turn)
        ready = False

        def stop() -> bool:
            nonlocal ready
            speed = timer.add_step()
            if not ready and not timer.warming_up:
                ready, speed = True, 0.0
            return speed is not None and not _wait_for_turn(speed)

        train(run, Silent(), stop=stop)


def _wait_for_turn(speed: float) -> bool:
    """Report a speed and wait; return whether there is another turn."""
    print(f"{_MARK}{speed}", flush=True)
    return bool(sys.stdin.readline())


if __name__ == "__main__":
    end_with_parent()
    _run_partner(msgspec.json.decode(sys.argv[1], type=prepared(PartnerTask)))
