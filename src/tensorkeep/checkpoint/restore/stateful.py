"""States of objects: what has a ``state_dict()`` stands for it, and takes it back; and the states of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorkeep.checkpoint.restore.containers import holding, items
from tensorkeep.errors import UnsupportedError, UnsupportedLeafError
from tensorkeep.state.names import Path, display
from tensorkeep.state.tree import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class Held:
    """An object of a state.

    Attributes
    ----------
    value : object
        It has a ``state_dict()`` and a ``load_state_dict()``.
    state : nested state
        What its ``state_dict()`` returned; other objects in it are held, too.
    """

    value: Any
    state: Any


Give = Callable[[Path, Held, Any], None]
"""Gives an object at the end of some keys what was loaded for it."""


def is_stateful(value: object) -> bool:
    """Say whether a value has a ``state_dict()`` and a ``load_state_dict()``."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def hold(state: Any, path: Path = (), *, depth: int = 0) -> Any:
    """Return a state in which each object is held together with its own state; nothing else is changed.

    Raises
    ------
    UnsupportedLeafError
        If it is nested too deeply.
    """
    stateful = is_stateful(state)
    found = None if stateful else items(state)
    if not stateful and found is None:
        return state
    if depth >= MAX_DEPTH:
        raise UnsupportedLeafError(
            f"the state is nested deeper than {MAX_DEPTH} levels",
            name=display(path[:4]),
            remedy="look for a container or an object that contains itself",
        )
    if found is None:
        return Held(state, hold(state.state_dict(), path, depth=depth + 1))
    return holding(state, {key: hold(item, (*path, key), depth=depth + 1) for key, item in found})


def plain(state: Any) -> Any:
    """Return a state in which each object that is held is replaced by its own state."""
    if isinstance(state, Held):
        return plain(state.state)
    found = items(state)
    return state if found is None else holding(state, {key: plain(item) for key, item in found})


def expand(state: Any) -> Any:
    """Return a state in which what has a ``state_dict()`` is replaced by what it returns; nothing else is changed.

    Raises
    ------
    UnsupportedLeafError
        If it is nested too deeply.
    """
    return plain(hold(state))


def put_back(state: Any, loaded: Any, give: Give, path: Path = ()) -> Any:
    """Give each object that is held its part of what was loaded; return the loaded state with the objects in it.

    An object that lies in the state of another one is given its part first and stands, itself, in what the other gets.
    """
    if isinstance(state, Held):
        give(path, state, put_back(state.state, loaded, give, path))
        return state.value
    given, found = items(state), items(loaded)
    if given is None or found is None:
        return loaded
    mine = dict(given)
    return holding(
        loaded, {key: put_back(mine[key], item, give, (*path, key)) if key in mine else item for key, item in found}
    )


class RandomState:
    """The states of all random-number generators of this process: Python's, numpy's, torch's, and CUDA's.

    Save it with the rest, ``{"model": model, "rng": tensorkeep.RandomState()}``, and a run that is restored goes on
    with the same numbers. Generators of your own have states of their own to save (``torch.Generator.get_state()``).
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as they are now."""
        version, internal, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        found: dict[str, Any] = {
            "python": {"version": version, "internal": np.array(internal, np.uint32), "gauss": gauss},
            "numpy": {"kind": kind, "keys": np.array(keys), "position": position, "gauss": [has_gauss, cached]},
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            found["torch"] = torch.get_rng_state()
            if torch.cuda.is_available():
                found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check whether states can be set here; only their number is looked at.

        Raises
        ------
        UnsupportedError
            If CUDA's states are those of another number of devices.
        """
        saved = len(state.get("cuda", []))
        torch = sys.modules.get("torch")
        here = torch.cuda.device_count() if torch is not None else 0
        if saved not in (0, here):
            raise UnsupportedError(
                f"holds the random states of {saved} CUDA devices, and there are {here} here",
                remedy="leave them out of what is restored, and seed the generators anew",
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators.

        Raises
        ------
        UnsupportedError
            If CUDA's states are those of another number of devices.
        """
        import torch

        self.check_state_dict(state)
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(map(int, python["internal"])), python["gauss"]))
        np.random.set_state((numpy_state["kind"], numpy_state["keys"], numpy_state["position"], *numpy_state["gauss"]))
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if state.get("cuda"):
            torch.cuda.set_rng_state_all(state["cuda"])
