"""Comparing the keys of a training state with those of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorkeep.checkpoint.restore.containers import at, items, paths_to, sort_of
from tensorkeep.checkpoint.restore.object_checks import Saved, is_module
from tensorkeep.checkpoint.restore.stateful import Held
from tensorkeep.state.names import Path


@dataclass(slots=True)
class Structure:
    """What keys of a state and of a checkpoint differ, and the objects that both have.

    Attributes
    ----------
    missing, extra : list of Path
        Keys that only the state has, and that only the checkpoint has.
    different : dict of Path to str
        Keys under which both have something of another sort, in words.
    objects : dict of Path to (Held, nested state)
        The objects, those in the states of others included, each with its saved state.
    """

    missing: list[Path] = field(default_factory=list)
    extra: list[Path] = field(default_factory=list)
    different: dict[Path, str] = field(default_factory=dict)
    objects: dict[Path, tuple[Held, Any]] = field(default_factory=dict)


def compare_keys(state: Any, saved: Any) -> Structure:
    """Compare a state, in which objects are held, with a checkpoint's, in which `Saved` stands for tensors.

    The keys of all containers that lead to objects, tensors or arrays in either are compared, and those at the top.
    Containers of nothing but plain values are values themselves: they come back as they were saved. What objects hold
    is their own affair, but for the keys of modules.
    """
    comparison = _Comparison(state, saved)
    comparison.visit(state, saved, ())
    return comparison.found


def below(path: Path, places: Collection[Path]) -> bool:
    """Say whether some keys lead to, or through, one of some places."""
    return any(path[:length] in places for length in range(len(path) + 1))


class _Comparison:
    def __init__(self, state: Any, saved: Any) -> None:
        self.found = Structure()
        ends = [path for path, leaf in paths_to(saved, Saved) if leaf.kind != "npscalar"]
        ends += [path for path, _ in paths_to(state, Held)]
        ends += [path for kind in _array_types() for path, _ in paths_to(state, kind)]
        self._leading = {path[:length] for path in ends for length in range(len(path))}

    def visit(self, given: Any, saved: Any, path: Path) -> None:
        """Compare what both have under the same keys."""
        if isinstance(given, Held):
            self._object(given, saved, path)
        elif not path or path in self._leading:
            self._containers(given, saved, path)
        elif isinstance(given, _array_types()) != isinstance(saved, Saved) and not _is_scalar(saved):
            self.found.different[path] = _sorts(given, saved)

    def _containers(self, given: Any, saved: Any, path: Path) -> None:
        if sort_of(given) != sort_of(saved):
            self.found.different[path] = _sorts(given, saved)
            return
        mine = self._keys(given, saved, path)
        theirs = dict(items(saved) or [])
        for key, item in mine.items():
            if key in theirs:
                self.visit(item, theirs[key], (*path, key))

    def _keys(self, given: Any, saved: Any, path: Path) -> dict[Any, Any]:
        mine, theirs = dict(items(given) or []), dict(items(saved) or [])
        self.found.missing += [(*path, key) for key in mine if key not in theirs]
        self.found.extra += [(*path, key) for key in theirs if key not in mine]
        return mine

    def _object(self, held: Held, saved: Any, path: Path) -> None:
        self.found.objects[path] = held, saved
        if is_module(held.value):
            self._keys(held.state, saved, path)
        for keys, inner in paths_to(held.state, Held):
            try:
                part = at(saved, keys)
            except KeyError:
                self.found.missing.append((*path, *keys))
            else:
                self.visit(inner, part, (*path, *keys))


def _array_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)


def _is_scalar(saved: Any) -> bool:
    return isinstance(saved, Saved) and saved.kind == "npscalar"


def _sorts(given: Any, saved: Any) -> str:
    return f"{_sort(given)} in the state, {_sort(saved)} saved"


def _sort(value: Any) -> str:
    if isinstance(value, (Saved, *_array_types())):
        return "tensor"
    return sort_of(value) or type(value).__name__
