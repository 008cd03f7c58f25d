"""Whether a whole training state fits a checkpoint, and which of its tensors are filled in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorkeep.checkpoint.load.filling import structure_of
from tensorkeep.checkpoint.load.into import Target, compare, difference_of, match, sharing_conflict_of
from tensorkeep.checkpoint.restore.containers import paths_to
from tensorkeep.checkpoint.restore.object_checks import Saved, checks_itself, is_module, refusals
from tensorkeep.checkpoint.restore.stateful import Held, plain
from tensorkeep.checkpoint.restore.structure import below, compare_keys
from tensorkeep.checkpoint.selection import select_parts
from tensorkeep.formats.base import Reader
from tensorkeep.state.names import Path, display
from tensorkeep.state.tree import StateLeaf, leaf_paths, leaf_specs, state_leaves, unflatten

_EXTRA_STATE = "_extra_state"
_REMEDY = (
    "give `into` the keys and objects that were saved, or leave some of them out and `select` the tensors of the rest, "
    'such as select=["model.*"]'
)


@dataclass(slots=True)
class _Object:
    """An object, its saved state, and the names of its own tensors that are wanted and that are given."""

    held: Held
    saved: Any
    wanted: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)


class Fit:
    """How a training state fits a checkpoint.

    A module's tensors, and those that lie in the state as they are, must be there exactly. Other objects may still be
    empty, as a new optimizer is, and take what was saved; tensors that they have already must be of the same shape,
    unless they check that themselves. Numpy's scalars are values and come back as they were saved.

    Parameters
    ----------
    reader : Reader
    state : nested state
        In it, objects are held.
    select : str or list of str, optional
        What is wanted; the state may then have other keys than the checkpoint.

    Attributes
    ----------
    chosen : list of str
        The names of the wanted tensors.
    specs : dict of str to LeafSpec
    markers : dict of str to Saved
    new : set of str
        The wanted tensors that are loaded into new memory.
    left : set of Path
        The objects of which nothing was selected.

    Raises
    ------
    UsageError
        If a pattern matches nothing, or some, but not all tensors of an object other than a module.
    """

    def __init__(self, reader: Reader, state: Any, select: str | Iterable[str] | None) -> None:
        self._reader = reader
        self._partial = select is not None
        state_dicts = plain(state)
        self._given = state_leaves(state_dicts)
        self._given_paths = leaf_paths(state_dicts)
        with structure_of(reader.path):
            self.specs = leaf_specs(reader.flat.skeleton)
            self.markers = {n: Saved(n, self.specs[n].kind, entry) for n, entry in reader.entries.items()}
            as_values: dict[str, Any] = {**self.markers}
            saved = unflatten(reader.flat.skeleton, as_values, as_is=True, path=reader.path)
        paths = {marker.name: path for path, marker in paths_to(saved, Saved)}
        self._saved_paths = {name: paths.get(name, ()) for name in reader.entries}
        self._keys = compare_keys(state, saved)
        self._objects = {path: _Object(*found) for path, found in self._keys.objects.items()}
        self._different: dict[str, str] = {}
        self._replaced: set[str] = set()  # what is given, but not filled
        self.new: set[str] = set()
        self.chosen, self.left = select_parts(select, self._saved_paths, self._keys.objects)
        self._assign()
        self._look()

    def _assign(self) -> None:
        """Find out whose each tensor is."""
        for name in self.chosen:
            owner = self._owner(self._saved_paths[name])
            if owner is not None:
                owner.wanted.add(name)
            elif self.specs[name].kind == "npscalar" and (name not in self._given or self._is_scalar(name)):
                self.new.add(name)
        for name, path in self._given_paths.items():
            owner = self._owner(path)
            if owner is not None:
                owner.given.add(name)
            elif self._is_scalar(name):
                self._replaced.add(name)

    def _owner(self, path: Path) -> _Object | None:
        """Return the innermost object that some keys lead into."""
        places = (path[:length] for length in range(len(path), -1, -1))
        return next((self._objects[place] for place in places if place in self._objects), None)

    def _is_scalar(self, name: str) -> bool:
        return self._given[name].leaf.kind == "npscalar"

    def _look(self) -> None:
        """Look at each object: whether it fits, and whether its tensors are filled in place."""
        for path, found in self._objects.items():
            if below(path, self.left):
                continue
            self._different |= {display((*path, *keys)): what for keys, what in refusals(found.held.value, found.saved)}
            if is_module(found.held.value):
                wanted = {name for name in found.wanted if _is_extra(self._saved_paths[name], path)}
                self._place(wanted, {name for name in found.given if _is_extra(self._given_paths[name], path)})
                continue
            if not checks_itself(found.held.value):
                self._compare_shapes(found.wanted & found.given)
            self._place(found.wanted, found.given)

    def _compare_shapes(self, both: set[str]) -> None:
        for name in sorted(both):
            leaf = self._given[name].leaf
            # What is empty waits to be filled.
            if leaf.nbytes and leaf.shape != self._reader.entries[name].shape:
                self._different[name] = difference_of(leaf, self._reader, self.specs, name)

    def _place(self, wanted: set[str], given: set[str]) -> None:
        """Let tensors of an object be filled in place if all of them can be, and otherwise be made anew."""
        if wanted != given or not all(map(self._fits, wanted)):
            self.new |= wanted
            self._replaced |= given

    def _fits(self, name: str) -> bool:
        leaf, entry = self._given[name].leaf, self._reader.entries[name]
        kind = self.specs[name].kind
        alike = leaf.is_torch == (kind in ("tensor", "parameter"))
        return alike and (leaf.dtype, leaf.shape) == (entry.dtype, entry.shape) and leaf.writable

    def targets(self) -> dict[str, Target]:
        """Return what is filled in place.

        Raises
        ------
        StateMismatchError
            If the state does not fit; every difference is named, up to a handful of each kind.
        """
        self._check()
        while (owner := self._shares_unlike_the_checkpoint()) is not None:
            self.new |= owner.wanted
            self._replaced |= owner.given
        return match(self._there(), self._reader, self.specs, self._kept(), partial=self._partial)

    def _check(self) -> None:
        found = compare(self._there(), self._reader, self.specs, self._kept(), partial=self._partial)
        keys = self._keys
        different = {path: what for path, what in keys.different.items() if self._is_wanted(path)}
        named = {*different} if self._partial else {*different, *keys.missing, *keys.extra}
        found.missing = [name for name in found.missing if not below(self._given_paths[name], named)]
        found.extra = [name for name in found.extra if not below(self._saved_paths[name], named)]
        if not self._partial:
            found.missing = list(dict.fromkeys([*map(display, keys.missing), *found.missing]))
            found.extra = list(dict.fromkeys([*map(display, keys.extra), *found.extra]))
        found.different = {display(path): what for path, what in different.items()} | found.different | self._different
        if found:
            raise found.error(self._reader.path, remedy=_REMEDY)

    def _is_wanted(self, path: Path) -> bool:
        places = {path}
        return not self._partial or any(below(self._saved_paths[name], places) for name in self.chosen)

    def _shares_unlike_the_checkpoint(self) -> _Object | None:
        """Return an object that shares memory in another way than in the checkpoint, and can have memory of its own."""
        kept = self._kept()
        conflict = sharing_conflict_of(self._there(), self._reader, self.specs, kept)
        for name in conflict or ():
            owner = self._owner(self._given_paths[name])
            if owner is not None and name in owner.wanted and not is_module(owner.held.value):
                return owner
        return None

    def _kept(self) -> list[str]:
        return [name for name in self.chosen if name not in self.new]

    def _there(self) -> Mapping[str, StateLeaf]:
        return {name: leaf for name, leaf in self._given.items() if name not in self._replaced}

    def first(self) -> dict[Path, set[str]]:
        """Return the objects that can be given their states before any tensor is filled, each with its tensors.

        Nothing of theirs is filled in place, and they share no tensor with others.
        """
        found: dict[Path, set[str]] = {}
        aliases = self._reader.flat.aliases
        for path in self._objects:
            if below(path, self.left) or below(path, found):
                continue
            inside = [each for keys, each in self._objects.items() if keys[: len(path)] == path]
            names = set[str]().union(*(each.wanted for each in inside))
            shared = {aliases[name].of for name in names if name in aliases} - names
            if names <= self.new and not shared and not any(is_module(each.held.value) for each in inside):
                found[path] = names
        return found

    def held(self, path: Path) -> Held:
        """Return the object at a place."""
        return self._objects[path].held


def _is_extra(keys: Path, path: Path) -> bool:
    """Say whether keys lead to what a module saves by its ``get_extra_state``, which it takes in any shape."""
    key = keys[len(path)] if len(keys) > len(path) else None
    return isinstance(key, str) and (key == _EXTRA_STATE or key.endswith(f".{_EXTRA_STATE}"))
