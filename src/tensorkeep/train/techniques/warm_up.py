"""Warm up a step: compute a loss and its gradient, and leave no trace in the run or in the random states.

Compiled code and captured graphs run no Python hooks, and hooks are how most techniques observe a step. Therefore a
technique that compiles or captures does so in a warm-up, while no hooks are installed. While the first step is
observed, it also computes each batch once in plain Python, so that the hooks of other techniques run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from tensorkeep.train.run.state import Run

Loss = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def next_batch(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the inputs and targets of the next step's first batch, on the device; restore the run and random states."""
    position = run.batches.state_dict()
    run.progress.step += 1
    try:
        inputs, targets = next(run.batches)
        with _restored_random_states(run):
            yield inputs.to(run.device), targets.to(run.device)
    finally:
        run.batches.load_state_dict(position)
        run.progress.step -= 1


def warm_up_loss(run: Run) -> None:
    """Compute the loss of the next batch and its gradient, and discard them."""
    with next_batch(run) as (inputs, targets):
        compute_and_discard(run, run.operations.loss, inputs, targets)


def compute_and_discard(run: Run, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Compute a loss and its gradient, without a change of the parameters' gradients or the random states."""
    parameters = [each for each in run.model.parameters() if each.requires_grad]
    with _restored_random_states(run):
        torch.autograd.grad(loss(inputs, targets), parameters, allow_unused=True)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Suspend the function modes with which others observe torch: code compiled without them would be recompiled."""
    with ExitStack() as modes:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            modes.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _restored_random_states(run: Run) -> Iterator[None]:
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        yield
