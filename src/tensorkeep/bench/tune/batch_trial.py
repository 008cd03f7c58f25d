"""Trials: does a configuration fit into some memory, and which is the largest batch that does?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.bench.experiment.workload import Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run.cell import CellResult, run_cell
from tensorkeep.bench.training.arms import measured
from tensorkeep.bench.training.cell import MEMORY
from tensorkeep.bench.tune.memory_choices import with_batch_size
from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config

TRIAL_STEPS = 3
TRIAL_SECONDS = 600
_EVALUATED = {"eval.every": 1}
"""The peak is read after a step, so that an evaluation between two steps is part of it."""

Try = Callable[[Config], CellResult]


@dataclass(frozen=True, slots=True)
class Found:
    """The largest batch that was seen to fit.

    Attributes
    ----------
    config : Config or None
        With it; None if not even the smallest fits.
    peak : int or None
        The bytes that the trial took at most.
    trials : list of (int, bool, str)
        The batch sizes that were tried, whether they fitted, and what was said.
    """

    config: Config | None
    peak: int | None
    trials: list[tuple[int, bool, str]]


def largest_batch(config: Config, memory: int, attempt: Try) -> Found:
    """Find the largest batch that fits, by trying.

    Parameters
    ----------
    config : Config
    memory : int
        The most bytes that a trial may take.
    attempt : callable
        Trains some steps and evaluates.

    Raises
    ------
    UsageError
        If a trial fails for another reason than memory.
    """
    whole = config.loop.batch_size * config.loop.accumulate
    sizes = [size for size in range(1, whole + 1) if whole % size == 0]
    trials: list[tuple[int, bool, str]] = []
    best: tuple[Config | None, int | None] = (None, None)
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        tried = with_batch_size(config, sizes[middle])
        result = attempt(tried)
        fitted = fits(result, memory)
        peak = int(result.figures.get(MEMORY, 0))
        trials.append((sizes[middle], fitted, result.reason or ""))
        if fitted:
            best, low = (tried, peak), middle + 1
        else:
            high = middle
    return Found(*best, trials)


def fits(result: CellResult, memory: int) -> bool:
    """Say whether a trial took no more than so many bytes.

    Raises
    ------
    UsageError
        If it failed for another reason.
    """
    if result.status == "memory":
        return False
    if result.status != "ok":
        raise UsageError(f"a trial failed: {result.reason}", remedy="correct that, and try again")
    return result.figures[MEMORY] <= memory


class Trial:
    """Trains a configuration for a few steps, and evaluates, in a process of its own that is ended beyond a limit.

    Parameters
    ----------
    data : Path
        Prepared.
    memory : int
        The most bytes that training may take, beyond what the process needs in any case.
    overhead : int
        What that is.
    """

    def __init__(self, data: Path, memory: int, overhead: int) -> None:
        self._data = data
        # Also where a figure is never reached, because memory ran out before.
        self._limits = Limits(TRIAL_SECONDS, memory + overhead)

    def __call__(self, config: Config) -> CellResult:
        """Return how it ended, with its figures."""
        with tempfile.TemporaryDirectory(prefix="tensorkeep-tune-") as folder:
            subject = {
                "config": measured(config, steps=TRIAL_STEPS, evaluated=1, others=_EVALUATED).as_dict(),
                "recipe": config.recipe,
                "data": str(self._data),
                "source": str(self._data),
                "warmup": 0,
                "gate_steps": 0,
                "seconds": None,
            }
            task = Task("training", "trial", {}, subject, [MEMORY], str(Path(folder, "cell")))
            return run_cell(task, self._limits)
