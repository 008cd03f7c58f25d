"""States of objects: what has a ``state_dict()`` stands for it, and takes it back; and the states of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.errors import StateMismatchError, UnsupportedError
from holdfast.state.names import Key, Path, display


def is_stateful(value: object) -> bool:
    """Say whether a value has a ``state_dict()`` and a ``load_state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def expand(state: Any) -> Any:
    """Return a state in which what has a ``state_dict()`` is replaced by what it returns; nothing else is changed."""
    if is_stateful(state):
        return state.state_dict()
    # Only plain containers: others are rebuilt from their fields, which hold no such objects.
    if type(state) is dict:
        return {key: expand(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(expand(value) for value in state)
    return state


def find_stateful(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the objects that `expand` replaces, with the keys that lead to them."""
    if is_stateful(state):
        yield path, state
    elif type(state) is dict:
        for key, value in state.items():
            yield from find_stateful(value, (*path, key))
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            yield from find_stateful(value, (*path, index))


def at(state: Any, path: Path) -> Any:
    """Return what lies at the end of some keys; KeyError if nothing does."""
    for key in path:
        state = _item(state, key)
    return state


def _item(state: Any, key: Key) -> Any:
    try:
        return state[key]
    except (IndexError, TypeError) as error:
        raise KeyError(key) from error


def put_back(into: Any, loaded: Any, path: Path = ()) -> Any:
    """Give each object in ``into`` its part of what was loaded; return the loaded state with the objects in it.

    Raises
    ------
    StateMismatchError
        If an object refuses what it is given.
    """
    if is_stateful(into):
        try:
            into.load_state_dict(loaded)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateMismatchError(
                f"the {type(into).__name__} at {display(path)!r} does not take its saved state: {error}",
                remedy="restore into an object that was made in the same way",
            ) from error
        return into
    if type(into) is dict and isinstance(loaded, dict):
        return {
            key: put_back(into[key], value, (*path, key)) if key in into else value for key, value in loaded.items()
        }
    if type(into) in (list, tuple) and type(loaded) is type(into) and len(into) == len(loaded):
        return type(into)(put_back(*pair, (*path, index)) for index, pair in enumerate(zip(into, loaded, strict=True)))
    return loaded


class RandomState:
    """The states of all random-number generators of this process: Python's, numpy's, torch's, and CUDA's.

    Save it with the rest, ``{"model": model, "rng": holdfast.RandomState()}``, and a run that is restored goes on with
    the same numbers. Generators of your own have states of their own to save (``torch.Generator.get_state()``).
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators.

        Raises
        ------
        UnsupportedError
            If CUDA's states are those of another number of devices.
        """
        import torch

        cuda = state.get("cuda", [])
        if cuda and len(cuda) != torch.cuda.device_count():
            raise UnsupportedError(
                f"holds the random states of {len(cuda)} CUDA devices, and there are {torch.cuda.device_count()} here",
                remedy='leave "rng" out of `into`, and seed the generators anew',
            )
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(map(int, python["internal"])), python["gauss"]))
        np.random.set_state((numpy_state["kind"], numpy_state["keys"], numpy_state["position"], *numpy_state["gauss"]))
        torch.set_rng_state(state["torch"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
