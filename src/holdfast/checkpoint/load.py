"""Loading a state, whole or in part, into new memory or into tensors that exist."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.arguments import MemorySize, budget_pool, check_device, checked_path, thread_count
from holdfast.checkpoint.filling import copy_range, fill, run_of, structure_of
from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.into import Target, match
from holdfast.checkpoint.reading import IntoLeaf, read_all
from holdfast.errors import PathLike, StoreError, UsageError
from holdfast.formats.base import OpenSettings, Reader
from holdfast.io.buffers import DEFAULT_BUDGET, BufferPool
from holdfast.io.parallel import Progress
from holdfast.state import names, streams
from holdfast.state.aliases import make_view
from holdfast.state.leaf import Array, Leaf, allocate
from holdfast.state.tree import LeafSpec, given_leaves, leaf_specs, prune, unflatten
from holdfast.units import format_bytes

if TYPE_CHECKING:
    import torch


def load(
    path: PathLike,
    *,
    into: Any = None,
    select: str | Iterable[str] | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
    page_cache: bool = False,
    format: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> Any:
    """Load a checkpoint of any format.

    Parameters
    ----------
    path : path-like
        The checkpoint; its format is found by looking at it.
    into : nested state, optional
        Tensors and arrays to fill in place, on whatever device they are; the fastest way, because no new memory is
        touched. Names, shapes, dtypes and what shares memory with what are compared first, and nothing is touched
        unless all of them fit. Tensors that share memory must do so in the checkpoint, too; the reverse is free.
    select : str or list of str, optional
        Globs on the names; only these tensors are read. With ``into``, only these are filled. Of the rest of the
        state, dicts lose the entry and lists have None in its place.
    device : torch.device or str, optional
        Where new tensors go; the CPU by default.
    verify : bool
        Check every block that is read against its checksum, where the format has any.
    page_cache : bool
        Leave the files in the page cache, for other processes of this machine that load them, too. Without it, what
        is cached already is taken from there and the rest is read around the cache, which is faster.
    format : str, optional
        Do not look, take this one.
    progress : callable, optional
        Called with (bytes done, bytes in all), from the reading threads, one call at a time.
    threads : int, optional
        Reading threads; twice the cores, between 2 and 8, by default.
    memory_budget : int or str
        Bytes that all buffers together may take besides the tensors themselves, also as ``"256MiB"``.

    Returns
    -------
    state
        The state as it was saved; with ``into``, holding the very tensors, parameters and arrays that were given.

    Raises
    ------
    CorruptCheckpointError
        If a byte is not what was written. Tensors given to ``into`` may then be partly filled.
    StateMismatchError
        If ``into`` does not fit; nothing was touched.
    NotACheckpointError, UnsupportedError, StoreError, UsageError
    """
    with (
        budget_pool(memory_budget) as pool,
        open_reader(
            checked_path(path), OpenSettings(verify=verify, pool=pool, page_cache=page_cache), format
        ) as reader,
    ):
        return load_open(reader, pool, into=into, select=select, device=device, progress=progress, threads=threads)


def load_open(
    reader: Reader,
    pool: BufferPool,
    *,
    into: Any = None,
    new: Collection[str] = (),
    select: str | Iterable[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Any:
    """Load from an open checkpoint; see `load`.

    With ``into``, the tensors named in ``new`` are loaded into new memory, on ``device``, whatever is given for them.
    """
    if into is not None and device is not None and not new:
        raise UsageError("`into` and `device` exclude each other", remedy="tensors in `into` stay where they are")
    count = thread_count(threads)
    check_device(device)
    chosen = list(reader.entries) if select is None else names.select(reader.entries, select)
    with structure_of(reader.path):
        specs = leaf_specs(reader.flat.skeleton)
        skeleton = reader.flat.skeleton if select is None else prune(reader.flat.skeleton, set(chosen))
    given = None
    if into is not None:
        kept = [name for name in chosen if name not in new]
        there = {name: leaf for name, leaf in given_leaves(into).items() if name not in new}
        given = match(there, reader, specs, kept, partial=select is not None)
    if given is None:
        _check_memory(reader, chosen, device)
    plan = _Plan(reader, specs, chosen, given, device)
    plan.read(count, pool, progress)
    with structure_of(reader.path):
        return unflatten(skeleton, plan.values(), as_given=given is not None, path=reader.path)


class _Plan:
    """Which memory each wanted tensor of a checkpoint goes to.

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
        given: Mapping[str, Target] | None,
        device: torch.device | str | None,
    ) -> None:
        self._reader = reader
        self._specs = specs
        self._device = device
        self._chosen = chosen
        self._given = given
        self._own: dict[str, Leaf] = {}
        self.read_at_once: dict[str, Leaf] = {}
        self.filled_after: list[Leaf] = []
        if given is not None:
            self._own = {name: target.leaf for name, target in given.items() if target.fills}
        self._new_memory([name for name in chosen if given is None or name not in given])
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
            whole = alias.is_whole(flat.leaves[alias.of].shape)
            if not whole or self.read_at_once.setdefault(alias.of, leaf) is not leaf:
                self.filled_after.append(leaf)

    def read(self, threads: int, pool: BufferPool, progress: Progress | None) -> None:
        """Read everything into its place."""
        streams.wait_for_caller(self._own.values())
        destinations = ((name, IntoLeaf(leaf)) for name, leaf in self.read_at_once.items())
        read_all(self._reader, destinations, threads=threads, pool=pool, progress=progress)
        streams.wait_for_copies(self._own.values())
        for leaf in self.filled_after:
            run = run_of(self._reader, leaf.name)
            if run is not None and run[0] in self.read_at_once:
                copy_range(self.read_at_once[run[0]], run[1], leaf, pool)
            else:
                fill(self._reader, leaf.name, leaf, pool)

    def values(self) -> dict[str, Array]:
        """Return what stands for each wanted name: the caller's own, or new memory and views of it."""
        given = self._given or {}
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
        raise StoreError(
            f"needs {format_bytes(needed)} of memory, this machine has {format_bytes(physical)}",
            path=reader.path,
            remedy="`select` some of the tensors, or `holdfast.open` it and slice",
        )
