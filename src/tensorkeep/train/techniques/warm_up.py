"""Warm up a step: compute a loss and its gradient, and leave no trace in the run or in the random states.

Compiled code and captured graphs run no Python hooks, and hooks are how most techniques observe a step. Therefore a
technique that compiles or captures does so in a warm-up, while no hooks are installed. While the first step is
observed, a few rows of each batch are also computed in plain Python, so that the hooks of other techniques run: few,
because plain Python may need memory for a whole batch that compiled code does not need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.observe import hooked, replace_operation

PROVED_TOKENS = 1024
"""Tokens of a batch that are computed in plain Python; at least one row."""

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
        parameters = [each for each in run.model.parameters() if each.requires_grad]
        torch.autograd.grad(run.operations.loss(inputs, targets), parameters, allow_unused=True)


@contextmanager
def plain_rows_computed(run: Run) -> Iterator[None]:
    """Within this context, compute a few rows of each batch in plain Python too, if the loss calls no hooks itself."""
    loss, plain = run.operations.loss, run.operations.plain_loss
    if plain is None:
        yield
        return
    hooks = [(each, dict(each)) for each in _hooks_of(run.model)]

    def with_plain_rows(inputs: Tensor, targets: Tensor) -> Tensor:
        _compute_and_discard(run, plain, *few_rows(inputs, targets))
        with _without_function_modes(), _replaced(hooks):
            return loss(inputs, targets)

    with replace_operation(run, "loss", with_plain_rows):
        yield


def few_rows(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return some rows of a batch, `PROVED_TOKENS` or one row; those without targets, whose mean is NaN, come last."""
    rows = max(1, PROVED_TOKENS // inputs.shape[1])
    chosen = (targets != IGNORED).any(1).int().argsort(descending=True, stable=True)[:rows]
    return inputs[chosen], targets[chosen]


def _compute_and_discard(run: Run, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Compute a loss and go back through the model, without a change of gradients or random states."""
    # The gradient of the input of the blocks: the backward pass goes through all of them, and computes none of their
    # weights' gradients, whose memory is needed for those of the step. A weight in its place is not always part of the
    # graph: FSDP computes with others.
    into: list[Tensor] = []

    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        into.append(given[0].detach().requires_grad_())
        return (into[0], *given[1:])

    with _restored_random_states(run), hooked([run.model.blocks[0].register_forward_pre_hook(hook, prepend=True)]):
        value = loss(inputs, targets)
        if isinstance(run.model, FSDPModule):
            # Else it would exchange the gradients of the batches before: another sum than without an observation. The
            # loss of the batch itself says again whether to exchange.
            run.model.set_requires_gradient_sync(False)
        torch.autograd.grad(value, into)
        if isinstance(run.model, FSDPModule):
            run.model.set_requires_gradient_sync(True)


def _hooks_of(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield from (module._forward_pre_hooks, module._forward_hooks)


@contextmanager
def _replaced(hooks: Sequence[tuple[dict[int, Any], dict[int, Any]]]) -> Iterator[None]:
    """Suspend the hooks of observers: a module with hooks of its own, such as a sharded one, would be recompiled."""
    observed = [dict(each) for each, _ in hooks]
    _set_hooks(hooks)
    try:
        yield
    finally:
        _set_hooks([(each, before) for (each, _), before in zip(hooks, observed, strict=True)])


def _set_hooks(hooks: Sequence[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    for each, wanted in hooks:
        if each.keys() != wanted.keys():
            each.clear()
            each.update(wanted)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Suspend the function modes with which others observe torch: code compiled without them would be recompiled."""
    with ExitStack() as modes:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            modes.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _restored_random_states(run: Run) -> Iterator[None]:
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        yield
