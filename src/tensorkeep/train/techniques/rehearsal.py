"""A batch that is computed and forgotten: to compile or record the loss, or to show hooks what is not Python any more.

Compiled code and recorded kernels call no hooks, and hooks are what most techniques watch by. So a technique that makes
a recording of Python makes it before anything watches, that no hook be part of it; and while the first step is watched
it computes each batch once more in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

Loss = Callable[[Tensor, Tensor], Tensor]


def rehearse_loss(run: Run) -> None:
    """Compute what the next step computes first, and leave no trace, neither in the run nor in random states."""
    place = run.batches.state_dict()
    run.progress.step += 1
    try:
        inputs, targets = next(run.batches)
        compute_and_forget(run, run.operations.loss, inputs.to(run.device), targets.to(run.device))
    finally:
        run.batches.load_state_dict(place)
        run.progress.step -= 1


def compute_and_forget(run: Run, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Compute a loss and its gradient, and leave no trace, neither in the gradients nor in random states."""
    parameters = [each for each in run.model.parameters() if each.requires_grad]
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.autograd.grad(loss(inputs, targets), parameters, allow_unused=True)


@contextmanager
def without_modes() -> Iterator[None]:
    """Take away, for a while, the modes by which others watch functions: code that was compiled without has no place
    for them.
    """
    with ExitStack() as modes:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            modes.enter_context(_pop_mode_temporarily())
        yield
