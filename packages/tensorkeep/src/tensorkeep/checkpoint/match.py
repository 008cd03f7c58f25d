"""Matching a state with a checkpoint: keys, objects, selected tensors, shapes and dtypes."""

import difflib
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.checkpoint.object_checks import (
    MatchedObject,
    ModuleAnswer,
    SavedTensor,
    ask_module,
    check_fillable,
    converts_states,
    has_check,
    is_extra_state,
    is_module,
    refusals,
)
from tensorkeep.checkpoint.ranges import Target
from tensorkeep.checkpoint.stateful import (
    StatefulObject,
    container_kind,
    has_value,
    is_below,
    items,
    paths_to,
    unwrap_states,
    value_at,
    with_items,
)
from tensorkeep.errors import (
    CorruptCheckpointError,
    RanksDisagreeError,
    StateMismatchError,
    StateMismatchWarning,
    UnsupportedError,
    UsageError,
    warn_caller,
)
from tensorkeep.formats.base import Entry, Reader
from tensorkeep.placeholder import Placeholder
from tensorkeep.ranks.group import ONE_RANK, RankCoordinator
from tensorkeep.state import names
from tensorkeep.state.aliases import find_aliases, full_view, sharing_conflict
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.modules import WRAPPERS, names_without_wrappers, unwrapped
from tensorkeep.state.names import Key, KeyPath, display, select
from tensorkeep.state.sharded import ShardedLeaf, is_dtensor
from tensorkeep.state.skeleton import SkeletonWriter, StateLeaf
from tensorkeep.state.tree import node_tag, placeholders, state_leaves, unflatten

# Keys, and the objects that the state and the checkpoint both have.


class KeyComparison:
    """Which keys of a state and of a checkpoint differ, and the objects that are in both."""

    # Containers around tensors or objects are compared; other containers are restored as saved.
    def __init__(self, state: Any, saved: Any) -> None:
        self.missing: list[KeyPath] = []
        self.extra: list[KeyPath] = []
        self.left_out: set[KeyPath] = set()  # saved entries of the top level that the state lacks
        self.different: dict[KeyPath, str] = {}
        self.objects: dict[KeyPath, tuple[StatefulObject, Any]] = {}
        # Numpy scalars are values: they come back as saved, whatever the state has.
        ends = [path for path, tensor in paths_to(saved, SavedTensor) if tensor.kind != "npscalar"]
        ends += [path for path, _ in paths_to(state, (StatefulObject, *array_types()))]
        self._leading = {path[:length] for path in ends for length in range(len(path))}
        self._visit(state, saved, ())

    def ignore_nesting(self, given: Mapping[str, KeyPath], saved: Mapping[str, KeyPath]) -> None:
        """Accept other containers and keys around tensors of the same names, which formats without nesting have."""

        def below(path: KeyPath, paths: Mapping[str, KeyPath]) -> set[str]:
            return {name for name, keys in paths.items() if keys[: len(path)] == path}

        def accepted(path: KeyPath, mine: Mapping[str, KeyPath], theirs: Mapping[str, KeyPath]) -> bool:
            found = below(path, mine)
            return bool(found) and found <= theirs.keys()

        self.missing = [path for path in self.missing if not accepted(path, given, saved)]
        self.extra = [path for path in self.extra if not accepted(path, saved, given)]
        self.left_out = {path for path in self.left_out if not accepted(path, saved, given)}
        for path in list(self.different):
            if accepted(path, given, saved) and accepted(path, saved, given):
                del self.different[path]

    def _visit(self, given: Any, saved: Any, path: KeyPath) -> None:
        if isinstance(given, StatefulObject):
            self._object(given, saved, path)
        elif not path or path in self._leading:
            self._containers(given, saved, path)
        elif isinstance(saved, SavedTensor):
            if saved.kind != "npscalar" and not isinstance(given, array_types()):
                self.different[path] = _kinds(given, saved)
        elif isinstance(given, array_types()):
            self.different[path] = _kinds(given, saved)

    def _containers(self, given: Any, saved: Any, path: KeyPath) -> None:
        if container_kind(given) != container_kind(saved):
            self.different[path] = _kinds(given, saved)
            return
        for key, (mine, theirs) in self._keys(given, saved, path).items():
            self._visit(mine, theirs, (*path, key))
        if not path and container_kind(given) == "dict":
            self._leave_out(given, saved)

    def _leave_out(self, given: Any, saved: Any) -> None:
        """Take keys of the top level that the state need not have from those that are extra."""
        # A dict with tensors at the top is a state dict: all saved tensors must be in it. A dict of objects may lack
        # entries.
        is_state_dict = any(isinstance(value, array_types()) for value in given.values())
        extra = {path: saved[path[0]] for path in self.extra if len(path) == 1}
        tensors = {path for path, value in extra.items() if isinstance(value, SavedTensor) and value.kind != "npscalar"}
        self.left_out = {path for path in extra if path in tensors or path in self._leading}
        required = tensors if is_state_dict else set()
        self.left_out -= required
        self.extra = [path for path in self.extra if len(path) > 1 or path in required]

    def _keys(self, given: Any, saved: Any, path: KeyPath) -> dict[Key, tuple[Any, Any]]:
        """Note the keys that differ; return the items of the others."""
        mine, theirs = dict(items(given) or []), dict(items(saved) or [])
        self.missing += [(*path, key) for key in mine if key not in theirs]
        self.extra += [(*path, key) for key in theirs if key not in mine]
        return {key: (item, theirs[key]) for key, item in mine.items() if key in theirs}

    def _object(self, given: StatefulObject, saved: Any, path: KeyPath) -> None:
        self.objects[path] = given, saved
        # Other objects check their keys themselves, in `load_state_dict`.
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


def select_by_target(
    patterns: str | Iterable[str] | None,
    tensors: Mapping[str, KeyPath],
    objects: Mapping[KeyPath, tuple[StatefulObject, Any]],
) -> tuple[list[str], set[KeyPath]]:
    """Return the selected names, and objects without one. UsageError for some but not all tensors of an object."""
    if patterns is None:
        return list(tensors), set()
    own_names = {path: _names(path, saved, tensors) for path, (_, saved) in objects.items()}
    candidates = dict.fromkeys([*tensors, *(name for found in own_names.values() for name in found)])
    selected = set(names.select(candidates, patterns))
    unselected: set[KeyPath] = set()
    complete: set[KeyPath] = set()
    for path, (stateful, _) in objects.items():
        if is_below(path, complete | unselected):
            continue
        if not own_names[path] & selected:
            unselected.add(path)
        # A module can load some of its tensors. Other objects load their whole state, or none.
        elif not is_module(stateful.value):
            complete.add(path)
            if not own_names[path] & tensors.keys() <= selected:
                text = f"only some tensors of the {type(stateful.value).__name__} at {display(path)!r} are selected"
                raise UsageError(text, remedy="select all of its tensors, or none")
    return [name for name in tensors if name in selected], unselected


def _names(path: KeyPath, saved: Any, tensors: Mapping[str, KeyPath]) -> set[str]:
    """The names of an object's tensors; without tensors, its own name and the names of its values."""
    found = {name for name, keys in tensors.items() if keys[: len(path)] == path}
    return found or {display(path), *_value_names(saved, path)}


def _value_names(state: Any, path: KeyPath) -> Iterable[str]:
    for key, item in items(state) or []:
        yield display((*path, key))
        yield from _value_names(item, (*path, key))


# The names of modules


def nested_like(node: Any, state: Any) -> Any:
    """Return a skeleton that has one dict for each module of the state, with the names of the module."""
    # Formats without nesting, such as safetensors, have names like ``model.weight`` at the top. Others have a dict for
    # each part of a name.
    tag, nodes = _dict_node(node)
    if nodes is None:
        return node
    if isinstance(state, StatefulObject):
        if not is_module(state.value) or not isinstance(state.state, dict):
            return node
        names = [key for key in state.state if isinstance(key, str)]
        # Prefixes of names that are not names themselves: only these can be dicts around tensors.
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
    tag = node_tag(node)
    return (tag, node[tag]) if tag in ("dict", "ordered") else ("", None)


def _flat(nodes: Mapping[str, Any], around: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nodes by dotted names, and the nodes of the dicts with names in ``around``."""
    found: dict[str, Any] = {}
    for key, node in nodes.items():
        inside = _dict_node(node)[1]
        name = f"{prefix}{key}"
        found |= {name: node} if inside is None or name not in around else _flat(inside, around, f"{name}.")
    return found


def named_as_saved(given: Any, saved: Any, leaves: Mapping[str, StateLeaf], path: KeyPath = ()) -> Any:
    """Return a state with the checkpoint's names for its modules; ``leaves`` belong to the whole state."""
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


def _module_as_saved(
    given: StatefulObject, saved: Any, leaves: Mapping[str, StateLeaf], path: KeyPath
) -> StatefulObject:
    state = given.state
    # All names are in the checkpoint: the usual case.
    if not isinstance(state, dict) or not isinstance(saved, dict) or state.keys() <= saved.keys():
        return given
    names = {key: key for key in state}
    # A save leaves the wrappers out. With an attribute ``module`` of the user, the other names may be names, too.
    if not all(isinstance(key, str) and key.partition(".")[0] in WRAPPERS for key in saved):
        bare = names_without_wrappers(given.value, state)
        names = max(names, bare, key=lambda each: sum(name in saved for name in each.values()))
    found = {key: name for key, name in names.items() if name in saved}
    taken = {*found.values()}
    own, theirs = (_by_unwrapped(each) for each in (state, [key for key in saved if key not in taken]))
    found |= {key: theirs[name] for name, key in own.items() if key not in found and name in theirs}
    if found.keys() != state.keys():
        # Many tools write a tied weight under one of its names only.
        ties = _ties(leaves, path)
        tied = {key: [other for other in ties.get(key, ()) if other in found] for key in state if key not in found}
        found |= {key: found[others[0]] for key, others in tied.items() if others}
    named: dict[Key, Any] = {}
    for key, item in state.items():
        # The first of several names wins: they are one tensor.
        named.setdefault(found.get(key, key), item)
    return replace(given, state=with_items(state, named), names=found) if named.keys() != state.keys() else given


def _by_unwrapped(keys: Iterable[Key]) -> dict[str, Key]:
    """Keys by their names without wrappers, if no other key has the same one."""
    names = {key: unwrapped(key) for key in keys if isinstance(key, str)}
    counts = Counter(names.values())
    return {name: key for key, name in names.items() if counts[name] == 1}


def _ties(leaves: Mapping[str, StateLeaf], path: KeyPath) -> dict[Key, list[Key]]:
    """The other keys of the same tensor, for each tensor directly at ``path``."""
    aliases = find_aliases(found.leaf for found in leaves.values())
    groups: dict[str, list[Key]] = {}
    for name, found in leaves.items():
        alias = aliases.get(name)
        if found.path[:-1] == path and (alias is None or alias.is_full(leaves[alias.of].leaf.shape)):
            groups.setdefault(name if alias is None else alias.of, []).append(found.path[-1])
    return {key: keys for keys in groups.values() for key in keys}


def tied_with(name: str, leaves: Mapping[str, StateLeaf]) -> list[str]:
    """All names of a leaf's tensor; none if other leaves share only a part."""
    aliases = find_aliases(found.leaf for found in leaves.values() if not isinstance(found.leaf, ShardedLeaf))
    base = aliases[name].of if name in aliases else name
    tied = {base: None} | {each: alias for each, alias in aliases.items() if alias.of == base}
    is_whole = all(alias is None or alias.is_full(leaves[base].leaf.shape) for alias in tied.values())
    return [*tied] if is_whole else []


# The state of a checkpoint from its skeleton and the values of its tensors.

_MOST_NAMED = 5


def rebuild(
    reader: Reader,
    skeleton: object,
    values: Mapping[str, Any],
    *,
    as_given: Collection[str],
    makes_objects: bool = True,
) -> Any:
    """Raises CorruptCheckpointError if a value cannot be rebuilt; UnsupportedError for an unknown class."""
    try:
        return unflatten(skeleton, values, as_is=as_given, makes_objects=makes_objects)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=reader.path, remedy=error.remedy) from None
    # The skeleton comes from a file: any value in it may be out of range for its type.
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"its structure cannot be rebuilt ({error})", path=reader.path) from error


def refuse_placeholders(reader: Reader, skeleton: object) -> None:
    for found in placeholders(skeleton):
        raise reader.refusal or _unreadable(reader, found, found.name)


def select_tensors(reader: Reader, candidates: Iterable[str], patterns: str | Iterable[str]) -> list[str]:
    """Raises UnsupportedError if a pattern is the name of a placeholder, UsageError if it matches nothing."""
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    refuse_placeholders_named(reader, given)
    return select(candidates, given)


def refuse_placeholders_named(reader: Reader, names: Collection[str]) -> None:
    for found in placeholders(reader.flat.skeleton):
        if found.name in names:
            raise _unreadable(reader, found, found.name)


def refuse_placeholders_of(reader: Reader, path: KeyPath, state: Any) -> None:
    for keys, found in paths_to(state, Placeholder):
        raise _unreadable(reader, found, display((*path, *keys)))


def _unreadable(reader: Reader, found: Placeholder, name: str) -> UnsupportedError:
    return UnsupportedError(f"cannot be read: {found.what}", path=reader.path, name=name, remedy=found.remedy or None)


def warn_of_placeholders(reader: Reader, skeleton: object) -> None:
    found = placeholders(skeleton)
    if found:
        named = "; ".join(f"{each.name}: {each.what}" for each in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        text = f"{reader.path}: placeholders take the place of what cannot be read: {named}{more}"
        warn_caller(f'{text} (select="*" leaves them out)')


def warn_of_attributes(reader: Reader) -> None:
    if left_out := reader.details.get("attributes_left_out"):
        text = f"{reader.path}: attributes of tensors or containers are not loaded: {', '.join(left_out[:_MOST_NAMED])}"
        warn_caller(text)


# Loading into DTensors: each rank reads its own boxes, and the ranks together load all of a checkpoint.


def check_same_checkpoint(reader: Reader, ranks: RankCoordinator) -> None:
    """Raises RanksDisagreeError unless all ranks have opened the same checkpoint, or equal copies."""
    found = ranks.gather([reader.identity(), os.fsencode(reader.path)], "opening the checkpoint")
    paths = [os.fsdecode(path) for _, path in found]
    for rank, (identity, _) in enumerate(found):
        if identity != found[0][0]:
            text = f"rank 0 has opened {paths[0]}, and rank {rank} has opened another checkpoint, {paths[rank]}"
            remedy = "give the same path on all ranks; if it is the same, a save has replaced it: load it again"
            raise RanksDisagreeError(text, remedy=remedy)


def loaded_by_others(
    ranks: RankCoordinator, tensors: Mapping[str, KeyPath], extra: Collection[KeyPath], per_rank: Collection[KeyPath]
) -> tuple[set[str], list[KeyPath]]:
    """Return the missing ``tensors`` that this rank leaves to others, and the extra keys that remain."""
    keys = {display(path): path for path in extra}
    received = ranks.gather([list(tensors), list(keys)], "comparing its state with the checkpoint")
    # What no rank has is extra, as with one process.
    lacking = [set.intersection(*map(set, each)) for each in zip(*received, strict=True)]
    places = {*per_rank}
    # Below `per_rank` are the values of other ranks.
    elsewhere = {name for name, path in tensors.items() if name not in lacking[0] or is_below(path, places)}
    return elsewhere, [path for text, path in keys.items() if text in lacking[1] and not is_below(path, places)]


def optimizer_state_like_parameters(
    objects: Mapping[KeyPath, StatefulObject], entries: Mapping[str, Entry], paths: Mapping[str, KeyPath]
) -> dict[str, tuple[ShardedLeaf, Any]]:
    """Memory for saved optimizer tensors, sharded like their DTensor parameters; ``paths`` are their keys."""
    import torch

    found: dict[str, tuple[ShardedLeaf, Any]] = {}
    for path, stateful in objects.items():
        if not isinstance(stateful.value, torch.optim.Optimizer):
            continue
        parameters = [parameter for group in stateful.value.param_groups for parameter in group["params"]]
        for name, keys in paths.items():
            # ``state.INDEX.KEY``: the form of torch's optimizers.
            if len(keys) != len(path) + 3 or keys[: len(path)] != path or keys[len(path)] != "state":
                continue
            number = keys[len(path) + 1]
            if not isinstance(number, int) or number >= len(parameters):
                continue
            parameter = parameters[number]
            # Only tensors of the parameter's shape can be sharded like it; a step count cannot.
            if not is_dtensor(parameter) or tuple(parameter.shape) != entries[name].shape:
                continue
            tensor = torch.empty_like(parameter, dtype=entries[name].dtype.torch, requires_grad=False)
            leaf = ShardedLeaf.of(name, tensor)
            assert leaf is not None
            found[name] = leaf, tensor
    return found


# Comparing given tensors with the saved ones.

_REMEDY = (
    "leave entries that do not fit out of `into`, load only what fits (strict=False), or select the tensors to load "
    '(select=["model.*"])'
)
_CAST_REMEDY = (
    "convert the state to the saved dtype first (module.to({})), or load without `into` and convert then, as "
    "load_state_dict() does"
)


@dataclass(slots=True)
class Differences:
    """Names of tensors by how the given state does not fit a checkpoint."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)  # with a text about dtype, shape or library
    unwritable: list[str] = field(default_factory=list)
    saved_dtype: DType | None = None  # one that was saved, if only dtypes differ

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.different or self.unwritable)

    def error(self, path: Path, remedy: str | None = None) -> StateMismatchError:
        missing, extra, different = self.names()
        return StateMismatchError(
            f"the state given to `into` does not fit the checkpoint; nothing was touched\n{self.lines()}",
            path=path,
            remedy=remedy or (_CAST_REMEDY.format(f"torch.{self.saved_dtype}") if self.saved_dtype else _REMEDY),
            missing=missing,
            extra=extra,
            different=different,
        )

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return tuple(self.missing), tuple(self.extra), tuple(self.different)

    def lines(self) -> str:
        """Up to five tensors per kind."""
        more = len(self.different) - _MOST_NAMED
        return (
            _listed("only in the state", self.missing)
            + _listed("only in the checkpoint", self.extra)
            + "".join(f"  {name}: {what}\n" for name, what in list(self.different.items())[:_MOST_NAMED])
            + (f"  and {more} more that differ\n" if more > 0 else "")
            + _listed("not writable in place", self.unwritable)
        ).rstrip()


def _targets(given: Mapping[str, StateLeaf], chosen: list[str]) -> dict[str, Target]:
    wanted = set(chosen)
    bases = find_aliases(found.leaf for found in given.values())
    return {
        # A view is filled with its base, if the base is loaded at all.
        name: Target(given[name].leaf, given[name].value, fills=name not in bases or bases[name].of not in wanted)
        for name in chosen
        if name in given
    }


def compare(given: Mapping[str, StateLeaf], reader: Reader, chosen: list[str], *, partial: bool) -> Differences:
    """What does not fit, without regard to shared memory; ``partial`` allows other tensors in the state."""
    wanted = set(chosen)
    targets = _targets(given, chosen)
    differences = {name: difference_of(target.leaf, reader, name) for name, target in targets.items()}
    found = Differences(
        missing=[] if partial else [name for name in given if name not in wanted],
        extra=[name for name in chosen if name not in given],
        different={name: what for name, what in differences.items() if what is not None},
        unwritable=[name for name, target in targets.items() if target.fills and not target.leaf.writable],
    )
    saved = [reader.entries[name] for name in found.different]
    can_be_cast = all(
        entry.dtype != targets[entry.name].leaf.dtype and entry.shape == targets[entry.name].leaf.shape
        for entry in saved
    )
    if saved and can_be_cast and not (found.missing or found.extra or found.unwritable):
        found.saved_dtype = saved[0].dtype
    return found


def sharing_conflict_of(
    given: Mapping[str, StateLeaf], reader: Reader, wanted: Collection[str]
) -> tuple[str, str] | None:
    """Return two tensors that share memory in the state only, so that one value would overwrite the other."""
    # A tensor that is not selected counts as well: filling the other would change it. A tensor missing from the
    # checkpoint is assumed to be a view of a loaded one.
    leaves = {name: found.leaf for name, found in given.items() if name in reader.entries}
    saved = {
        name: reader.flat.aliases.get(name) or full_view(name, leaf.shape)
        for name, leaf in leaves.items()
        if difference_of(leaf, reader, name) is None
    }
    # The local tensor of a DTensor shares memory with its other names only, which `find_aliases` knows.
    sharded = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, ShardedLeaf)}
    for name, alias in find_aliases(sharded.values()).items():
        is_written = name in wanted or alias.of in wanted
        if is_written and (name not in saved or saved[name] != saved.get(alias.of)):
            return alias.of, name
    return sharing_conflict({name: leaf for name, leaf in leaves.items() if name not in sharded}, saved, wanted)


def difference_of(leaf: Leaf, reader: Reader, name: str) -> str | None:
    """How a tensor of the state differs from the saved one in library, dtype or shape; None if it does not."""
    entry = reader.entries[name]
    libraries = [
        "tensor" if kind in ("tensor", "parameter") else "array" for kind in (leaf.kind, reader.leaf_specs[name].kind)
    ]
    if libraries[0] == libraries[1] and (leaf.dtype, leaf.shape) == (entry.dtype, entry.shape):
        return None
    described = [f"{leaf.dtype} {list(leaf.shape)}", f"{entry.dtype} {list(entry.shape)}"]
    if libraries[0] != libraries[1]:
        described = [f"{library} {text}" for library, text in zip(libraries, described, strict=True)]
    return f"{described[0]} in the state, {described[1]} saved"


def _listed(what: str, found: list[str]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"  {what}: {', '.join(found[:_MOST_NAMED])}{more}\n"


# Matching a training state with a checkpoint: what does not fit, and which tensors are filled in place.


class StateMatch:
    """How a training state, with objects wrapped by `wrap_objects`, fits a checkpoint."""

    def __init__(
        self,
        reader: Reader,
        state: Any,
        select: str | Iterable[str] | None,
        *,
        strict: bool = True,
        ranks: RankCoordinator = ONE_RANK,
        per_rank: Collection[KeyPath] = (),
    ) -> None:
        self._reader = reader
        self._strict = strict
        self._ranks = ranks
        self.partial = select is not None
        # Tensors of modules, and tensors outside of objects, must match exactly. Other objects may be empty, as a new
        # optimizer is. Numpy scalars are values and come back as they were saved.
        check_fillable(unwrap_states(state), reader.path)
        self.saved_tensors = {
            name: SavedTensor(name, reader.leaf_specs[name].kind, entry) for name, entry in reader.entries.items()
        }
        self.skeleton = nested_like(reader.flat.skeleton, state)
        self._saved = saved = rebuild(
            reader, self.skeleton, self.saved_tensors, as_given=self.saved_tensors, makes_objects=False
        )
        paths = {tensor.name: path for path, tensor in paths_to(saved, SavedTensor)}
        self._saved_paths = {name: paths.get(name, ()) for name in reader.entries}
        given = self._leaves_of(state)
        self.state = named_as_saved(state, saved, given)
        if self.state is not state:
            state = self.state
            given = self._leaves_of(state)
        self._given = given
        self._given_paths = {name: leaf.path for name, leaf in given.items()}
        self._keys = KeyComparison(state, saved)
        self._keys.ignore_nesting(self._given_paths, self._saved_paths)
        self.objects = {path: MatchedObject(*found) for path, found in self._keys.objects.items()}
        self._different: dict[str, str] = {}
        self._replaced: set[str] = set()  # given tensors that are not filled
        self._unasked: set[KeyPath] = set()  # modules that may convert states, and cannot answer without the data
        self.new: set[str] = set()  # tensors that get new memory
        self.tied: list[list[str]] = []  # one tensor of a module each, saved under several names and to be compared
        self.skipped = Differences()
        # The wanted tensors, and the objects without one.
        self.chosen, self.unselected = select_by_target(select, self._saved_paths, self._keys.objects)
        if select is None:
            self.chosen = [name for name in self.chosen if not is_below(self._saved_paths[name], self._keys.left_out)]
        self._assign_to_objects()
        if ranks.is_distributed:
            self._leave_to_other_ranks(ranks, per_rank)
        self._check_objects()
        if not strict:
            self._skip_misfits()

    def _leaves_of(self, state: Any) -> dict[str, StateLeaf]:
        """The leaves of a state under the names of the checkpoint.

        A save names the tensors of an optimizer by parameters, if the module is in its state. The keys are the same.
        """
        leaves = state_leaves(unwrap_states(state), SkeletonWriter(sharded=self._ranks.is_distributed))
        saved = {path: name for name, path in self._saved_paths.items()}
        for name, found in leaves.items():
            known = saved.get(found.path, name)
            if name not in self._reader.entries and known not in leaves:
                found.leaf.name = known
        return {found.leaf.name: found for found in leaves.values()}

    def _assign_to_objects(self) -> None:
        for name in self.chosen:
            owner = self._owner(self._saved_paths[name])
            if owner is not None:
                owner.wanted.add(name)
            elif self._reader.leaf_specs[name].kind == "npscalar" and (
                name not in self._given or self._is_scalar(name)
            ):
                self.new.add(name)
        for name, path in self._given_paths.items():
            owner = self._owner(path)
            if owner is not None:
                owner.given.add(name)
            elif self._is_scalar(name):
                self._replaced.add(name)

    def _leave_to_other_ranks(self, ranks: RankCoordinator, per_rank: Collection[KeyPath]) -> None:
        """Leave tensors and keys that only other ranks have to these ranks."""
        others = (found.wanted for found in self.objects.values() if not is_module(found.stateful.value))
        own = {*self._given, *self.new}.union(*others)
        tensors = {name: self._saved_paths[name] for name in self.chosen if name not in own}
        elsewhere, self._keys.extra = loaded_by_others(ranks, tensors, self._keys.extra, per_rank)
        self.chosen = [name for name in self.chosen if name not in elsewhere]
        for found in self.objects.values():
            found.wanted -= elsewhere
        missing = {path for path in self._keys.missing if is_below(path, {*per_rank})}
        plain = ((*path, str(ranks.rank)) for path in per_rank if not is_below(path, {*self._keys.missing}))
        missing |= {path for path in plain if not has_value(self._saved, path)}
        self._keys.missing = [path for path in self._keys.missing if path not in missing]
        self._replaced |= {name for name, path in self._given_paths.items() if is_below(path, missing)}
        # Fewer ranks have saved than load: this rank keeps the value that it has.
        if missing:
            names = ", ".join(repr(display(path[:-1])) for path in sorted(missing, key=display))
            text = f"{self._reader.path}: has no value of rank {ranks.rank} for {names}, which is left as it is"
            warn_caller(StateMismatchWarning(text))

    def divided_like_parameters(self) -> dict[str, Target]:
        """Memory for new tensors of optimizers, sharded like their parameters."""
        if not self._ranks.is_distributed:
            return {}
        objects = {path: found.stateful for path, found in self.objects.items()}
        paths = {name: self._saved_paths[name] for name in self.chosen if name in self.new}
        found = optimizer_state_like_parameters(objects, self._reader.entries, paths)
        return {name: Target(leaf, tensor, fills=True) for name, (leaf, tensor) in found.items()}

    def _owner(self, path: KeyPath) -> MatchedObject | None:
        # The longest path first.
        places = (path[:length] for length in range(len(path), -1, -1))
        return next((self.objects[place] for place in places if place in self.objects), None)

    def _is_scalar(self, name: str) -> bool:
        return self._given[name].leaf.kind == "npscalar"

    def _check_objects(self) -> None:
        for path, found in self.objects.items():
            if is_below(path, self.unselected):
                continue
            value = found.stateful.methods
            if not self.partial:
                refuse_placeholders_of(self._reader, path, found.saved)
            self._different |= {display((*path, *keys)): what for keys, what in refusals(value, found.saved)}
            if is_module(value):
                wanted = {name for name in found.wanted if is_extra_state(self._saved_paths[name], path)}
                given = {name for name in found.given if is_extra_state(self._given_paths[name], path)}
                self._choose_memory(wanted, given)
                self._ask(path, found)
                continue
            # With a check of its own, the object decides which shapes it accepts.
            for name in () if has_check(value) else sorted(found.wanted & found.given):
                leaf = self._given[name].leaf
                # An empty tensor is a placeholder.
                if leaf.nbytes and leaf.shape != self._reader.entries[name].shape:
                    self._different[name] = difference_of(leaf, self._reader, name) or ""
            self._choose_memory(found.wanted, found.given)

    def _choose_memory(self, wanted: set[str], given: set[str]) -> None:
        """Fill the tensors of an object in place if every tensor can be, else load all into new memory."""
        if wanted != given or not all(map(self._can_fill, wanted)):
            self.new |= wanted
            self._replaced |= given

    def _can_fill(self, name: str) -> bool:
        leaf = self._given[name].leaf
        return leaf.writable and difference_of(leaf, self._reader, name) is None

    def _ask(self, path: KeyPath, found: MatchedObject) -> None:
        """Fill in place what a module takes as it is; load into new memory what the module converts."""
        # Only a module that needs another state, or that may convert any state, is asked: the copy takes time.
        wanted = {name: self._saved_paths[name][len(path)] for name in found.wanted if self._saved_paths[name] != path}
        given = {name: self._given_paths[name][len(path)] for name in found.given}
        compared, own = wanted.keys() - self.new, given.keys() - self._replaced
        fits = compared <= own and (self.partial or own <= compared) and all(map(self._can_fill, compared))
        is_sharded = any(isinstance(self._given[name].leaf, ShardedLeaf) for name in given)
        if is_sharded or not isinstance(found.saved, dict) or (fits and not converts_states(found.stateful.value)):
            return
        others = {keys[len(path)] for keys in self._saved_paths.values() if is_below(keys[:-1], {path})}
        others -= {*wanted.values()}
        misfits = {wanted[name] for name in compared & own if not self._has_saved_shape(name)}
        answer = ask_module(found.stateful, found.saved, others, misfits)
        if answer is None and fits:
            self.new |= wanted.keys()  # it may convert them
            self._replaced |= given.keys()
        elif answer is None:
            # It cannot answer without the data, and its names do not fit: the error explains it.
            self._unasked.add(path)
        else:
            self._heed(path, wanted, given, answer)

    def _has_saved_shape(self, name: str) -> bool:
        return self._given[name].leaf.shape == self._reader.entries[name].shape

    def _heed(self, path: KeyPath, wanted: Mapping[str, Key], given: Mapping[str, Key], answer: ModuleAnswer) -> None:
        missing, extra = answer.missing, answer.unexpected
        bases = {name: self._reader.entries[name].alias_of or name for name in wanted}
        new = {name for name, key in wanted.items() if key not in answer.unchanged | extra}
        # Tensors that share memory are loaded in one way.
        shared = {bases[name] for name in new}
        new |= {name for name, key in wanted.items() if bases[name] in shared and key not in extra}
        kept = missing | {wanted[name] for name in wanted.keys() - new}
        self.new |= new
        self._replaced |= {name for name, key in given.items() if key not in kept}
        self._keys.missing = [keys for keys in self._keys.missing if keys[:-1] != path or keys[-1] in missing]
        self._keys.extra = [keys for keys in self._keys.extra if keys[:-1] != path or keys[-1] in extra]
        self._different |= {display((*path, key)): what for key, what in answer.different.items()}

    def targets(self) -> dict[str, Target]:
        """Return what is filled in place. Raises StateMismatchError with up to five misfits per kind."""
        found = self._differences()
        if found:
            raise self._error(found)
        # Each round moves tensors out of the filled ones, so this ends.
        while (conflict := sharing_conflict_of(self._filled(), self._reader, {*self._kept()})) is not None:
            if not any(map(self._gives_new_memory, conflict)):
                first, second = conflict
                raise StateMismatchError(
                    f"{second!r} shares memory with {first!r} in the state, but not in the same way in the checkpoint; "
                    "nothing was touched",
                    path=self._reader.path,
                    remedy="give each tensor of the state its own memory, or load without `into`",
                    different=conflict,
                )
        return _targets(self._filled(), self._kept())

    def _error(self, found: Differences) -> StateMismatchError:
        """The error about what does not fit, with the remedy of a mistake that is often made."""
        saved, given = self._reader.entries.keys(), self._given.keys()
        tops = dict.fromkeys(name.partition(".")[0] for name in saved)
        unknown = [path[0] for path in self._keys.missing if len(path) == 1 and () not in self.objects]
        unknown = [key for key in unknown if isinstance(key, str)]
        remedy = None
        if given and (around := [top for top in tops if all(f"{top}.{name}" in saved for name in given)]):
            remedy = f"give it under the key that it was saved with: into={{{around[0]!r}: ...}}"
        elif given and all(name.partition(".")[2] in saved for name in given):
            remedy = "it was saved alone: give it to `into` without a key"
        elif found.missing and {*map(unwrapped, found.missing)} == {*map(unwrapped, found.extra)}:
            remedy = "only one of the models is wrapped, as by DataParallel or torch.compile: give the module inside"
        elif self._unasked:
            remedy = "the module may convert it once it is read: load it without `into`, then load_state_dict()"
        elif () in self._keys.different and tops:
            remedy = f"give a dict with keys that were saved, such as into={{{next(iter(tops))!r}: ...}}"
        elif unknown and (near := difflib.get_close_matches(str(unknown[0]), map(str, tops), n=1)):
            remedy = f"did you mean the key {near[0]!r}?"
        elif unknown:
            remedy = f"the keys that were saved are {', '.join(map(repr, tops))}: give those that you want to load"
        elif found.missing and found.extra and not found.different:
            remedy = "for layers that have other names now, load without `into`, rename the keys of the dict that it "
            remedy += "returns, and give it to load_state_dict(); otherwise load into a model made in the same way"
        elif not self._strict and not found.saved_dtype:
            remedy = "leave entries that do not fit out of `into`: only tensors of modules and dicts are skipped"
        return found.error(self._reader.path, remedy)

    def _differences(self) -> Differences:
        found = compare(self._filled(), self._reader, self._kept(), partial=self.partial)
        keys = self._keys
        different = {
            path: what
            for path, what in keys.different.items()
            if not self.partial or any(is_below(self._saved_paths[name], {path}) for name in self.chosen)
        }
        # A key that differs is reported once, not again for each tensor below.
        named = {*different} if self.partial else {*different, *keys.missing, *keys.extra}
        found.missing = [name for name in found.missing if not is_below(self._given_paths[name], named)]
        found.extra = [name for name in found.extra if not is_below(self._saved_paths[name], named)]
        if not self.partial:
            found.missing = list(dict.fromkeys([*map(display, keys.missing), *found.missing]))
            found.extra = list(dict.fromkeys([*map(display, keys.extra), *found.extra]))
        # The remedy "convert the dtype" helps only if nothing else differs.
        if different or self._different or found.missing or found.extra:
            found.saved_dtype = None
        found.different = {display(path): what for path, what in different.items()} | found.different | self._different
        return found

    def _skip_misfits(self) -> None:
        """Leave out the tensors of modules and dicts that do not fit by name and shape."""
        self.skipped = self._differences()
        filled, kept = self._filled(), self._kept()
        fitting = {name for name in kept if name in filled and self._has_saved_shape(name)}
        # To load nothing at all is a mistake, also without `strict`.
        if (kept or filled) and not (fitting or self.new):
            raise self._error(self.skipped)
        misfits = {*kept} - fitting
        self.chosen = [name for name in self.chosen if name not in misfits]
        self.partial = True
        self.skipped.unwritable = []
        # What still differs is an error, such as a dtype; it is not reported as skipped.
        errors = self._differences().different
        self.skipped.different = {name: what for name, what in self.skipped.different.items() if name not in errors}

    def warn_of_skipped(self) -> None:
        if self.skipped:
            text = f"{self._reader.path}: loaded what fits and skipped the rest (strict=False)\n{self.skipped.lines()}"
            warning = StateMismatchWarning(text)
            warning.missing, warning.extra, warning.different = self.skipped.names()
            warn_caller(warning)

    def _gives_new_memory(self, name: str) -> bool:
        """Give new memory to a tensor that shares memory in the state only, if its object can take it from there."""
        owner = self._owner(self._given_paths[name])
        if owner is None or name not in owner.wanted:
            return False
        new, replaced = owner.wanted, owner.given
        if is_module(owner.stateful.value):
            # The values may be equal although they were saved separately; `_check_tied` compares them.
            tied = tied_with(name, self._given)
            if not owner.wanted.issuperset(tied):
                return False
            self.tied.append(tied)
            new = replaced = {*tied}
        self.new |= new
        self._replaced |= replaced
        return True

    def _kept(self) -> list[str]:
        return [name for name in self.chosen if name not in self.new]

    def _filled(self) -> Mapping[str, StateLeaf]:
        return {name: leaf for name, leaf in self._given.items() if name not in self._replaced}

    def loaded_first(self) -> dict[KeyPath, set[str]]:
        """The objects that can be loaded before any tensor is filled, each with the names of its tensors."""
        found: dict[KeyPath, set[str]] = {}
        aliases = self._reader.flat.aliases
        for path in self.objects:
            if is_below(path, self.unselected) or is_below(path, found):
                continue
            inside = [each for keys, each in self.objects.items() if keys[: len(path)] == path]
            names = set[str]().union(*(each.wanted for each in inside))
            shared = {aliases[name].of for name in names if name in aliases} - names
            # None of their tensors is filled in place, and they share none with others.
            if names <= self.new and not shared and not any(is_module(each.stateful.value) for each in inside):
                found[path] = names
        return found
