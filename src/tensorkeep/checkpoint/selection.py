"""Which tensors of a checkpoint, and which objects of a state, are selected by globs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tensorkeep.checkpoint.restore.containers import items
from tensorkeep.checkpoint.restore.object_checks import is_module
from tensorkeep.checkpoint.restore.stateful import Held
from tensorkeep.checkpoint.restore.structure import below
from tensorkeep.errors import UsageError
from tensorkeep.state import names
from tensorkeep.state.names import Path, display


class Selection(NamedTuple):
    """What is selected.

    Attributes
    ----------
    chosen : list of str
        The names of tensors.
    left : set of Path
        The objects of which nothing is, and which are left as they are.
    """

    chosen: list[str]
    left: set[Path]


def select_parts(
    patterns: str | Iterable[str] | None, tensors: Mapping[str, Path], objects: Mapping[Path, tuple[Held, Any]]
) -> Selection:
    """Select tensors by their names, and objects that have none by their keys or those of the values in their states.

    Parameters
    ----------
    patterns : str or list of str, optional
        All is selected without them.
    tensors : mapping of str to Path
        The names of the checkpoint, and where the tensors lie.
    objects : mapping of Path to (Held, nested state)
        The objects, outer ones first, each with its saved state.

    Raises
    ------
    UsageError
        If a pattern matches nothing, or some, but not all tensors of an object other than a module.
    """
    if patterns is None:
        return Selection(list(tensors), set())
    parts = {path: _names(path, saved, tensors) for path, (_, saved) in objects.items()}
    found = set(names.select(dict.fromkeys([*tensors, *(name for part in parts.values() for name in part)]), patterns))
    left: set[Path] = set()
    whole: set[Path] = set()
    for path, (held, _) in objects.items():
        if below(path, whole | left):
            continue
        if not parts[path] & found:
            left.add(path)
        elif not is_module(held.value):
            whole.add(path)
            _check_whole(path, held, parts[path] & tensors.keys(), found)
    return Selection([name for name in tensors if name in found], left)


def _names(path: Path, saved: Any, tensors: Mapping[str, Path]) -> set[str]:
    """Return the names of an object's tensors; where it has none, its own and those of the values in its state."""
    found = {name for name, keys in tensors.items() if keys[: len(path)] == path}
    return found or {display(path), *_values(saved, path)}


def _values(state: Any, path: Path) -> Iterable[str]:
    for key, item in items(state) or []:
        yield display((*path, key))
        yield from _values(item, (*path, key))


def _check_whole(path: Path, held: Held, tensors: set[str], found: set[str]) -> None:
    if not tensors <= found:
        raise UsageError(
            f"only some tensors of the {type(held.value).__name__} at {display(path)!r} are selected",
            remedy="select all or none of them",
        )
