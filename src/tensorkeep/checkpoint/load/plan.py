"""Which memory each wanted tensor of a checkpoint goes to, and filling it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tensorkeep.checkpoint.load.filling import copy_range, fill, run_of
from tensorkeep.checkpoint.load.into import Target
from tensorkeep.checkpoint.load.ranges import IntoLeaf, read_all
from tensorkeep.errors import OutOfMemoryError
from tensorkeep.formats.base import Reader
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import cuda
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Array, Leaf, allocate
from tensorkeep.state.tree import LeafSpec
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    import torch


class Plan:
    """Where the wanted tensors of a checkpoint go: those that are given are filled in place, others are made.

    Parameters
    ----------
    specs : mapping of str to LeafSpec
        What the checkpoint's skeleton says of each tensor.
    chosen : list of str
        The wanted names.
    given : mapping of str to Target
        What is filled in place.
    device : torch.device or str, optional
        Where new tensors go.

    Attributes
    ----------
    read_at_once : dict of str to Leaf
        What each stored tensor is read into, in parallel.
    filled_after : list of Leaf
        Views that have memory of their own.
    """

    def __init__(
        self,
        reader: Reader,
        specs: Mapping[str, LeafSpec],
        chosen: list[str],
        given: Mapping[str, Target],
        device: torch.device | str | None,
    ) -> None:
        self._reader = reader
        self._specs = specs
        self._device = device
        self._chosen = chosen
        self._given = given
        self._own = {name: target.leaf for name, target in given.items() if target.fills}
        self.read_at_once: dict[str, Leaf] = {}
        self.filled_after: list[Leaf] = []
        new = [name for name in chosen if name not in given]
        _check_memory(reader, new, device)
        self._new_memory(new)
        self._divide()

    def _new_memory(self, names: list[str]) -> None:
        """Allocate what is stored and wanted; a single view of what is not wanted gets memory of its own."""
        flat = self._reader.flat
        wanted = set(self._chosen)
        views = Counter(flat.aliases[n].of for n in names if n in flat.aliases)
        for name in names:
            alias = flat.aliases.get(name)
            if alias is None:
                self._own[name] = self._new(name, name)
            elif alias.of not in wanted:
                alone = views[alias.of] == 1 and self._reader.entries[name].nbytes <= flat.leaves[alias.of].nbytes
                stored = name if alone else alias.of
                if stored not in self._own:
                    self._own[stored] = self._new(stored, name)

    def _new(self, stored: str, name: str) -> Leaf:
        flat = self._reader.flat
        kind = self._specs[name].kind
        dtype = self._reader.entries[stored].dtype
        shape = flat.aliases[stored].shape if stored in flat.aliases else flat.leaves[stored].shape
        target = self._device if kind in ("tensor", "parameter") else None
        return Leaf(stored, kind, dtype, allocate(kind, dtype, shape, device=target))

    def _divide(self) -> None:
        """Let one leaf be read for each stored tensor, in parallel, and the views of them be filled afterwards."""
        flat = self._reader.flat
        self.read_at_once = {name: leaf for name, leaf in self._own.items() if name in flat.leaves}
        for name, leaf in self._own.items():
            alias = flat.aliases.get(name)
            if alias is None:
                continue
            whole = alias.is_full(flat.leaves[alias.of].shape)
            if not whole or self.read_at_once.setdefault(alias.of, leaf) is not leaf:
                self.filled_after.append(leaf)

    @property
    def nbytes(self) -> int:
        """The bytes that are read at once."""
        return sum(leaf.nbytes for leaf in self.read_at_once.values())

    def read(self, threads: int, pool: BufferPool, progress: Progress | None) -> None:
        """Read everything into its place."""
        cuda.wait_for_caller(self._own.values())
        destinations = ((name, IntoLeaf(leaf)) for name, leaf in self.read_at_once.items())
        read_all(self._reader, destinations, threads=threads, pool=pool, progress=progress)
        cuda.wait_for_copies(self._own.values())
        for leaf in self.filled_after:
            run = run_of(self._reader, leaf.name)
            if run is not None and run[0] in self.read_at_once:
                copy_range(self.read_at_once[run[0]], run[1], leaf, pool)
            else:
                fill(self._reader, leaf.name, leaf, pool)

    def values(self) -> dict[str, Array]:
        """Return what stands for each wanted name: the caller's own, or new memory and views of it."""
        given = self._given
        aliases = self._reader.flat.aliases
        values: dict[str, Array] = {}
        for name in self._chosen:
            if name in given:
                values[name] = given[name].value
            elif name in self._own:
                values[name] = self._own[name].array
            else:
                of = aliases[name].of
                values[name] = make_view((given[of].leaf if of in given else self._own[of]).array, aliases[name])
        return values


def _check_memory(reader: Reader, chosen: Iterable[str], device: torch.device | str | None) -> None:
    """Refuse what this machine can never hold: a hostile file may claim any size."""
    aliases = reader.flat.aliases
    stored = {aliases[name].of if name in aliases else name for name in chosen}
    needed = sum(reader.flat.leaves[name].nbytes for name in stored)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device is None and needed > physical:
        raise OutOfMemoryError(
            f"needs {format_bytes(needed)} of memory, this machine has {format_bytes(physical)}",
            path=reader.path,
            remedy="`select` some of the tensors, or `tensorkeep.open` it and slice",
        )
