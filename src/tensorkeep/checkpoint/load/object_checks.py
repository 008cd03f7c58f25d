"""Asking an object whether it accepts its saved state, before any of it is loaded."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorkeep.checkpoint.stateful import items, with_items
from tensorkeep.errors import TensorkeepError
from tensorkeep.formats.base import Entry
from tensorkeep.state.leaf import LeafKind, allocate
from tensorkeep.state.names import Path

if TYPE_CHECKING:
    import torch

REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What ``load_state_dict`` and ``check_state_dict`` raise about a state that does not fit."""

_SHAPED_LIKE_THE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("momentum_buffer", "ax", "prev", "step_size", "variance"),
)
"""In the states of torch's own optimizers; other optimizers may factor (Adafactor) or project (GaLore) theirs."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Stands for a tensor of a checkpoint in its state."""

    name: str
    kind: LeafKind
    entry: Entry


def is_module(value: object) -> bool:
    """Return whether an object is a torch module, whose tensors exist and are filled in place."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def has_check(value: object) -> bool:
    """Return whether an object has a ``check_state_dict()``, which decides which shapes it accepts."""
    return callable(getattr(value, "check_state_dict", None))


def refusals(value: Any, saved: Any) -> Iterator[tuple[Path, str]]:
    """Yield what an object would refuse of its saved state: the keys in it, and the reason in words."""
    torch = sys.modules.get("torch")
    if has_check(value):
        yield from _by_its_check(value.check_state_dict, saved)
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        yield from _by_optimizer(value, saved)


def _by_its_check(check: Callable[[Any], object], saved: Any) -> Iterator[tuple[Path, str]]:
    try:
        check(_without_data(saved))
    except TensorkeepError as error:
        yield (), error.message
    except REFUSALS as error:
        yield (), str(error) or type(error).__name__


def _without_data(saved: Any) -> Any:
    """Return a state with meta tensors, or arrays of stride 0, for its tensors."""
    if isinstance(saved, SavedTensor):
        dtype, shape = saved.entry.dtype, saved.entry.shape
        if saved.kind in ("tensor", "parameter") or not isinstance(dtype.numpy, np.dtype):
            return allocate("tensor", dtype, shape, device="meta")
        return np.broadcast_to(np.zeros((), dtype.numpy), shape)
    found = items(saved)
    return saved if found is None else with_items(saved, {key: _without_data(item) for key, item in found})


def _by_optimizer(optimizer: "torch.optim.Optimizer", saved: Any) -> Iterator[tuple[Path, str]]:
    groups = optimizer.param_groups
    counts, saved_counts = _counts(groups), _counts(saved.get("param_groups") if isinstance(saved, dict) else None)
    if saved_counts is None:
        yield (), "an optimizer in the state, none saved"
        return
    if counts != saved_counts:
        yield (), f"groups of {counts} parameters in the state, of {saved_counts} saved"
        return
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return
    states = saved.get("state")
    for index, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
        found = states.get(index) if isinstance(states, dict) else None
        state, shape = found if isinstance(found, dict) else {}, tuple(parameter.shape)
        for key in _SHAPED_LIKE_THE_PARAMETER:
            value = state.get(key)
            if isinstance(value, SavedTensor) and value.entry.shape != shape:
                yield ("state", index, key), f"{list(value.entry.shape)} saved, for a parameter of {list(shape)}"


def _counts(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None
