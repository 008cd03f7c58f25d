"""Comparing the keys of a state with those of a checkpoint, and finding the objects that both have."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorkeep.checkpoint.load.object_checks import SavedTensor, is_module
from tensorkeep.checkpoint.stateful import StatefulObject, container_kind, items, paths_to, value_at
from tensorkeep.state.names import Key, Path


class KeyComparison:
    """Which keys of a state and of a checkpoint differ, and the objects that are in both.

    Objects of the state are wrapped, and in the checkpoint's `SavedTensor` stands for tensors. Keys of the top level
    and of containers with objects or tensors (or arrays) in either are compared. Other containers are restored as
    saved. The states of objects are not compared, except for the keys of modules.

    A dict may lack entries at the top level: ``left_out`` has those with tensors, which are not loaded. Only if it has
    tensors there itself, as a state dict has, it must have all tensors that the checkpoint has there. ``different``
    describes values of different kinds; ``objects`` has the saved state beside each object.
    """

    def __init__(self, state: Any, saved: Any) -> None:
        self.missing: list[Path] = []
        self.extra: list[Path] = []
        self.left_out: set[Path] = set()
        self.different: dict[Path, str] = {}
        self.objects: dict[Path, tuple[StatefulObject, Any]] = {}
        ends = [path for path, tensor in paths_to(saved, SavedTensor) if tensor.kind != "npscalar"]
        ends += [path for path, _ in paths_to(state, (StatefulObject, *array_types()))]
        self._leading = {path[:length] for path in ends for length in range(len(path))}
        self._visit(state, saved, ())

    def ignore_nesting(self, given: Mapping[str, Path], saved: Mapping[str, Path]) -> None:
        """Accept other containers and keys around tensors of the same names, which formats without nesting have.

        Both arguments are the keys that lead to each tensor.
        """

        def below(path: Path, paths: Mapping[str, Path]) -> set[str]:
            return {name for name, keys in paths.items() if keys[: len(path)] == path}

        def accepted(path: Path, mine: Mapping[str, Path], theirs: Mapping[str, Path]) -> bool:
            found = below(path, mine)
            return bool(found) and found <= theirs.keys()

        self.missing = [path for path in self.missing if not accepted(path, given, saved)]
        self.extra = [path for path in self.extra if not accepted(path, saved, given)]
        self.left_out = {path for path in self.left_out if not accepted(path, saved, given)}
        for path in list(self.different):
            if accepted(path, given, saved) and accepted(path, saved, given):
                del self.different[path]

    def _visit(self, given: Any, saved: Any, path: Path) -> None:
        """Compare what both have under the same keys."""
        if isinstance(given, StatefulObject):
            self._object(given, saved, path)
        elif not path or path in self._leading:
            self._containers(given, saved, path)
        elif isinstance(saved, SavedTensor):
            if saved.kind != "npscalar" and not isinstance(given, array_types()):
                self.different[path] = _kinds(given, saved)
        elif isinstance(given, array_types()):
            self.different[path] = _kinds(given, saved)

    def _containers(self, given: Any, saved: Any, path: Path) -> None:
        if container_kind(given) != container_kind(saved):
            self.different[path] = _kinds(given, saved)
            return
        for key, (mine, theirs) in self._keys(given, saved, path).items():
            self._visit(mine, theirs, (*path, key))
        if not path and container_kind(given) == "dict":
            self._leave_out(given, saved)

    def _leave_out(self, given: Any, saved: Any) -> None:
        """Take keys of the top level that the state need not have from those that are extra."""
        is_state_dict = any(isinstance(value, array_types()) for value in given.values())
        extra = {path: saved[path[0]] for path in self.extra if len(path) == 1}
        tensors = {path for path, value in extra.items() if isinstance(value, SavedTensor) and value.kind != "npscalar"}
        self.left_out = {path for path in extra if path in tensors or path in self._leading}
        required = tensors if is_state_dict else set()
        self.left_out -= required
        self.extra = [path for path in self.extra if len(path) > 1 or path in required]

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


def array_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)


def _kinds(given: Any, saved: Any) -> str:
    return f"{_kind(given)} in the state, {_kind(saved)} saved"


def _kind(value: Any) -> str:
    if isinstance(value, (SavedTensor, *array_types())):
        return "tensor"
    return container_kind(value) or type(value).__name__
