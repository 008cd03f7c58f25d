"""Loading a state, whole or in part, into new memory or into tensors that exist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, check_device, checked_path, thread_count
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.load.filling import structure_of
from tensorkeep.checkpoint.load.into import match
from tensorkeep.checkpoint.load.plan import Plan
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.io.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import names
from tensorkeep.state.tree import leaf_specs, prune, state_leaves, unflatten

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
    select: str | Iterable[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Any:
    """Load from an open checkpoint; see `load`."""
    if into is not None and device is not None:
        raise UsageError("`into` and `device` exclude each other", remedy="tensors in `into` stay where they are")
    count = thread_count(threads)
    check_device(device)
    chosen = list(reader.entries) if select is None else names.select(reader.entries, select)
    with structure_of(reader.path):
        specs = leaf_specs(reader.flat.skeleton)
        skeleton = reader.flat.skeleton if select is None else prune(reader.flat.skeleton, set(chosen))
    given = {} if into is None else match(state_leaves(into), reader, specs, chosen, partial=select is not None)
    plan = Plan(reader, specs, chosen, given, device)
    plan.read(count, pool, progress)
    with structure_of(reader.path):
        return unflatten(skeleton, plan.values(), as_is=into is not None, path=reader.path)
