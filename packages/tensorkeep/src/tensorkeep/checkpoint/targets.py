"""Where the tensors of a checkpoint are loaded: given tensors, compared first and filled in place, or new memory."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tensorkeep.checkpoint.ranges import contiguous_in, copy_range, fill, fill_from_view, read_all
from tensorkeep.errors import OutOfMemoryError, StateMismatchError
from tensorkeep.formats.base import Reader
from tensorkeep.machine import memory_limit
from tensorkeep.state import cuda
from tensorkeep.state.aliases import find_aliases, full_view, make_view, sharing_conflict
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Array, CastLeaf, Device, Leaf, allocate
from tensorkeep.state.sharded import ShardedLeaf, bytes_here
from tensorkeep.state.skeleton import StateLeaf
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.parallel import Progress
from tensorkeep.units import format_bytes

_MOST_NAMED = 5
_REMEDY = (
    "leave entries that do not fit out of `into`, load only what fits (strict=False), or select the tensors to load "
    '(select=["model.*"])'
)
_CAST_REMEDY = (
    "convert the state to the saved dtype first (module.to({})), or load without `into` and convert then, as "
    "load_state_dict() does"
)


class Target(NamedTuple):
    """A given tensor that is loaded. Bytes are read into it if it ``fills``; else it is a view of another."""

    leaf: Leaf
    value: Any
    fills: bool


@dataclass(slots=True)
class Differences:
    """Names of tensors by how the given state does not fit a checkpoint.

    ``different`` has a text about dtype, shape or library. If only dtypes differ, ``saved_dtype`` is one that was
    saved.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    unwritable: list[str] = field(default_factory=list)
    saved_dtype: DType | None = None

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


def match_targets(given: Mapping[str, StateLeaf], reader: Reader, chosen: list[str]) -> dict[str, Target]:
    """Where the chosen tensors go. Raises StateMismatchError if tensors share memory in the state only."""
    conflict = sharing_conflict_of(given, reader, set(chosen))
    if conflict is not None:
        first, second = conflict
        raise StateMismatchError(
            f"{second!r} shares memory with {first!r} in the state, but not in the same way in the checkpoint; "
            "nothing was touched",
            path=reader.path,
            remedy="give each tensor of the state its own memory, or load without `into`",
            different=(first, second),
        )
    return _targets(given, chosen)


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


class CopyPlan:
    """The memory of the ``chosen`` tensors: ``given`` ones are filled in place, others get new memory."""

    def __init__(
        self,
        reader: Reader,
        chosen: list[str],
        given: Mapping[str, Target],
        device: Device = None,
        dtype: DType | None = None,
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._chosen = chosen
        self._given = given
        self._memory = {name: target.leaf for name, target in given.items() if target.fills}
        self._allocate([name for name in chosen if name not in given], device)
        # One leaf for each stored tensor; other views are filled afterwards.
        flat = reader.flat
        self._stored = {name: leaf for name, leaf in self._memory.items() if name in flat.leaves}
        self._views: list[Leaf] = []
        for name, leaf in self._memory.items():
            alias = flat.aliases.get(name)
            if alias is not None:
                full = alias.is_full(flat.leaves[alias.of].shape)
                # Two views of one stored tensor need memory of their own: the first is read, the other is filled
                # afterwards.
                if not full or self._stored.setdefault(alias.of, leaf) is not leaf:
                    self._views.append(leaf)

    def _allocate(self, names: list[str], device: Device) -> None:
        flat, entries = self._reader.flat, self._reader.entries
        self._check_memory(names, device)
        wanted = set(self._chosen)
        views = Counter([flat.aliases[n].of for n in names if n in flat.aliases])
        for name in names:
            base = entries[name].alias_of
            if base in wanted:
                continue
            stored = name
            # A single view of a stored tensor that is not wanted gets memory for itself only; several views share the
            # stored tensor's.
            if base is not None and (views[base] > 1 or entries[name].nbytes > flat.leaves[base].nbytes):
                stored = base
            if stored not in self._memory:
                kind, entry = self._reader.leaf_specs[name].kind, entries[stored]
                where = device if kind in ("tensor", "parameter") else None
                dtype = self._dtype_of(stored)
                array = allocate(kind, dtype, entry.shape, device=where)
                self._memory[stored] = (Leaf if dtype is entry.dtype else CastLeaf)(stored, kind, entry.dtype, array)

    def _dtype_of(self, name: str) -> DType:
        saved, kind = self._reader.entries[name].dtype, self._reader.leaf_specs[name].kind
        is_converted = saved.kind == "float" and kind in ("tensor", "parameter")
        return self._dtype if self._dtype is not None and is_converted else saved

    def _check_memory(self, names: Iterable[str], device: Device) -> None:
        """Raises OutOfMemoryError if the tensors exceed the machine's memory."""
        # Before anything is allocated: a hostile manifest can state any size, and Linux kills a process that touches
        # too much.
        stored = {self._reader.entries[name].alias_of or name for name in names}
        needed = sum(prod(self._reader.entries[name].shape) * self._dtype_of(name).itemsize for name in stored)
        if device is None and needed > (limit := memory_limit()):
            raise OutOfMemoryError(
                f"needs {format_bytes(needed)} of memory, this process can have {format_bytes(limit)}",
                path=self._reader.path,
                remedy="`select` some of the tensors, or `tensorkeep.open` it and slice",
            )

    @property
    def nbytes(self) -> int:
        """The bytes that are read in parallel."""
        return sum(bytes_here(leaf) for leaf in self._stored.values())

    def read(self, threads: int, pool: BufferPool, progress: Progress | None) -> None:
        # Kernels that were queued by the caller may still use the old values.
        cuda.wait_for_caller(self._memory.values())
        # The caller's memory has its pages already.
        untouched = self._memory.keys() - self._given.keys()
        read_all(self._reader, self._stored, threads=threads, pool=pool, untouched=untouched, progress=progress)
        cuda.wait_for_copies(self._memory.values())
        for leaf in self._views:
            if isinstance(leaf, ShardedLeaf):
                fill_from_view(self._reader, leaf, pool)
                continue
            place = contiguous_in(self._reader, leaf.name)
            if place is not None and place[0] in self._stored:
                copy_range(self._stored[place[0]], place[1], leaf, pool)
            else:
                fill(self._reader, leaf.name, leaf, pool)

    def values(self) -> dict[str, Array]:
        values: dict[str, Array] = {}
        for name in self._chosen:
            if name in self._given:
                values[name] = self._given[name].value
            elif name in self._memory:
                values[name] = self._memory[name].array
            else:
                alias = self._reader.flat.aliases[name]
                base = self._given[alias.of].leaf if alias.of in self._given else self._memory[alias.of]
                values[name] = make_view(base.array, alias)
        return values
