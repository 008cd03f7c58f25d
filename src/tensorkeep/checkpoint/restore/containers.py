"""The containers of a state: their items, and a copy of a container with other items."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from tensorkeep.state.names import Key, Path
from tensorkeep.state.registry import is_namedtuple, registered_name


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """Return the items of a container by key, index or field name; None for any other value.

    Containers are dicts, ordered dicts, lists, tuples, named tuples and registered dataclasses.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        return list(value.items())
    if kind in (list, tuple):
        return list(enumerate(value))
    if is_namedtuple(kind):
        return list(zip(kind._fields, value, strict=True))
    if _is_registered_dataclass(kind):
        fields = (field.name for field in dataclasses.fields(value))
        return [(field, getattr(value, field)) for field in fields if hasattr(value, field)]
    return None


def with_items(value: Any, found: Mapping[Key, Any]) -> Any:
    """Return a container like the given one with other items under its keys; the same one if nothing changes."""
    before = items(value) or []
    if all(found[key] is item for key, item in before):
        return value
    if type(value) in (list, tuple):
        return type(value)(found.values())
    if is_namedtuple(type(value)):
        return value._make(found.values())
    if _is_registered_dataclass(type(value)):
        made = object.__new__(type(value))
        for field, item in found.items():
            object.__setattr__(made, str(field), item)  # also if it is frozen
        return made
    made = type(value)(found)
    if type(value) is OrderedDict:
        vars(made).update(vars(value))
    return made


def container_kind(value: Any) -> str | None:
    """Return "dict", "list", or the name of a named tuple or dataclass; None if the value is not a container."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return "dict"
    if kind in (list, tuple):
        return "list"
    return kind.__name__ if is_namedtuple(kind) or _is_registered_dataclass(kind) else None


def paths_to(state: Any, kind: type | tuple[type, ...], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all values of some types in nested containers, with the keys that lead to them."""
    if isinstance(state, kind):
        yield path, state
        return
    for key, item in items(state) or []:
        yield from paths_to(item, kind, (*path, key))


def value_at(state: Any, path: Path) -> Any:
    """Return the value at the end of some keys; KeyError if it does not exist."""
    for key in path:
        found = items(state)
        if found is None:
            raise KeyError(key)
        state = dict(found)[key]
    return state


def is_below(path: Path, places: Mapping[Path, Any] | set[Path]) -> bool:
    """Return whether some keys lead to, or through, one of some places."""
    return any(path[:length] in places for length in range(len(path) + 1))


def _is_registered_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and registered_name(kind) is not None
