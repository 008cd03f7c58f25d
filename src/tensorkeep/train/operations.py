"""What a step consists of: operations, each of which a technique may wrap or replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.optimizers import Optimizers


@dataclass
class Operations:
    """The operations of a step, in the order in which `tensorkeep.train.loop.take_step` calls them.

    A technique puts its own in place of one, most often a function that calls the one that was there. What no technique
    has touched is called directly: a technique that is off costs nothing.

    Attributes
    ----------
    loss : callable
        (inputs, targets) -> Tensor: the mean loss of a batch, whose graph leads to the parameters.
    backward : callable
        (loss) -> None: adds the gradient of a loss to those of the parameters.
    clip : callable
        () -> Tensor: makes the gradients final, scales them down to the largest norm allowed, and returns the norm that
        they had.
    accepts : callable
        (loss, norm) -> bool: whether the update may be made; raises DivergedError if the run is to stop.
    update : callable
        () -> None: steps the optimizers.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], None]
    clip: Callable[[], Tensor]
    accepts: Callable[[Tensor, Tensor], bool]
    update: Callable[[], None]


def plain_operations(
    model: GPT, optimizers: Optimizers, *, most: float, accepts: Callable[[Tensor, Tensor], bool]
) -> Operations:
    """Return the operations of a step in which no technique is on.

    Parameters
    ----------
    model : GPT
    optimizers : dict of str to Optimizer
    most : float
        The largest norm of the gradient; 0 for no limit.
    accepts : callable
        See `Operations`.
    """

    def update() -> None:
        for optimizer in optimizers.values():
            optimizer.step()

    return Operations(
        # As the model has it then: a technique may put another one in its place.
        loss=lambda inputs, targets: model.loss(inputs, targets),
        backward=lambda value: value.backward(),  # type: ignore[no-untyped-call]
        clip=lambda: clip_gradient(model.parameters(), most),
        accepts=accepts,
        update=update,
    )


def clip_gradient(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale the gradient down to a norm, unless that is 0; return the norm that it had."""
    parameters = list(parameters)
    if most:
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
