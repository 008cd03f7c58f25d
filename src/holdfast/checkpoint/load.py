"""Loading a state, whole or in part, into new memory or into tensors that exist."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.reading import Destination, IntoLeaf, read_all
from holdfast.errors import PathLike, StateMismatchError, StoreError, UsageError
from holdfast.formats.base import OpenSettings, Reader
from holdfast.io.buffers import DEFAULT_BUDGET, BufferPool
from holdfast.io.parallel import Progress, default_threads
from holdfast.state import names
from holdfast.state.aliases import make_view
from holdfast.state.leaf import Array, Leaf, allocate
from holdfast.state.tree import Flat, LeafSpec, flatten, leaf_specs, prune, unflatten
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
    memory_budget: int = DEFAULT_BUDGET,
) -> Any:
    """Load a checkpoint of any format.

    Parameters
    ----------
    path : path-like
        The checkpoint; its format is found by looking at it.
    into : nested state, optional
        Tensors and arrays to fill in place, on whatever device they are; the fastest way, because no new memory is
        touched. Names, shapes and dtypes are compared first, and nothing is touched unless all of them fit.
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
    memory_budget : int
        Bytes that all buffers together may take besides the tensors themselves.

    Returns
    -------
    state
        The state as it was saved; with ``into``, holding the tensors that were given.

    Raises
    ------
    CorruptCheckpointError
        If a byte is not what was written. Tensors given to ``into`` may then be partly filled.
    StateMismatchError
        If ``into`` does not fit; nothing was touched.
    NotACheckpointError, UnsupportedError, StoreError, UsageError
    """
    if into is not None and device is not None:
        raise UsageError("`into` and `device` exclude each other", remedy="tensors in `into` stay where they are")
    with (
        BufferPool(memory_budget) as pool,
        open_reader(path, OpenSettings(verify=verify, pool=pool, page_cache=page_cache), format) as reader,
    ):
        chosen = _choose(reader, select)
        skeleton = reader.flat.skeleton if select is None else prune(reader.flat.skeleton, set(chosen))
        specs = leaf_specs(reader.flat.skeleton)
        given = None if into is None else _match(flatten(into), reader, chosen, partial=select is not None)
        plan = _Plan(reader, specs, chosen, given, device)
        read_all(reader, plan.destinations(), threads=threads or default_threads(), pool=pool, progress=progress)
        return unflatten(skeleton, plan.values(), path=path)


def _choose(reader: Reader, select: str | Iterable[str] | None) -> list[str]:
    return list(reader.entries) if select is None else names.select(reader.entries, select)


class _Plan:
    """Which memory each wanted tensor of a checkpoint goes to."""

    def __init__(
        self,
        reader: Reader,
        specs: Mapping[str, LeafSpec],
        chosen: list[str],
        given: Mapping[str, Leaf] | None,
        device: torch.device | str | None,
    ) -> None:
        self._reader = reader
        self._chosen = chosen
        self._aliases = reader.flat.aliases
        self._given = given or {}
        self._leaves: dict[str, Leaf] = {}
        # A view needs the leaf that it looks into, wanted or not.
        stored = dict.fromkeys(self._aliases[n].of if n in self._aliases else n for n in chosen)
        if given is None:
            _check_memory(reader, stored, device)
        for name in stored:
            self._leaves[name] = self._given.get(name) or self._new(name, specs, device)

    def _new(self, name: str, specs: Mapping[str, LeafSpec], device: torch.device | str | None) -> Leaf:
        source = self._reader.flat.leaves[name]
        kind = specs[name].kind
        target = device if kind in ("tensor", "parameter") else None
        return Leaf(name, kind, source.dtype, allocate(kind, source.dtype, source.shape, device=target))

    def destinations(self) -> list[tuple[str, Destination]]:
        return [(name, IntoLeaf(leaf)) for name, leaf in self._leaves.items()]

    def values(self) -> dict[str, Array]:
        """Return the array of each wanted name, views made of what they look into."""
        found: dict[str, Array] = {}
        for name in self._chosen:
            alias = self._aliases.get(name)
            if alias is None:
                found[name] = self._leaves[name].array
                continue
            view = make_view(self._leaves[alias.of].array, alias)
            own = self._given.get(name)
            if own is not None:
                _copy(view, own)
                view = own.array
            found[name] = view
        return found


def _copy(source: Array, target: Leaf) -> None:
    """Fill a leaf that is a view in the checkpoint and has memory of its own in the state."""
    leaf = Leaf.of(target.name, source)
    assert leaf is not None
    data = leaf.host_bytes()
    if data is None:
        import numpy as np

        data = np.empty(leaf.nbytes, np.uint8)
        leaf.read(0, leaf.nbytes, data)
    target.write(0, leaf.nbytes, data)


def _match(state: Flat[Leaf], reader: Reader, chosen: list[str], *, partial: bool) -> dict[str, Leaf]:
    """Return the leaves of the given state by the checkpoint's names.

    Raises
    ------
    StateMismatchError
        If they do not fit; every difference is named, up to a handful of each kind.
    """
    leaves = dict(state.leaves)
    wanted = set(chosen)
    views = {name: alias for name, alias in state.aliases.items() if name in wanted and name not in reader.flat.aliases}
    if views:
        name, alias = next(iter(views.items()))
        raise StateMismatchError(
            f"{name!r} shares its storage with {alias.of!r} in the state, but not in the checkpoint",
            path=reader.path,
            remedy="give the state tensors of their own, or load without into",
            different=tuple(views),
        )
    present = leaves.keys() | state.aliases.keys()
    missing = () if partial else tuple(n for n in leaves if n not in wanted)
    extra = tuple(n for n in chosen if n not in present)
    different = tuple(n for n in chosen if n in leaves and _differs(leaves[n], reader, n))
    unwritable = tuple(n for n in chosen if n in leaves and not leaves[n].writable)
    if missing or extra or different or unwritable:
        raise StateMismatchError(
            "the state given to `into` does not fit the checkpoint; nothing was touched\n"
            + _listed("only in the state", missing)
            + _listed("only in the checkpoint", extra)
            + "".join(_difference(leaves[n], reader, n) for n in different[:5])
            + _listed("not writable in place", unwritable),
            path=reader.path,
            remedy="load without `into`, or `select` the tensors that both have",
            missing=missing,
            extra=extra,
            different=different,
        )
    return {name: leaves[name] for name in chosen if name in leaves}


def _differs(leaf: Leaf, reader: Reader, name: str) -> bool:
    entry = reader.entries[name]
    return (leaf.dtype, leaf.shape) != (entry.dtype, entry.shape)


def _difference(leaf: Leaf, reader: Reader, name: str) -> str:
    entry = reader.entries[name]
    return f"  {name}: {leaf.dtype} {list(leaf.shape)} in the state, {entry.dtype} {list(entry.shape)} saved\n"


def _listed(what: str, found: tuple[str, ...]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"  {what}: {', '.join(found[:5])}{more}\n"


def _check_memory(reader: Reader, stored: Iterable[str], device: torch.device | str | None) -> None:
    """Refuse what this machine can never hold: a hostile file may claim any size."""
    needed = sum(reader.flat.leaves[name].nbytes for name in stored)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device is None and needed > physical:
        raise StoreError(
            f"needs {format_bytes(needed)} of memory, this machine has {format_bytes(physical)}",
            path=reader.path,
            remedy="`select` some of the tensors, or `holdfast.open` it and slice",
        )
