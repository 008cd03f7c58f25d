"""The containers that a state is built of: what they hold, and the same container holding something else."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from tensorkeep.state.names import Key, Path
from tensorkeep.state.registry import is_namedtuple, registered_name


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """Return what a container holds, with its keys, places or fields; None for what is no container of a state.

    Containers are dicts, ordered dicts, lists, tuples, named tuples and registered dataclasses.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        return list(value.items())
    if kind in (list, tuple):
        return list(enumerate(value))
    if is_namedtuple(kind):
        return list(zip(kind._fields, value, strict=True))
    if _is_record(kind):
        fields = (field.name for field in dataclasses.fields(value))
        return [(field, getattr(value, field)) for field in fields if hasattr(value, field)]
    return None


def holding(value: Any, found: Mapping[Key, Any]) -> Any:
    """Return a container like the one given that holds something else under its keys: itself where nothing changes."""
    before = items(value) or []
    if all(found[key] is item for key, item in before):
        return value
    if type(value) in (list, tuple):
        return type(value)(found.values())
    if is_namedtuple(type(value)):
        return value._make(found.values())
    if _is_record(type(value)):
        made = object.__new__(type(value))
        for field, item in found.items():
            object.__setattr__(made, str(field), item)  # Frozen ones, too.
        return made
    made = type(value)(found)
    if type(value) is OrderedDict:
        vars(made).update(vars(value))
    return made


def sort_of(value: Any) -> str | None:
    """Return in one word how a container is taken apart; None for what is none."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return "dict"
    if kind in (list, tuple):
        return "list"
    return kind.__name__ if is_namedtuple(kind) or _is_record(kind) else None


def paths_to(state: Any, kind: type, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all values of a type that lie in a nest of containers, with the keys that lead to them."""
    if isinstance(state, kind):
        yield path, state
        return
    for key, item in items(state) or []:
        yield from paths_to(item, kind, (*path, key))


def at(state: Any, path: Path) -> Any:
    """Return what lies at the end of some keys; KeyError if nothing does."""
    for key in path:
        found = items(state)
        if found is None:
            raise KeyError(key)
        state = dict(found)[key]
    return state


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and registered_name(kind) is not None
