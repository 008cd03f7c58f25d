"""The losses that an arm's must be: of the same run without the techniques that must not move them.

``python -m tensorkeep.bench.training.reference_losses TASK`` trains a few steps in a process of its own, and prints
them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorkeep.bench.checkpoint.gate import GateError
from tensorkeep.errors import TensorkeepError
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run


def reference_losses(config: Config, data: Path, steps: int, kept: Path) -> list[float]:
    """Return the losses of the first steps of a run; they are computed once for all cells that ask.

    Parameters
    ----------
    config : Config
    data : Path
        Prepared.
    steps : int
    kept : Path
        A folder for what was computed; made if it is not there.

    Raises
    ------
    TensorkeepError
        If the run fails.
    """
    task = json.dumps({"config": config.as_dict(), "data": str(data), "steps": steps})
    path = kept / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __name__, task]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise TensorkeepError(f"the plain run that losses are held against failed: {last}")
        path.write_text(done.stdout.splitlines()[-1])
    losses: list[float] = json.loads(path.read_text())
    return losses


class LossGate:
    """Holds the losses of the first steps to those of a reference.

    Parameters
    ----------
    wanted : list of float
        The reference's.
    tolerance : float
        How far a loss may lie from its reference, as a share of that.
    """

    def __init__(self, wanted: list[float], tolerance: float) -> None:
        self._wanted = wanted
        self._tolerance = tolerance

    def check(self, step: int, loss: float) -> None:
        """Hold the loss of a step, counted from 1.

        Raises
        ------
        GateError
            If it is too far away.
        """
        if step > len(self._wanted):
            return
        wanted = self._wanted[step - 1]
        # Not the other way round: a loss that is not a number passes no comparison.
        if not abs(loss - wanted) <= self._tolerance * abs(wanted):
            allowed = f"by {self._tolerance:.2%} at most" if self._tolerance else "by nothing"
            raise GateError(
                f"the loss of step {step} is {loss:.6g}, and {wanted:.6g} without it; they may differ {allowed}"
            )


def train_few(config: Config, data: Path, steps: int, folder: Path) -> list[float]:
    """Train the first steps of a run, and return their losses."""
    with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
        with run.techniques.verified(run):
            losses = [take_step(run)["loss"]]
        return losses + [take_step(run)["loss"] for _ in range(steps - 1)]


if __name__ == "__main__":
    _task = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as _folder:
        _losses = train_few(
            Config.from_dict(_task["config"]), Path(_task["data"]), _task["steps"], Path(_folder, "run")
        )
    print(json.dumps(_losses))
