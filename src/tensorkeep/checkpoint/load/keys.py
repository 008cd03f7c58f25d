"""Comparing the keys of a state with those of a checkpoint, and finding the objects that both have."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tensorkeep.checkpoint.load.object_checks import SavedTensor, is_module, unwrapped
from tensorkeep.checkpoint.stateful import (
    StatefulObject,
    container_kind,
    is_below,
    items,
    paths_to,
    value_at,
    with_items,
)
from tensorkeep.errors import UsageError
from tensorkeep.state import names
from tensorkeep.state.aliases import find_aliases
from tensorkeep.state.names import Key, Path, display
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.state.skeleton_writer import StateLeaf
from tensorkeep.state.tree import node_tag


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


# Selecting


def select_tensors(
    patterns: str | Iterable[str] | None,
    tensors: Mapping[str, Path],
    objects: Mapping[Path, tuple[StatefulObject, Any]],
) -> tuple[list[str], set[Path]]:
    """Return the names of the selected tensors, and the objects of which nothing is selected.

    Objects without tensors are selected by their keys or those of the values in their states.
    Raises UsageError if a pattern matches nothing, or some but not all tensors of an object other than a module.
    """
    if patterns is None:
        return list(tensors), set()
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
    return [name for name in tensors if name in selected], unselected


def _names(path: Path, saved: Any, tensors: Mapping[str, Path]) -> set[str]:
    """Return the names of an object's tensors; if it has none, its own name and those of the values in its state."""
    found = {name for name, keys in tensors.items() if keys[: len(path)] == path}
    return found or {display(path), *_value_names(saved, path)}


def _value_names(state: Any, path: Path) -> Iterable[str]:
    for key, item in items(state) or []:
        yield display((*path, key))
        yield from _value_names(item, (*path, key))


# The names of modules


def nested_like(node: Any, state: Any) -> Any:
    """Return a skeleton that has one dict for each module of the state, with the names of the module.

    Formats without nesting, such as safetensors, have names like ``model.weight`` at the top for ``{"model": model}``.
    Others have a dict for each part of a name.
    """
    tag, nodes = _dict_node(node)
    if nodes is None:
        return node
    if isinstance(state, StatefulObject):
        if not is_module(state.value) or not isinstance(state.state, dict):
            return node
        names = [key for key in state.state if isinstance(key, str)]
        around = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} - {*names}
        return {**node, tag: _flat(nodes, around)}
    if not isinstance(state, dict):
        return node
    nested = dict(nodes)
    for key, item in state.items():
        if isinstance(item, StatefulObject) and is_module(item.value) and isinstance(key, str) and key not in nodes:
            inside = {name: nested.pop(name) for name in [*nested] if name.startswith(f"{key}.")}
            nested |= {key: {"dict": {name[len(key) + 1 :]: each for name, each in inside.items()}}} if inside else {}
    return {**node, tag: {key: nested_like(each, state.get(key)) for key, each in nested.items()}}


def _dict_node(node: Any) -> tuple[str, dict[str, Any] | None]:
    """Return the tag of a node of a dict, and the nodes in it."""
    tag = node_tag(node)
    return (tag, node[tag]) if tag in ("dict", "ordered") else ("", None)


def _flat(nodes: Mapping[str, Any], around: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return nodes by dotted names, and the nodes of the dicts with names in ``around``."""
    found: dict[str, Any] = {}
    for key, node in nodes.items():
        inside = _dict_node(node)[1]
        name = f"{prefix}{key}"
        found |= {name: node} if inside is None or name not in around else _flat(inside, around, f"{name}.")
    return found


def named_as_saved(given: Any, saved: Any, leaves: Mapping[str, StateLeaf], path: Path = ()) -> Any:
    """Return a state whose modules have the names of the checkpoint; see `StatefulObject`.

    A name may differ in the keys of wrappers of modules. A name that the checkpoint lacks is left out if another name
    of the same tensor is in the checkpoint: many tools write a tied weight under one of its names only. ``leaves`` are
    the leaves of the whole state.
    """
    if isinstance(given, StatefulObject):
        if is_module(given.value):
            return _module_as_saved(given, saved, leaves, path)
        state = named_as_saved(given.state, saved, leaves, path)
        return given if state is given.state else replace(given, state=state)
    inside, theirs = items(given), dict(items(saved) or [])
    if inside is None:
        return given
    named = {key: named_as_saved(item, theirs[key], leaves, (*path, key)) for key, item in inside if key in theirs}
    return with_items(given, {key: named.get(key, item) for key, item in inside})


def _module_as_saved(given: StatefulObject, saved: Any, leaves: Mapping[str, StateLeaf], path: Path) -> StatefulObject:
    state = given.state
    if not isinstance(state, dict) or not isinstance(saved, dict) or state.keys() <= saved.keys():
        return given
    found = {key: key for key in state if key in saved}
    own, theirs = (_by_unwrapped(each) for each in (state, [key for key in saved if key not in state]))
    found |= {key: theirs[name] for name, key in own.items() if key not in found and name in theirs}
    if found.keys() != state.keys():
        ties = _ties(leaves, path)
        tied = {key: [other for other in ties.get(key, ()) if other in found] for key in state if key not in found}
        found |= {key: found[others[0]] for key, others in tied.items() if others}
    named: dict[Key, Any] = {}
    for key, item in state.items():
        named.setdefault(found.get(key, key), item)
    return replace(given, state=with_items(state, named), names=found) if named.keys() != state.keys() else given


def _by_unwrapped(keys: Iterable[Key]) -> dict[str, Key]:
    """Return keys by their names without wrappers, if no other key has the same one."""
    names = {key: unwrapped(key) for key in keys if isinstance(key, str)}
    counts = Counter(names.values())
    return {name: key for key, name in names.items() if counts[name] == 1}


def _ties(leaves: Mapping[str, StateLeaf], path: Path) -> dict[Key, list[Key]]:
    """Return the other keys of the same tensor for each tensor directly at ``path``."""
    aliases = find_aliases(found.leaf for found in leaves.values())
    groups: dict[str, list[Key]] = {}
    for name, found in leaves.items():
        alias = aliases.get(name)
        if found.path[:-1] == path and (alias is None or alias.is_full(leaves[alias.of].leaf.shape)):
            groups.setdefault(name if alias is None else alias.of, []).append(found.path[-1])
    return {key: keys for keys in groups.values() for key in keys}


def tied_with(name: str, leaves: Mapping[str, StateLeaf]) -> list[str]:
    """Return all names of a leaf's tensor; none if other leaves have parts of it."""
    aliases = find_aliases(found.leaf for found in leaves.values() if not isinstance(found.leaf, ShardedLeaf))
    base = aliases[name].of if name in aliases else name
    tied = {base: None} | {each: alias for each, alias in aliases.items() if alias.of == base}
    is_whole = all(alias is None or alias.is_full(leaves[base].leaf.shape) for alias in tied.values())
    return [*tied] if is_whole else []
