"""Matching a training state with a checkpoint: what does not fit, and which tensors are filled in place."""

import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tensorkeep.checkpoint.load.keys import KeyComparison, named_as_saved, nested_like, select_tensors, tied_with
from tensorkeep.checkpoint.load.object_checks import (
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
    unwrapped,
)
from tensorkeep.checkpoint.load.rebuild import rebuild, refuse_placeholders_of
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
from tensorkeep.checkpoint.stateful import has_value, is_below, paths_to, unwrap_states
from tensorkeep.errors import StateMismatchError, StateMismatchWarning, stack_level_of_caller
from tensorkeep.formats.base import Reader
from tensorkeep.state.names import Key, Path, display
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.state.skeleton_writer import StateLeaf
from tensorkeep.state.tree import state_leaves


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
    not strict. ``partial`` is whether either may have other keys. ``tied`` has the names of each tensor
    of a module that was saved under all of them, with equal values as it is still to be checked.
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
        check_fillable(unwrap_states(state), reader.path)
        given = state_leaves(unwrap_states(state), sharded=ranks is not None)
        self.saved_tensors = {
            name: SavedTensor(name, reader.leaf_specs[name].kind, entry) for name, entry in reader.entries.items()
        }
        self.skeleton = nested_like(reader.flat.skeleton, state)
        self._saved = saved = rebuild(reader, self.skeleton, self.saved_tensors, as_given=self.saved_tensors)
        self.state = named_as_saved(state, saved, given)
        if self.state is not state:
            state, given = self.state, state_leaves(unwrap_states(self.state), sharded=ranks is not None)
        self._given = given
        self._given_paths = {name: leaf.path for name, leaf in given.items()}
        paths = {tensor.name: path for path, tensor in paths_to(saved, SavedTensor)}
        self._saved_paths = {name: paths.get(name, ()) for name in reader.entries}
        self._keys = KeyComparison(state, saved)
        self._keys.ignore_nesting(self._given_paths, self._saved_paths)
        self.objects = {path: MatchedObject(*found) for path, found in self._keys.objects.items()}
        self._different: dict[str, str] = {}
        self._replaced: set[str] = set()  # given tensors that are not filled
        self._unasked: set[Path] = set()  # modules that may convert states, and cannot answer without the data
        self.new: set[str] = set()
        self.tied: list[list[str]] = []
        self.skipped = Differences()
        self.chosen, self.unselected = select_tensors(select, self._saved_paths, self._keys.objects)
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

    def _owner(self, path: Path) -> MatchedObject | None:
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
            if not self.partial:
                refuse_placeholders_of(self._reader, path, found.saved)
            self._different |= {display((*path, *keys)): what for keys, what in refusals(value, found.saved)}
            if is_module(value):
                wanted = {name for name in found.wanted if is_extra_state(self._saved_paths[name], path)}
                given = {name for name in found.given if is_extra_state(self._given_paths[name], path)}
                self._choose_memory(wanted, given)
                self._ask(path, found)
                continue
            for name in () if has_check(value) else sorted(found.wanted & found.given):
                leaf = self._given[name].leaf
                # An empty tensor is a placeholder.
                if leaf.nbytes and leaf.shape != self._reader.entries[name].shape:
                    self._different[name] = difference_of(leaf, self._reader, name) or ""
            self._choose_memory(found.wanted, found.given)

    def _choose_memory(self, wanted: set[str], given: set[str]) -> None:
        """Fill the tensors of an object in place if all of them can be, else load all of them into new memory."""
        if wanted != given or not all(map(self._can_fill, wanted)):
            self.new |= wanted
            self._replaced |= given

    def _can_fill(self, name: str) -> bool:
        leaf = self._given[name].leaf
        return leaf.writable and difference_of(leaf, self._reader, name) is None

    def _ask(self, path: Path, found: MatchedObject) -> None:
        """Fill in place what a module takes as it is, and load into new memory what it makes other tensors from.

        Only a module that needs another state, or that may convert any state, is asked.
        """
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
            self._unasked.add(path)
        else:
            self._heed(path, wanted, given, answer)

    def _has_saved_shape(self, name: str) -> bool:
        return self._given[name].leaf.shape == self._reader.entries[name].shape

    def _heed(self, path: Path, wanted: Mapping[str, Key], given: Mapping[str, Key], answer: ModuleAnswer) -> None:
        """Load the tensors of a module, with their keys in its state, as it has answered."""
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
        """Return what is filled in place; StateMismatchError names up to five misfits of each kind."""
        found = self._differences()
        if found:
            raise self._error(found)
        while self._resolves_conflict():
            pass
        return match_targets(self._filled(), self._reader, self._kept())

    def _error(self, found: Differences) -> StateMismatchError:
        """Return the error about what does not fit, with the remedy of a mistake that is often made."""
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
        filled, kept = self._filled(), self._kept()
        fitting = {name for name in kept if name in filled and self._has_saved_shape(name)}
        if (kept or filled) and not (fitting or self.new):
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

    def _resolves_conflict(self) -> bool:
        """Give new memory to tensors that share memory in the state only, if their object can take them from there."""
        conflict = sharing_conflict_of(self._filled(), self._reader, self._kept())
        for name in conflict or ():
            owner = self._owner(self._given_paths[name])
            if owner is None or name not in owner.wanted:
                continue
            new, replaced = owner.wanted, owner.given
            if is_module(owner.stateful.value):
                tied = tied_with(name, self._given)
                if not owner.wanted.issuperset(tied):
                    continue
                self.tied.append(tied)
                new = replaced = {*tied}
            self.new |= new
            self._replaced |= replaced
            return True
        return False

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
