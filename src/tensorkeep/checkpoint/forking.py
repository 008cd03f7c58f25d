"""Resetting objects in forked children, which have neither the threads nor the locks of their parents."""

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def reset_in_child(instance: T, reset: Callable[[T], None]) -> None:
    """Call ``reset(instance)`` in every child that is forked while the instance exists; for the newest one first."""
    _resets[instance] = reset


def _reset_all() -> None:
    for instance, reset in reversed(list(_resets.items())):
        reset(instance)


os.register_at_fork(after_in_child=_reset_all)
