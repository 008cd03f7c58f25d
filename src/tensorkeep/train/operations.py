"""The operations that a training step consists of; techniques wrap or replace them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.optimizers import Optimizers


@dataclass
class Operations:
    """The operations of a step, in the order in which `tensorkeep.train.loop.make_step` calls them.

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
    evaluate : callable
        ``(inputs, targets) -> Tensor``: the mean loss of a batch of an evaluation, without gradients and dropout.
    plain_loss : callable, optional
        The same as ``loss`` in plain Python, if ``loss`` runs compiled or captured code, which calls no hooks.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], None]
    clip: Callable[[], Tensor]
    accepts: Callable[[Tensor, Tensor], bool]
    update: Callable[[], None]
    evaluate: Callable[[Tensor, Tensor], Tensor]
    plain_loss: Callable[[Tensor, Tensor], Tensor] | None = None


def default_operations(
    model: GPT, optimizers: Optimizers, *, clip: float, accepts: Callable[[Tensor, Tensor], bool]
) -> Operations:
    """Return the operations of a step without techniques; ``clip`` is the largest norm of the gradient, 0 for any."""

    def clip_gradient() -> Tensor:
        parameters = list(model.parameters())
        if clip:
            return torch.nn.utils.clip_grad_norm_(parameters, clip)
        return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])

    def update() -> None:
        for optimizer in optimizers.values():
            optimizer.step()

    return Operations(
        # Looked up at each call, because techniques replace `model.loss`.
        loss=lambda inputs, targets: model.loss(inputs, targets),
        backward=lambda value: value.backward(),  # type: ignore[no-untyped-call]
        clip=clip_gradient,
        accepts=accepts,
        update=update,
        evaluate=lambda inputs, targets: model.loss(inputs, targets),
    )
