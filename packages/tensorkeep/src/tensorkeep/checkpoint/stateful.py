"""The containers of a training state, and its objects with a ``state_dict()``; `RandomState`."""

import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorkeep.errors import UnsupportedError
from tensorkeep.ranks.group import RankCoordinator
from tensorkeep.state.names import Key, KeyPath
from tensorkeep.state.skeleton import (
    PerRank,
    Unmade,
    check_depth,
    is_namedtuple,
    make_object,
    object_fields,
    object_with,
    refuse_per_rank,
)
from tensorkeep.state.stateful import MT19937_WORDS, PythonGenerator, Stateful, check_position, stateful


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """The items of a container by key, index or field name; None for any other value."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        return list(value.items())
    if kind in (list, tuple, deque):
        return list(enumerate(value))
    if is_namedtuple(kind):
        return list(zip(kind._fields, value, strict=True))
    fields = object_fields(value)
    return None if fields is None else [*fields.items()]


def with_items(value: Any, found: Mapping[Key, Any]) -> Any:
    """A container like the given one with other items under the same keys; the same one if nothing changes."""
    # Another thread may have changed the container meanwhile.
    before = dict(items(value) or [])
    if before.keys() == found.keys() and all(found[key] is item for key, item in before.items()):
        return value
    if type(value) in (list, tuple):
        return type(value)(found.values())
    if type(value) is deque:
        return deque(found.values(), value.maxlen)
    if is_namedtuple(type(value)):
        return value._make(found.values())
    if object_fields(value) is not None:
        return object_with(value, {str(field): item for field, item in found.items()})
    made = type(value)(found)
    # torch's `_metadata` is an attribute of the dict.
    if type(value) is OrderedDict:
        vars(made).update(vars(value))
    return made


def container_kind(value: Any) -> str | None:
    """ "dict", "list", or the name of a named tuple or dataclass; None if the value is not a container."""
    kind = value.cls if type(value) is Unmade else type(value)
    if kind in (dict, OrderedDict, Counter):
        return "dict"
    if kind in (list, tuple, deque):
        return "list"
    return kind.__name__ if is_namedtuple(kind) or object_fields(value) is not None else None


def paths_to(state: Any, kind: type | tuple[type, ...], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield all values of some types with their keys. Raises UnsupportedLeafError if nested too deeply."""
    if isinstance(state, kind):
        yield path, state
    elif found := items(state):
        check_depth(path, len(path))
        for key, item in found:
            yield from paths_to(item, kind, (*path, key))


def value_at(state: Any, path: KeyPath) -> Any:
    """Raises KeyError if the value does not exist."""
    for key in path:
        state = dict(items(state) or [])[key]
    return state


def has_value(state: Any, path: KeyPath) -> bool:
    try:
        value_at(state, path)
    except KeyError:
        return False
    return True


def is_below(path: KeyPath, places: Mapping[KeyPath, Any] | set[KeyPath]) -> bool:
    """Whether some keys lead to, or through, one of some places."""
    return any(path[:length] in places for length in range(len(path) + 1))


# Objects


@dataclass(frozen=True, slots=True)
class StatefulObject:
    """An object and its ``state_dict()``; ``names`` maps own names to the checkpoint's, where they differ."""

    value: Any
    state: Any
    names: Mapping[Key, Key] = field(default_factory=dict)

    @property
    def methods(self) -> Stateful:
        """The object with ``load_state_dict()``: the value itself, or the access to the state of a generator."""
        found = stateful(self.value)
        assert found is not None
        return found


# Loads a state into the object at the end of some keys.
LoadObject = Callable[[KeyPath, StatefulObject, Any], None]


def wrap_objects(state: Any, path: KeyPath = (), *, depth: int = 0) -> Any:
    """Replace every object by a `StatefulObject`. Raises UnsupportedLeafError if nested too deeply."""
    methods = stateful(state)
    found = items(state) if methods is None else None
    if isinstance(state, PerRank):
        refuse_per_rank(path, nested=True)
    if methods is None and found is None:
        return state
    check_depth(path, depth)
    if methods is not None:
        return StatefulObject(state, wrap_objects(methods.state_dict(), path, depth=depth + 1))
    assert found is not None  # otherwise returned above
    return with_items(state, {key: wrap_objects(item, (*path, key), depth=depth + 1) for key, item in found})


def unwrap_states(state: Any) -> Any:
    if isinstance(state, StatefulObject):
        return unwrap_states(state.state)
    found = items(state)
    return state if found is None else with_items(state, {key: unwrap_states(item) for key, item in found})


def made(state: Any) -> Any:
    """Make the objects that are `Unmade`, the inner ones first. Raises UnsupportedError."""
    found = items(state)
    if found is None:
        return state
    inside = {key: made(item) for key, item in found}
    if type(state) is Unmade:
        return make_object(state.cls, {str(key): item for key, item in inside.items()})
    return state if all(inside[key] is item for key, item in found) else with_items(state, inside)


def load_objects(state: Any, loaded: Any, load: LoadObject, path: KeyPath = ()) -> Any:
    """Load its state into each wrapped object; return the loaded state with the objects in it."""
    if isinstance(state, StatefulObject):
        # Inner objects first: they are in the state that the outer one is given.
        load(path, state, made(load_objects(state.state, loaded, load, path)))
        return state.value
    given, found = items(state), items(loaded)
    if given is None or found is None:
        return loaded
    mine = dict(given)
    return with_items(
        loaded, {key: load_objects(mine[key], item, load, (*path, key)) if key in mine else item for key, item in found}
    )


class RandomState:
    """The states of all global random-number generators of this process: Python's, numpy's, torch's, and CUDA's.

    Save it with the rest, ``{"model": model, "rng": tensorkeep.RandomState()}``, and a restored run continues with the
    same random numbers. Put generators of your own (`torch.Generator`, `numpy.random.Generator`, `random.Random`) into
    the state as well, as they are: ``{"noise": generator}``.

    Examples
    --------
    >>> import torch, tensorkeep
    >>> rng = tensorkeep.RandomState()
    >>> state = rng.state_dict()
    >>> before = torch.rand(3)
    >>> rng.load_state_dict(state)
    >>> torch.equal(torch.rand(3), before)
    True
    """

    def __repr__(self) -> str:
        return "RandomState()"

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        found: dict[str, Any] = {
            "python": PythonGenerator(random).state_dict(),
            "numpy": {"kind": kind, "keys": np.array(keys), "position": position, "gauss": [has_gauss, cached]},
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            found["torch"] = torch.get_rng_state()
            if torch.cuda.is_available():
                found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UnsupportedError if there are CUDA states of another number of devices than this machine has."""
        saved = len(state.get("cuda", []))
        torch = sys.modules.get("torch")
        here = torch.cuda.device_count() if torch is not None else 0
        if saved not in (0, here):
            text = f"holds the random states of {saved} CUDA devices, and this machine has {here}"
            raise UnsupportedError(text, remedy="do not restore them (`select` the rest), and seed the generators")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators; raise as `check_state_dict`."""
        import torch

        self.check_state_dict(state)
        numpy_state = state["numpy"]
        check_position("position", numpy_state["position"], MT19937_WORDS)
        PythonGenerator(random).load_state_dict(state["python"])
        np.random.set_state((numpy_state["kind"], numpy_state["keys"], numpy_state["position"], *numpy_state["gauss"]))
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if state.get("cuda"):
            torch.cuda.set_rng_state_all(state["cuda"])


def for_rank(state: Any, ranks: RankCoordinator) -> tuple[Any, dict[KeyPath, PerRank]]:
    """Replace every `PerRank` by {rank: value}; return both. UsageError if one process works alone."""
    found = dict(paths_to(state, PerRank))
    if found and not ranks.is_distributed:
        refuse_per_rank(next(iter(found)), nested=False)
    return with_values_at(state, {path: {str(ranks.rank): each.value} for path, each in found.items()}), found


def with_values_at(state: Any, values: Mapping[KeyPath, Any]) -> Any:
    if () in values:
        return values[()]
    below: dict[Key, dict[KeyPath, Any]] = {}
    for (key, *rest), value in values.items():
        below.setdefault(key, {})[tuple(rest)] = value
    own = items(state) if values else None
    if own is None:
        return state
    return with_items(state, {key: with_values_at(item, below.get(key, {})) for key, item in own})
