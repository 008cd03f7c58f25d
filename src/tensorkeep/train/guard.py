"""The divergence guard: a loss or gradient that is not finite never reaches the weights."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from torch import Tensor

from tensorkeep.errors import DivergedError, TensorkeepError

if TYPE_CHECKING:
    from tensorkeep.train.run.run import Run

MOST_SKIPPED = 20
"""In a row. A skipped update changes no weight: where so many batches fail, the weights are at fault, not the data."""


def check_finite(run: Run, loss: Tensor, norm: Tensor) -> bool:
    """Say whether an update may be made, and count those that may not.

    Parameters
    ----------
    run : Run
    loss, norm : Tensor
        Scalars: the loss of the step, and the norm of its gradient.

    Raises
    ------
    DivergedError
        If one of them is not finite, and the run does not skip such updates, or has skipped `MOST_SKIPPED` in a row.
    """
    progress = run.progress
    if bool((loss + norm).isfinite()):
        progress.skipped_in_a_row = 0
        return True
    figures = f"the loss is {loss.item():g} and the norm of the gradient {norm.item():g}"
    # A range test looks for the rate at which this happens, and ends there.
    if run.config.loop.on_divergence == "stop" and run.config.schedule.name != "range":
        raise _stopped(run, figures)
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= MOST_SKIPPED:
        raise _given_up(run, figures)
    return False


def _stopped(run: Run, figures: str) -> DivergedError:
    notes = _settle(run)
    last = run.manager.latest()
    back = f"go on from step {last.number}" if last else "go on from the beginning"
    return _error(
        run,
        f"{figures}, on batches {run.drawn.start} to {run.drawn.stop - 1} of the data",
        f"{back} by --resume --loop.on_divergence skip, or start a new run with a lower learning rate",
        notes,
    )


def _given_up(run: Run, figures: str) -> DivergedError:
    notes = _settle(run)
    first = run.progress.step - run.progress.skipped_in_a_row + 1
    remedy = "start a new run with a lower learning rate (--optim.lr)"
    steps = [step.number for step in run.manager.steps()]
    if steps:
        again = f"tensorkeep train --out {shlex.quote(str(run.folder.path))} --resume"
        remedy += f"; or mend the cause and go on from step {steps[-1]}{_of_which(steps, first)}: {again}"
    told = f"{figures}, and {MOST_SKIPPED} updates in a row, since step {first}, were skipped"
    return _error(run, told, remedy, notes)


def _of_which(steps: list[int], first_skipped: int) -> str:
    """Say how the last checkpoint and the skipped updates stand to each other."""
    before = [number for number in steps if number < first_skipped]
    if steps[-1] < first_skipped:
        return ", the last checkpoint before them"
    earlier = f"; the last checkpoint before them is step {before[-1]}" if before else ""
    return f", saved while updates were skipped, whose weights are as good as those before{earlier}"


def _settle(run: Run) -> list[str]:
    """Wait for what is being saved, so that it counts; return what went wrong with it."""
    try:
        run.manager.wait()
    except TensorkeepError as error:
        return [f"a checkpoint was not saved: {error}"]
    return []


def _error(run: Run, message: str, remedy: str, notes: list[str]) -> DivergedError:
    error = DivergedError(f"step {run.progress.step}: {message}", path=run.folder.path, remedy=remedy)
    for note in notes:
        error.add_note(note)
    return error
