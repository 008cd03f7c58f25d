"""Comparing the keys of a training state with those of a checkpoint."""

import sys
from typing import Any

import numpy as np

from tensorkeep.checkpoint.restore.containers import container_kind, items, paths_to, value_at
from tensorkeep.checkpoint.restore.object_checks import SavedTensor, is_module
from tensorkeep.checkpoint.restore.stateful import StatefulObject
from tensorkeep.state.names import Key, Path


class KeyComparison:
    """Which keys of a state and of a checkpoint differ, and the objects that are in both.

    Objects of the state are wrapped, and in the checkpoint's `SavedTensor` stands for tensors. Compared are the keys at
    the top, and those of all containers that lead to objects, tensors or arrays in either. Containers of plain values
    only are values: they come back as they were saved. The states of objects are not compared, except for the keys of
    modules. ``different`` describes values of different kinds; ``objects`` has the saved state beside each object.
    """

    def __init__(self, state: Any, saved: Any) -> None:
        self.missing: list[Path] = []
        self.extra: list[Path] = []
        self.different: dict[Path, str] = {}
        self.objects: dict[Path, tuple[StatefulObject, Any]] = {}
        ends = [path for path, tensor in paths_to(saved, SavedTensor) if tensor.kind != "npscalar"]
        ends += [path for path, _ in paths_to(state, (StatefulObject, *_array_types()))]
        self._leading = {path[:length] for path in ends for length in range(len(path))}
        self._visit(state, saved, ())

    def _visit(self, given: Any, saved: Any, path: Path) -> None:
        """Compare what both have under the same keys."""
        if isinstance(given, StatefulObject):
            self._object(given, saved, path)
        elif not path or path in self._leading:
            self._containers(given, saved, path)
        elif isinstance(saved, SavedTensor):
            if saved.kind != "npscalar" and not isinstance(given, _array_types()):
                self.different[path] = _kinds(given, saved)
        elif isinstance(given, _array_types()):
            self.different[path] = _kinds(given, saved)

    def _containers(self, given: Any, saved: Any, path: Path) -> None:
        if container_kind(given) != container_kind(saved):
            self.different[path] = _kinds(given, saved)
            return
        for key, (mine, theirs) in self._keys(given, saved, path).items():
            self._visit(mine, theirs, (*path, key))

    def _keys(self, given: Any, saved: Any, path: Path) -> dict[Key, tuple[Any, Any]]:
        """Note the keys that differ; return the items of the others."""
        mine, theirs = dict(items(given) or []), dict(items(saved) or [])
        self.missing += [(*path, key) for key in mine if key not in theirs]
        self.extra += [(*path, key) for key in theirs if key not in mine]
        return {key: (item, theirs[key]) for key, item in mine.items() if key in theirs}

    def _object(self, given: StatefulObject, saved: Any, path: Path) -> None:
        self.objects[path] = given, saved
        if is_module(given.value):
            self._keys(given.state, saved, path)
        for keys, inner in paths_to(given.state, StatefulObject):
            try:
                inner_saved = value_at(saved, keys)
            except KeyError:
                self.missing.append((*path, *keys))
            else:
                self._visit(inner, inner_saved, (*path, *keys))


def _array_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)


def _kinds(given: Any, saved: Any) -> str:
    return f"{_kind(given)} in the state, {_kind(saved)} saved"


def _kind(value: Any) -> str:
    if isinstance(value, (SavedTensor, *_array_types())):
        return "tensor"
    return container_kind(value) or type(value).__name__
