"""What of its saved state an object refuses, found out before it is given any of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorkeep.checkpoint.restore.containers import holding, items
from tensorkeep.errors import TensorkeepError
from tensorkeep.formats.base import Entry
from tensorkeep.state.leaf import LeafKind, allocate
from tensorkeep.state.names import Path

if TYPE_CHECKING:
    import torch

REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What methods of objects raise about a state that they do not take."""

_SHAPED_LIKE_THE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("momentum_buffer", "ax", "prev", "step_size", "variance"),
)
"""Of the states of torch's own optimizers; those of others may be factored or projected."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Stands for a tensor of a checkpoint."""

    name: str
    kind: LeafKind
    entry: Entry


def is_module(value: object) -> bool:
    """Say whether an object is a torch module, whose tensors are always there and filled in place."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def checks_itself(value: object) -> bool:
    """Say whether an object has a ``check_state_dict()``, and so decides itself which shapes it takes."""
    return callable(getattr(value, "check_state_dict", None))


def refusals(value: Any, saved: Any) -> Iterator[tuple[Path, str]]:
    """Yield what an object refuses: the keys that lead there in its state, and why, in words.

    Parameters
    ----------
    saved : nested state
        Its saved state, with `Saved` for tensors.
    """
    torch = sys.modules.get("torch")
    if checks_itself(value):
        yield from _by_itself(value.check_state_dict, saved)
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        yield from _by_optimizer(value, saved)


def _by_itself(check: Callable[[Any], object], saved: Any) -> Iterator[tuple[Path, str]]:
    try:
        check(_without_data(saved))
    except TensorkeepError as error:
        yield (), error.message
    except REFUSALS as error:
        yield (), str(error) or type(error).__name__


def _without_data(saved: Any) -> Any:
    """Return a state whose tensors have a shape and a dtype, but no memory."""
    if isinstance(saved, Saved):
        dtype, shape = saved.entry.dtype, saved.entry.shape
        if saved.kind in ("tensor", "parameter") or not isinstance(dtype.numpy, np.dtype):
            return allocate("tensor", dtype, shape, device="meta")
        return np.broadcast_to(np.zeros((), dtype.numpy), shape)
    found = items(saved)
    return saved if found is None else holding(saved, {key: _without_data(item) for key, item in found})


def _by_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[tuple[Path, str]]:
    groups = optimizer.param_groups
    counts, saved_counts = _counts(groups), _counts(saved.get("param_groups") if isinstance(saved, dict) else None)
    if saved_counts is None:
        yield (), "an optimizer in the state, none saved"
        return
    if counts != saved_counts:
        yield (), f"groups of {counts} parameters in the state, of {saved_counts} saved"
        return
    if f"{type(optimizer).__module__}.".startswith("torch.optim."):
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            yield from _of_another_shape(saved.get("state"), index, tuple(parameter.shape))


def _counts(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None


def _of_another_shape(states: Any, index: int, shape: tuple[int, ...]) -> Iterator[tuple[Path, str]]:
    state = states.get(index) if isinstance(states, dict) else None
    found = state if isinstance(state, dict) else {}
    for key in _SHAPED_LIKE_THE_PARAMETER:
        value = found.get(key)
        if isinstance(value, Saved) and value.entry.shape != shape:
            yield ("state", index, key), f"{list(value.entry.shape)} saved, for a parameter of {list(shape)}"
