"""The divergence guard: updates with a non-finite loss or gradient norm are not applied.

To read a loss, the CPU must wait for the GPU. On a GPU steps are therefore checked together, when something else waits
as well: a line of the log, an evaluation, a checkpoint. Until then the optimizers themselves skip such updates, on the
device, or the weights of a run that stops at the first one are lost: it never saves them.
"""

import logging
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tensorkeep.errors import DivergedError, TensorkeepError
from tensorkeep.train.optim.muon import Muon
from tensorkeep.train.run.state import Run, UncheckedStep

logger = logging.getLogger(__name__)

MOST_SKIPPED = 20
"""Updates that are skipped in a row before the run is stopped.

A skipped update changes no weight: if this many batches fail, the cause is the weights and not the data.
"""


def can_check_later(run: Run) -> bool:
    """Return whether the steps of a run may be checked some steps later, with the same result as at once.

    A range test ends at a loss, fp16 scales losses by what it finds, and an average must not include skipped updates.
    """
    if run.device.type == "cpu" or run.config.schedule.name == "range":
        return False
    if run.config.techniques.get("mixed-precision", {}).get("dtype") == "fp16":
        return False
    if run.config.loop.on_divergence == "stop":
        return True
    return not run.config.ema.decay and all(_skips_on_device(each) for each in run.optimizers.values())


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has the attribute ``found_inf``, with which it skips an update on the device."""
    if isinstance(optimizer, Muon):
        return True
    return type(optimizer) is torch.optim.AdamW and bool(optimizer.defaults["fused"])


def check_finite(run: Run, loss: Tensor, norm: Tensor) -> bool:
    """Return whether to apply an update with this loss and gradient norm; count the updates that are skipped.

    For a run that checks later, it is always true, and the optimizers skip the update on the device.

    Raises DivergedError if one of them is not finite, and ``loop.on_divergence`` is ``"stop"`` or `MOST_SKIPPED`
    updates in a row were skipped.
    """
    run.unchecked.append(UncheckedStep(run.progress.step, run.drawn, loss, norm))
    if not run.checks_later:
        return check_steps(run)
    if run.config.loop.on_divergence == "skip":
        found_inf = (~(loss + norm).isfinite()).float()
        for optimizer in run.optimizers.values():
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    return True


@contextmanager
def checked_at_once(run: Run) -> Iterator[None]:
    """Check the steps in this context before their updates: a skipped update proves nothing about a technique."""
    later, run.checks_later = run.checks_later, False
    try:
        yield
    finally:
        run.checks_later = later


def check_steps(run: Run) -> bool:
    """Check the steps since the last check, waiting for the device; return whether the last one was finite.

    Raises DivergedError as `check_finite`.
    """
    steps, run.unchecked = run.unchecked, []
    finite = True
    for step, (loss, norm) in zip(steps, _read(steps), strict=True):
        finite = math.isfinite(loss + norm)
        if finite:
            run.progress.skipped_in_a_row = 0
        else:
            _count_skipped(run, step, f"the loss is {loss:g} and the gradient norm is {norm:g}")
    return finite


def _read(steps: Sequence[UncheckedStep]) -> list[list[float]]:
    if len(steps) == 1:
        return [[steps[0].loss.item(), steps[0].norm.item()]]
    pairs = [torch.stack((each.loss, each.norm)) for each in steps]
    found: list[list[float]] = torch.stack(pairs).tolist() if pairs else []
    return found


def _count_skipped(run: Run, step: UncheckedStep, figures: str) -> None:
    # A range test raises the learning rate until this happens, and then ends.
    if run.config.loop.on_divergence == "stop" and run.config.schedule.name != "range":
        raise _first_divergence(run, step, figures)
    progress = run.progress
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= MOST_SKIPPED:
        raise _too_many_skipped(run, step, figures)
    logger.info("step %d: update skipped: %s", step.number, figures)


def _first_divergence(run: Run, step: UncheckedStep, figures: str) -> DivergedError:
    notes = _finish_saves(run)
    last = run.manager.latest()
    place = f"resume from step {last.number}" if last else "start again from the beginning"
    return _error(
        run,
        step,
        f"{figures}, on batches {step.drawn.start} to {step.drawn.stop - 1} of the data",
        f"{place} with --resume --loop.on_divergence skip, or start a new run with a lower learning rate",
        notes,
    )


def _too_many_skipped(run: Run, step: UncheckedStep, figures: str) -> DivergedError:
    notes = _finish_saves(run)
    first = step.number - run.progress.skipped_in_a_row + 1
    remedy = "start a new run with a lower learning rate (--optim.lr)"
    steps = [each.number for each in run.manager.steps()]
    if steps:
        command = f"tensorkeep train --out {shlex.quote(str(run.folder.path))} --resume"
        remedy += f"; or fix the cause and resume from step {steps[-1]}{_relation(steps, first)}: {command}"
    message = f"{figures}, and {MOST_SKIPPED} updates in a row, since step {first}, were skipped"
    return _error(run, step, message, remedy, notes)


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


def _error(run: Run, step: UncheckedStep, message: str, remedy: str, notes: list[str]) -> DivergedError:
    error = DivergedError(f"step {step.number}: {message}", path=run.folder.path, remedy=remedy)
    for note in notes:
        error.add_note(note)
    return error
