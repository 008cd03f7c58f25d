"""The divergence guard: a loss or gradient that is not finite never reaches the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.errors import DivergedError, HoldfastError

if TYPE_CHECKING:
    from holdfast.train.run import Run


def check_finite(run: Run, loss: Tensor, norm: Tensor) -> bool:
    """Say whether an update may be made.

    Parameters
    ----------
    run : Run
    loss, norm : Tensor
        Scalars: the loss of the step, and the norm of its gradient.

    Raises
    ------
    DivergedError
        If one of them is not finite, and the run does not skip such updates.
    """
    if bool((loss + norm).isfinite()):
        return True
    if run.config.loop.on_divergence == "skip":
        run.progress.skipped += 1
        return False
    notes = []
    try:
        run.manager.wait()
    except HoldfastError as error:
        notes.append(f"a checkpoint was not saved: {error}")
    last = run.manager.latest()
    back = f"go on from step {last.number} by --resume" if last else "start again with"
    first = run.batches.position - run.config.loop.accumulate
    diverged = DivergedError(
        f"step {run.progress.step}: the loss is {loss.item():g} and the norm of the gradient {norm.item():g}, on "
        f"batches {first} to {run.batches.position - 1} of the data",
        path=run.folder.path,
        remedy=f"{back} --loop.on_divergence skip, or start a new run with a lower learning rate",
    )
    for note in notes:
        diverged.add_note(note)
    raise diverged
