"""The state of a training run around a model's tensors: AdamW's moments after a step, as torch keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorkeep.errors import UsageError

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("adamw",)

_GRADIENT = 1e-3
_LEARNING_RATE = 1e-4


def check_optimizer(name: str) -> None:
    """Raise UsageError if there is no optimizer of that name here."""
    if name not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {name!r} to measure with", remedy=f"choose: {', '.join(OPTIMIZERS)}")


def with_optimizer(tensors: dict[str, torch.Tensor], name: str, *, seed: int = 0) -> dict[str, Any]:
    """Return ``{"model": tensors, "optimizer": state_dict, "step": 1}``.

    The gradients are random, N(0, 0.001); the moments have the dtype of the weights, as torch's AdamW makes them, and
    take twice their bytes.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        The weights; they are changed by the step.
    name : str
        One of `OPTIMIZERS`.
    seed : int
        Of the gradients.

    Raises
    ------
    UsageError
        If there is no optimizer of that name here.
    """
    import torch

    check_optimizer(name)
    optimizer = torch.optim.AdamW(tensors.values(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        # One at a time: the gradients of all would be as large as the weights. Those without one are left alone.
        drawn = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, _GRADIENT, generator=generator)
        tensor.grad = drawn.to(tensor.dtype)
        optimizer.step()
        tensor.grad = None
    return {"model": tensors, "optimizer": optimizer.state_dict(), "step": 1}
