"""The divergence guard: updates with a non-finite loss or gradient norm are not applied."""

import logging
import shlex

from torch import Tensor

from tensorkeep.errors import DivergedError, TensorkeepError
from tensorkeep.train.run.state import Run

logger = logging.getLogger(__name__)

MOST_SKIPPED = 20
"""Updates that are skipped in a row before the run is stopped.

A skipped update changes no weight: if this many batches fail, the cause is the weights and not the data.
"""


def check_finite(run: Run, loss: Tensor, norm: Tensor) -> bool:
    """Return whether an update with this loss and gradient norm may be applied; count the updates that are skipped.

    Raises DivergedError if one of them is not finite, and ``loop.on_divergence`` is ``"stop"`` or `MOST_SKIPPED`
    updates in a row were skipped.
    """
    progress = run.progress
    if bool((loss + norm).isfinite()):
        progress.skipped_in_a_row = 0
        return True
    figures = f"the loss is {loss.item():g} and the gradient norm is {norm.item():g}"
    # A range test raises the learning rate until this happens, and then ends.
    if run.config.loop.on_divergence == "stop" and run.config.schedule.name != "range":
        raise _first_divergence(run, figures)
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= MOST_SKIPPED:
        raise _too_many_skipped(run, figures)
    logger.info("step %d: update skipped: %s", progress.step, figures)
    return False


def _first_divergence(run: Run, figures: str) -> DivergedError:
    notes = _finish_saves(run)
    last = run.manager.latest()
    place = f"resume from step {last.number}" if last else "start again from the beginning"
    return _error(
        run,
        f"{figures}, on batches {run.drawn.start} to {run.drawn.stop - 1} of the data",
        f"{place} with --resume --loop.on_divergence skip, or start a new run with a lower learning rate",
        notes,
    )


def _too_many_skipped(run: Run, figures: str) -> DivergedError:
    notes = _finish_saves(run)
    first = run.progress.step - run.progress.skipped_in_a_row + 1
    remedy = "start a new run with a lower learning rate (--optim.lr)"
    steps = [step.number for step in run.manager.steps()]
    if steps:
        command = f"tensorkeep train --out {shlex.quote(str(run.folder.path))} --resume"
        remedy += f"; or fix the cause and resume from step {steps[-1]}{_relation(steps, first)}: {command}"
    message = f"{figures}, and {MOST_SKIPPED} updates in a row, since step {first}, were skipped"
    return _error(run, message, remedy, notes)


def _relation(steps: list[int], first_skipped: int) -> str:
    """Describe whether the last checkpoint was saved before updates were skipped."""
    before = [number for number in steps if number < first_skipped]
    if steps[-1] < first_skipped:
        return ", the last checkpoint before them"
    earlier = f"; the last checkpoint before them is step {before[-1]}" if before else ""
    return f", saved while updates were skipped, with the same weights as before them{earlier}"


def _finish_saves(run: Run) -> list[str]:
    """Wait for checkpoints that are being saved; return the errors of saves that failed."""
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
