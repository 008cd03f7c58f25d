"""Where the tensors of a checkpoint are loaded: given tensors are filled in place, others get new memory."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping

from tensorkeep.checkpoint.load.ranges import contiguous_in, copy_range, fill, read_all
from tensorkeep.checkpoint.load.targets import Target
from tensorkeep.errors import OutOfMemoryError
from tensorkeep.formats.base import Reader
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import cuda
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.strided import Array, Device
from tensorkeep.units import format_bytes


class LoadPlan:
    """The memory that each of the ``chosen`` tensors is loaded into, and the reading into it.

    Those in ``given`` are filled in place; others get new memory on ``device``. Stored tensors are read in parallel;
    views with memory of their own are filled afterwards.
    """

    def __init__(self, reader: Reader, chosen: list[str], given: Mapping[str, Target], device: Device) -> None:
        self._reader = reader
        self._chosen = chosen
        self._given = given
        self._memory = {name: target.leaf for name, target in given.items() if target.fills}
        self._allocate([name for name in chosen if name not in given], device)
        # One leaf for each stored tensor; other views of it are filled afterwards.
        flat = reader.flat
        self._stored = {name: leaf for name, leaf in self._memory.items() if name in flat.leaves}
        self._views: list[Leaf] = []
        for name, leaf in self._memory.items():
            alias = flat.aliases.get(name)
            if alias is not None:
                full = alias.is_full(flat.leaves[alias.of].shape)
                if not full or self._stored.setdefault(alias.of, leaf) is not leaf:
                    self._views.append(leaf)

    def _allocate(self, names: list[str], device: Device) -> None:
        """Allocate stored tensors; a single view of one that is not wanted gets memory for itself only."""
        flat, entries = self._reader.flat, self._reader.entries
        _check_memory(self._reader, names, device)
        wanted = set(self._chosen)
        views = Counter(flat.aliases[n].of for n in names if n in flat.aliases)
        for name in names:
            base = entries[name].alias_of
            if base in wanted:
                continue
            stored = name
            if base is not None and (views[base] > 1 or entries[name].nbytes > flat.leaves[base].nbytes):
                stored = base
            if stored not in self._memory:
                kind, entry = self._reader.leaf_specs[name].kind, entries[stored]
                where = device if kind in ("tensor", "parameter") else None
                array = allocate(kind, entry.dtype, entry.shape, device=where)
                self._memory[stored] = Leaf(stored, kind, entry.dtype, array)

    @property
    def nbytes(self) -> int:
        """The bytes that are read in parallel."""
        return sum(leaf.nbytes for leaf in self._stored.values())

    def read(self, threads: int, pool: BufferPool, progress: Progress | None) -> None:
        """Read everything into its memory."""
        cuda.wait_for_caller(self._memory.values())
        read_all(self._reader, self._stored, threads=threads, pool=pool, progress=progress)
        cuda.wait_for_copies(self._memory.values())
        for leaf in self._views:
            place = contiguous_in(self._reader, leaf.name)
            if place is not None and place[0] in self._stored:
                copy_range(self._stored[place[0]], place[1], leaf, pool)
            else:
                fill(self._reader, leaf.name, leaf, pool)

    def values(self) -> dict[str, Array]:
        """Return the tensor of each wanted name: the caller's own, or new memory and views of it."""
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


def _check_memory(reader: Reader, chosen: Iterable[str], device: Device) -> None:
    """Refuse sizes that this machine can never hold: a hostile file may claim any."""
    stored = {reader.entries[name].alias_of or name for name in chosen}
    needed = sum(reader.flat.leaves[name].nbytes for name in stored)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device is None and needed > physical:
        raise OutOfMemoryError(
            f"needs {format_bytes(needed)} of memory, this machine has {format_bytes(physical)}",
            path=reader.path,
            remedy="`select` some of the tensors, or `tensorkeep.open` it and slice",
        )
