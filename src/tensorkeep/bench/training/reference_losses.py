"""The check of training: losses must match the same run without systems techniques.

``python -m tensorkeep.bench.training.reference_losses TASK`` trains the first steps in a process of its own, and prints
their losses.
"""

import hashlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorkeep.bench.experiment.workload import GateError
from tensorkeep.bench.results import Settings
from tensorkeep.errors import TensorkeepError
from tensorkeep.structs import prepared
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.step.train_step import take_step


class _Task(msgspec.Struct):
    config: Settings
    data: str
    steps: int


def reference_losses(config: Config, data: Path, steps: int, cache: Path) -> list[float]:
    """Return the losses of the first steps of a run; the cells of an experiment share them in a folder, ``cache``.

    Raises TensorkeepError if the run fails.
    """
    task = msgspec.json.encode(_Task(config.as_dict(), str(data), steps)).decode()
    path = cache / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["without an error message"])[-1]
            raise TensorkeepError(f"the reference run without techniques failed: {last}")
        path.write_text(done.stdout.splitlines()[-1])
    return msgspec.json.decode(path.read_bytes(), type=list[float])


@dataclass(frozen=True, slots=True)
class LossGate:
    """Compares the losses of the first steps with those of a reference, by the relative difference that is allowed."""

    expected: list[float]
    tolerance: float

    def check(self, step: int, loss: float) -> None:
        """Raise GateError if the loss of a step, counted from 1, differs by more than the tolerance."""
        if step > len(self.expected):
            return
        expected = self.expected[step - 1]
        # Written with `not <=`, because every comparison with NaN is false.
        if not abs(loss - expected) <= self.tolerance * abs(expected):
            allowed = f"at most {self.tolerance:.2%} may differ" if self.tolerance else "they must be equal"
            raise GateError(f"the loss of step {step} is {loss:.6g}, without the technique {expected:.6g}; {allowed}")


def train_steps(config: Config, data: Path, steps: int, folder: Path) -> list[float]:
    """Train the first steps of a run, and return their losses."""
    with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
        with run.techniques.verified(run):
            losses = [take_step(run)["loss"]]
        return losses + [take_step(run)["loss"] for _ in range(steps - 1)]


if __name__ == "__main__":
    _given = msgspec.json.decode(sys.argv[1], type=prepared(_Task))
    with tempfile.TemporaryDirectory() as _folder:
        _config = Config.from_dict(_given.config)
        _losses = train_steps(_config, Path(_given.data), _given.steps, Path(_folder, "run"))
    print(msgspec.json.encode(_losses).decode())
