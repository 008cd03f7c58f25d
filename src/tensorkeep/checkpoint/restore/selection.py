"""Which tensors of a checkpoint, and which objects of a state, are selected by globs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tensorkeep.checkpoint.restore.containers import is_below, items
from tensorkeep.checkpoint.restore.object_checks import is_module
from tensorkeep.checkpoint.restore.stateful import StatefulObject
from tensorkeep.errors import UsageError
from tensorkeep.state import names
from tensorkeep.state.names import Path, display


class Selection(NamedTuple):
    """What is selected.

    Attributes
    ----------
    tensors : list of str
        The names of the selected tensors.
    unselected : set of Path
        The objects of which nothing is selected, and which are not changed.
    """

    tensors: list[str]
    unselected: set[Path]


def select_tensors(
    patterns: str | Iterable[str] | None,
    tensors: Mapping[str, Path],
    objects: Mapping[Path, tuple[StatefulObject, Any]],
) -> Selection:
    """Select tensors by their names, and objects without tensors by their keys or those of the values in their states.

    Parameters
    ----------
    patterns : str or list of str, optional
        Everything by default.
    tensors : mapping of str to Path
        The names in the checkpoint, and the keys that lead to the tensors.
    objects : mapping of Path to (StatefulObject, nested state)
        The objects, outer ones first, each with its saved state.

    Raises
    ------
    UsageError
        If a pattern matches nothing, or some but not all tensors of an object other than a module.
    """
    if patterns is None:
        return Selection(list(tensors), set())
    own_names = {path: _names(path, saved, tensors) for path, (_, saved) in objects.items()}
    candidates = dict.fromkeys([*tensors, *(name for found in own_names.values() for name in found)])
    selected = set(names.select(candidates, patterns))
    unselected: set[Path] = set()
    complete: set[Path] = set()
    for path, (stateful, _) in objects.items():
        if is_below(path, complete | unselected):
            continue
        if not own_names[path] & selected:
            unselected.add(path)
        elif not is_module(stateful.value):
            complete.add(path)
            if not own_names[path] & tensors.keys() <= selected:
                raise UsageError(
                    f"only some tensors of the {type(stateful.value).__name__} at {display(path)!r} are selected",
                    remedy="select all or none of them",
                )
    return Selection([name for name in tensors if name in selected], unselected)


def _names(path: Path, saved: Any, tensors: Mapping[str, Path]) -> set[str]:
    """Return the names of an object's tensors; if it has none, its own name and those of the values in its state."""
    found = {name for name, keys in tensors.items() if keys[: len(path)] == path}
    return found or {display(path), *_value_names(saved, path)}


def _value_names(state: Any, path: Path) -> Iterable[str]:
    for key, item in items(state) or []:
        yield display((*path, key))
        yield from _value_names(item, (*path, key))
