"""The time of training steps, and a warning when they become slow."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.machine import usable_processors
from tensorkeep.train.guard import check_steps
from tensorkeep.train.run.state import Run

logger = logging.getLogger(__name__)


@contextmanager
def timed_step(run: Run) -> Iterator[None]:
    """Time a step. The first step of a process loads kernels and compiles, and does not count as training."""
    first = "first step" not in run.clock.seconds
    before, tokens = run.clock.seconds.get("train", 0.0), run.progress.tokens
    with run.clock.spent_on("first step" if first else "train"):
        yield
        if first:
            check_steps(run)
    if not first:
        trained = run.progress.tokens - tokens
        # Positions whose targets do not count are computed as well. Attention over a shorter context, as techniques may
        # draw, takes fewer operations.
        flops = run.positions * run.config.model.flops_per_token(run.batches.context_length)
        seconds = run.clock.seconds["train"] - before
        _count(run, trained, flops, seconds, steps=1)


def _count(run: Run, tokens: int, flops: int, seconds: float, *, steps: int) -> None:
    """Count training for the speed of the run, and warn if it has become slow."""
    run.speed.add(tokens, flops, seconds)
    slower = run.slowdown.add(flops, seconds, steps=steps)
    if slower is not None and run.world.is_main:
        _warn_of_slowdown(run, slower)


def _warn_of_slowdown(run: Run, ratio: float) -> None:
    """Log that training has become slower; the usual cause is another process."""
    load, cpus = os.getloadavg()[0], len(usable_processors())
    run.log.write(run.progress.step, "slowdown", ratio=ratio, load=load, cpus=cpus)
    logger.warning(
        "training is %.0f times slower than before, at step %d: the load of this machine is %.1f on %d CPUs; stop what "
        "else computes here, or keep it off the CPUs of this run (taskset)",
        *(ratio, run.progress.step, load, cpus),
    )


def settle(run: Run) -> None:
    """Check the steps since the last call; the GPU is waited for, which is time of these steps."""
    if run.unchecked:
        before = run.clock.seconds.get("train", 0.0)
        with run.clock.spent_on("train"):
            check_steps(run)
        _count(run, 0, 0, run.clock.seconds["train"] - before, steps=0)
