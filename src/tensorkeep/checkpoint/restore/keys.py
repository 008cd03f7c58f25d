"""Comparing the keys of a training state with those of a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorkeep.checkpoint.restore.containers import container_kind, items, paths_to, value_at
from tensorkeep.checkpoint.restore.object_checks import SavedTensor, is_module
from tensorkeep.checkpoint.restore.stateful import StatefulObject
from tensorkeep.state.names import Path


@dataclass(slots=True)
class KeyComparison:
    """Which keys of a state and of a checkpoint differ, and the objects that are in both.

    ``missing`` are only in the state, ``extra`` only in the checkpoint; ``different`` have values of different kinds,
    which it describes. ``objects``, including those in the states of others, have their saved states beside them.
    """

    missing: list[Path] = field(default_factory=list)
    extra: list[Path] = field(default_factory=list)
    different: dict[Path, str] = field(default_factory=dict)
    objects: dict[Path, tuple[StatefulObject, Any]] = field(default_factory=dict)


def compare_keys(state: Any, saved: Any) -> KeyComparison:
    """Compare a state with wrapped objects with a checkpoint's, in which `SavedTensor` stands for tensors.

    Compared are the keys at the top, and those of all containers that lead to objects, tensors or arrays in either.
    Containers of plain values only are values: they come back as they were saved. The states of objects are not
    compared, except for the keys of modules.
    """
    visitor = _Visitor(state, saved)
    visitor.visit(state, saved, ())
    return visitor.found


class _Visitor:
    def __init__(self, state: Any, saved: Any) -> None:
        self.found = KeyComparison()
        ends = [path for path, tensor in paths_to(saved, SavedTensor) if tensor.kind != "npscalar"]
        ends += [path for path, _ in paths_to(state, (StatefulObject, *_array_types()))]
        self._leading = {path[:length] for path in ends for length in range(len(path))}

    def visit(self, given: Any, saved: Any, path: Path) -> None:
        """Compare what both have under the same keys."""
        if isinstance(given, StatefulObject):
            self._object(given, saved, path)
        elif not path or path in self._leading:
            self._containers(given, saved, path)
        elif isinstance(given, _array_types()) != isinstance(saved, SavedTensor) and not _is_scalar(saved):
            self.found.different[path] = _kinds(given, saved)

    def _containers(self, given: Any, saved: Any, path: Path) -> None:
        if container_kind(given) != container_kind(saved):
            self.found.different[path] = _kinds(given, saved)
            return
        self._keys(given, saved, path)
        theirs = dict(items(saved) or [])
        for key, item in items(given) or []:
            if key in theirs:
                self.visit(item, theirs[key], (*path, key))

    def _keys(self, given: Any, saved: Any, path: Path) -> None:
        mine, theirs = dict(items(given) or []), dict(items(saved) or [])
        self.found.missing += [(*path, key) for key in mine if key not in theirs]
        self.found.extra += [(*path, key) for key in theirs if key not in mine]

    def _object(self, given: StatefulObject, saved: Any, path: Path) -> None:
        self.found.objects[path] = given, saved
        if is_module(given.value):
            self._keys(given.state, saved, path)
        for keys, inner in paths_to(given.state, StatefulObject):
            try:
                inner_saved = value_at(saved, keys)
            except KeyError:
                self.found.missing.append((*path, *keys))
            else:
                self.visit(inner, inner_saved, (*path, *keys))


def _array_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)


def _is_scalar(saved: Any) -> bool:
    return isinstance(saved, SavedTensor) and saved.kind == "npscalar"


def _kinds(given: Any, saved: Any) -> str:
    return f"{_kind(given)} in the state, {_kind(saved)} saved"


def _kind(value: Any) -> str:
    if isinstance(value, (SavedTensor, *_array_types())):
        return "tensor"
    return container_kind(value) or type(value).__name__
