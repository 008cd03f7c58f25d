"""The operations that a training step consists of; techniques wrap or replace them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.optimizers import Optimizers


@dataclass
class Operations:
    """The operations of a step, in the order in which `tensorkeep.train.loop.take_step` calls them.

    A technique assigns its own function in place of one; most call the function that was there before. An operation
    that no technique has replaced is called directly, so that techniques that are off cost nothing.

    Attributes
    ----------
    loss : callable
        ``(inputs, targets) -> Tensor``: the mean loss of a batch, with its autograd graph.
    backward : callable
        ``(loss) -> None``: adds the gradient of a loss to those of the parameters.
    clip : callable
        ``() -> Tensor``: makes the gradients final, clips them, and returns their norm before that.
    accepts : callable
        ``(loss, norm) -> bool``: whether to apply the update; raises DivergedError to stop the run.
    update : callable
        ``() -> None``: steps the optimizers.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], None]
    clip: Callable[[], Tensor]
    accepts: Callable[[Tensor, Tensor], bool]
    update: Callable[[], None]


def default_operations(
    model: GPT, optimizers: Optimizers, *, clip: float, accepts: Callable[[Tensor, Tensor], bool]
) -> Operations:
    """Return the operations of a step without techniques.

    Parameters
    ----------
    clip : float
        The largest norm of the gradient; 0 for no limit.
    accepts : callable
        See `Operations`.
    """

    def update() -> None:
        for optimizer in optimizers.values():
            optimizer.step()

    return Operations(
        # Looked up at each call, because techniques replace `model.loss`.
        loss=lambda inputs, targets: model.loss(inputs, targets),
        backward=lambda value: value.backward(),  # type: ignore[no-untyped-call]
        clip=lambda: clip_gradient(model.parameters(), clip),
        accepts=accepts,
        update=update,
    )


def clip_gradient(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale the gradient so that its norm is at most ``largest`` (0 for no limit); return the norm before that."""
    parameters = list(parameters)
    if largest:
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
