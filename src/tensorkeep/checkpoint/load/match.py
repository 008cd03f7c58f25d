"""Matching a training state with a checkpoint: what does not fit, and which tensors are filled in place."""

import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorkeep.checkpoint.load.keys import KeyComparison
from tensorkeep.checkpoint.load.object_checks import SavedTensor, has_check, is_module, refusals
from tensorkeep.checkpoint.load.rebuild import rebuild
from tensorkeep.checkpoint.load.sharded import loaded_by_others, optimizer_state_like_parameters
from tensorkeep.checkpoint.load.targets import (
    Differences,
    Target,
    compare,
    difference_of,
    match_targets,
    sharing_conflict_of,
)
from tensorkeep.checkpoint.ranks.group import Ranks
from tensorkeep.checkpoint.stateful import StatefulObject, has_value, is_below, items, paths_to, unwrap_states
from tensorkeep.errors import StateMismatchError, StateMismatchWarning, UsageError, stack_level_of_caller
from tensorkeep.formats.base import Reader
from tensorkeep.state import names
from tensorkeep.state.names import Path, display
from tensorkeep.state.skeleton_writer import StateLeaf
from tensorkeep.state.tree import state_leaves

_EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class _MatchedObject:
    """An object, its saved state, and the names of its selected tensors and of those that it has already."""

    stateful: StatefulObject
    saved: Any
    wanted: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)


class StateMatch:
    """How a training state, with objects wrapped by `wrap_objects`, fits a checkpoint.

    The tensors of a module, and those outside of objects, must match exactly. Other objects may still be empty, as a
    new optimizer is, and take what was saved; tensors that they have must be of the saved shape, unless the object
    checks that itself. Numpy scalars are values and come back as they were saved. A dict may lack parts of the
    checkpoint (see `KeyComparison`). With ``select`` the state may have other keys than the checkpoint. Without
    ``strict`` that holds as well, and tensors of modules and outside of objects that do not fit by name and shape are
    skipped; StateMismatchError if that leaves none of them.

    ``objects`` has each object by the keys that lead to it, ``chosen`` the names of the wanted tensors, ``new`` those
    that are loaded into new memory, ``unselected`` the objects of which nothing is wanted, and ``skipped`` what was
    not strict. ``partial`` is whether either may have other keys.
    """

    def __init__(
        self,
        reader: Reader,
        state: Any,
        select: str | Iterable[str] | None,
        *,
        strict: bool = True,
        ranks: Ranks | None = None,
        per_rank: Collection[Path] = (),
    ) -> None:
        self._reader = reader
        self._strict = strict
        self._ranks = ranks
        self.partial = select is not None
        state_dicts = unwrap_states(state)
        self._given = state_leaves(state_dicts, sharded=ranks is not None)
        self._given_paths = {name: given.path for name, given in self._given.items()}
        self.saved_tensors = {
            name: SavedTensor(name, reader.leaf_specs[name].kind, entry) for name, entry in reader.entries.items()
        }
        self._saved = saved = rebuild(reader, reader.flat.skeleton, self.saved_tensors, as_given=True)
        paths = {tensor.name: path for path, tensor in paths_to(saved, SavedTensor)}
        self._saved_paths = {name: paths.get(name, ()) for name in reader.entries}
        self._keys = KeyComparison(state, saved)
        self._keys.ignore_nesting(self._given_paths, self._saved_paths)
        self.objects = {path: _MatchedObject(*found) for path, found in self._keys.objects.items()}
        self._different: dict[str, str] = {}
        self._replaced: set[str] = set()  # given tensors that are not filled
        self.new: set[str] = set()
        self.skipped = Differences()
        self.chosen, self.unselected = _select_tensors(select, self._saved_paths, self._keys.objects)
        if select is None:
            self.chosen = [name for name in self.chosen if not is_below(self._saved_paths[name], self._keys.left_out)]
        self._assign_to_objects()
        if ranks is not None:
            self._leave_to_other_ranks(ranks, per_rank)
        self._check_objects()
        if not strict:
            self._skip_misfits()

    def _assign_to_objects(self) -> None:
        """Find the object that each tensor belongs to."""
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

    def _leave_to_other_ranks(self, ranks: Ranks, per_rank: Collection[Path]) -> None:
        """Leave tensors and keys that only other ranks have to them; those at ``per_rank`` are of one rank each."""
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
        if missing:
            names = ", ".join(repr(display(path[:-1])) for path in sorted(missing, key=display))
            text = f"{self._reader.path}: has no value of rank {ranks.rank} for {names}, which is left as it is"
            warnings.warn(StateMismatchWarning(text), stacklevel=stack_level_of_caller())

    def divided_like_parameters(self) -> dict[str, Target]:
        """Return memory for new tensors of optimizers that are divided as their parameters are."""
        if self._ranks is None:
            return {}
        objects = {path: found.stateful for path, found in self.objects.items()}
        paths = {name: self._saved_paths[name] for name in self.chosen if name in self.new}
        found = optimizer_state_like_parameters(objects, self._reader.entries, paths)
        return {name: Target(leaf, tensor, fills=True) for name, (leaf, tensor) in found.items()}

    def _owner(self, path: Path) -> _MatchedObject | None:
        """Return the innermost object that some keys lead into."""
        places = (path[:length] for length in range(len(path), -1, -1))
        return next((self.objects[place] for place in places if place in self.objects), None)

    def _is_scalar(self, name: str) -> bool:
        return self._given[name].leaf.kind == "npscalar"

    def _check_objects(self) -> None:
        """Check whether each object fits, and whether its tensors are filled in place."""
        for path, found in self.objects.items():
            if is_below(path, self.unselected):
                continue
            value = found.stateful.value
            self._different |= {display((*path, *keys)): what for keys, what in refusals(value, found.saved)}
            if is_module(value):
                wanted = {name for name in found.wanted if _is_extra_state(self._saved_paths[name], path)}
                given = {name for name in found.given if _is_extra_state(self._given_paths[name], path)}
                self._choose_memory(wanted, given)
                continue
            for name in () if has_check(value) else sorted(found.wanted & found.given):
                leaf = self._given[name].leaf
                # An empty tensor is a placeholder.
                if leaf.nbytes and leaf.shape != self._reader.entries[name].shape:
                    self._different[name] = difference_of(leaf, self._reader, name) or ""
            self._choose_memory(found.wanted, found.given)

    def _choose_memory(self, wanted: set[str], given: set[str]) -> None:
        """Fill the tensors of an object in place if all of them can be, else load all of them into new memory."""

        def can_fill(name: str) -> bool:
            leaf = self._given[name].leaf
            return leaf.writable and difference_of(leaf, self._reader, name) is None

        if wanted != given or not all(map(can_fill, wanted)):
            self.new |= wanted
            self._replaced |= given

    def targets(self) -> dict[str, Target]:
        """Return what is filled in place; StateMismatchError names up to five misfits of each kind."""
        found = self._differences()
        if found:
            raise self._error(found)
        while (owner := self._owner_of_conflict()) is not None:
            self.new |= owner.wanted
            self._replaced |= owner.given
        return match_targets(self._filled(), self._reader, self._kept())

    def _error(self, found: Differences) -> StateMismatchError:
        """Return the error about what does not fit, with the remedy of a mistake that is often made."""
        saved, given = self._reader.entries.keys(), self._given.keys()
        tops = dict.fromkeys(name.partition(".")[0] for name in saved)
        unknown = [path[0] for path in self._keys.missing if len(path) == 1 and isinstance(path[0], str)]
        remedy = None
        if given and (around := [top for top in tops if all(f"{top}.{name}" in saved for name in given)]):
            remedy = f"give it under the key that it was saved with: into={{{around[0]!r}: ...}}"
        elif given and all(name.partition(".")[2] in saved for name in given):
            remedy = "it was saved alone: give it to `into` without a key"
        elif found.missing and {*map(_unwrapped, found.missing)} == {*map(_unwrapped, found.extra)}:
            remedy = "only one of the models is wrapped, as by DataParallel or torch.compile: give the module inside"
        elif () in self._keys.different and tops:
            remedy = f"give a dict with keys that were saved, such as into={{{next(iter(tops))!r}: ...}}"
        elif unknown and (near := difflib.get_close_matches(unknown[0], tops, n=1)):
            remedy = f"did you mean the key {near[0]!r}?"
        elif unknown:
            remedy = f"the keys that were saved are {', '.join(map(repr, tops))}: give those that you want to load"
        elif found.missing and found.extra and not found.different:
            remedy = "for layers that have other names now, load without `into`, rename the keys of the dict that it "
            remedy += (
                "returns, and give it to load_state_dict(); otherwise load into a model that was made in the same way"
            )
        elif not self._strict and not found.saved_dtype:
            remedy = "leave entries that do not fit out of `into`: only tensors of modules and dicts are skipped"
        return found.error(self._reader.path, remedy)

    def _differences(self) -> Differences:
        """Return what does not fit: keys, tensors, and the states of objects."""
        found = compare(self._filled(), self._reader, self._kept(), partial=self.partial)
        keys = self._keys
        different = {path: what for path, what in keys.different.items() if self._is_wanted(path)}
        named = {*different} if self.partial else {*different, *keys.missing, *keys.extra}
        found.missing = [name for name in found.missing if not is_below(self._given_paths[name], named)]
        found.extra = [name for name in found.extra if not is_below(self._saved_paths[name], named)]
        if not self.partial:
            found.missing = list(dict.fromkeys([*map(display, keys.missing), *found.missing]))
            found.extra = list(dict.fromkeys([*map(display, keys.extra), *found.extra]))
        if different or self._different or found.missing or found.extra:
            found.saved_dtype = None
        found.different = {display(path): what for path, what in different.items()} | found.different | self._different
        return found

    def _skip_misfits(self) -> None:
        """Leave out the tensors that do not fit by name and shape, other than those of objects but modules."""
        self.skipped = self._differences()
        entries, filled, kept = self._reader.entries, self._filled(), self._kept()
        fitting = {name for name in kept if name in filled and filled[name].leaf.shape == entries[name].shape}
        if (kept or filled) and not fitting:
            raise self._error(self.skipped)
        misfits = {*kept} - fitting
        self.chosen = [name for name in self.chosen if name not in misfits]
        self.partial = True
        self.skipped.unwritable = []
        errors = self._differences().different
        self.skipped.different = {name: what for name, what in self.skipped.different.items() if name not in errors}

    def warn_of_skipped(self) -> None:
        """Issue a `StateMismatchWarning` if anything was skipped."""
        if self.skipped:
            text = f"{self._reader.path}: loaded what fits and skipped the rest (strict=False)\n{self.skipped.lines()}"
            warning = StateMismatchWarning(text)
            warning.missing, warning.extra, warning.different = self.skipped.names()
            warnings.warn(warning, stacklevel=stack_level_of_caller())

    def _is_wanted(self, path: Path) -> bool:
        return not self.partial or any(is_below(self._saved_paths[name], {path}) for name in self.chosen)

    def _owner_of_conflict(self) -> _MatchedObject | None:
        """Return an object whose tensors share memory in the state only, and that can be given new memory."""
        conflict = sharing_conflict_of(self._filled(), self._reader, self._kept())
        for name in conflict or ():
            owner = self._owner(self._given_paths[name])
            if owner is not None and name in owner.wanted and not is_module(owner.stateful.value):
                return owner
        return None

    def _kept(self) -> list[str]:
        return [name for name in self.chosen if name not in self.new]

    def _filled(self) -> Mapping[str, StateLeaf]:
        return {name: leaf for name, leaf in self._given.items() if name not in self._replaced}

    def loaded_first(self) -> dict[Path, set[str]]:
        """Return the objects that can be loaded before any tensor is filled, each with the names of its tensors.

        None of their tensors is filled in place, and they share none with others.
        """
        found: dict[Path, set[str]] = {}
        aliases = self._reader.flat.aliases
        for path in self.objects:
            if is_below(path, self.unselected) or is_below(path, found):
                continue
            inside = [each for keys, each in self.objects.items() if keys[: len(path)] == path]
            names = set[str]().union(*(each.wanted for each in inside))
            shared = {aliases[name].of for name in names if name in aliases} - names
            if names <= self.new and not shared and not any(is_module(each.stateful.value) for each in inside):
                found[path] = names
        return found


def _unwrapped(name: str) -> str:
    """Return a name without the keys under which DataParallel and torch.compile hold a module."""
    return ".".join(key for key in name.split(".") if key not in ("module", "_orig_mod"))


def _is_extra_state(keys: Path, path: Path) -> bool:
    """Return whether keys lead to the result of a module's ``get_extra_state``, which may have any shape."""
    key = keys[len(path)] if len(keys) > len(path) else None
    return isinstance(key, str) and (key == _EXTRA_STATE or key.endswith(f".{_EXTRA_STATE}"))


def _select_tensors(
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
