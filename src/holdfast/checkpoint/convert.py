"""Converting a checkpoint from any format to any other, without ever holding the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.save import SaveReport, save_flat
from holdfast.errors import PathLike, UsageError
from holdfast.formats.base import OpenSettings, Reader, WriteSettings
from holdfast.io.buffers import DEFAULT_BUDGET, BufferPool
from holdfast.io.parallel import Progress, default_threads
from holdfast.state import names
from holdfast.state.source import Source
from holdfast.state.tree import Flat, prune


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    to: str = "native",
    compression: str = "none",
    select: str | Iterable[str] | None = None,
    overwrite: bool = False,
    drop_metadata: bool = False,
    verify: bool = True,
    format: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    **options: Any,
) -> SaveReport:
    """Write a checkpoint again, in another format or with another compression.

    Parameters
    ----------
    src, dst : path-like
    to : str
        The format to write.
    compression : str
        As for `save`.
    select : str or list of str, optional
        Globs on the names; only these tensors are converted.
    drop_metadata : bool
        Leave out what the user gave beside the state; some formats have no place for it.
    overwrite, verify, progress, threads, memory_budget
        As for `save` and `load`; one budget holds for reading and writing together.
    format : str, optional
        The format of the source; found by looking unless given.
    **options
        The written format's own.

    Returns
    -------
    SaveReport

    Raises
    ------
    HoldfastError
        Whatever loading the source or saving to the destination raises; the source is never changed.
    """
    with (
        BufferPool(memory_budget) as pool,
        open_reader(src, OpenSettings(verify=verify, pool=pool), format) as reader,
    ):
        return save_flat(
            _selected(reader, select),
            dst,
            format=to,
            settings=WriteSettings(
                overwrite=overwrite,
                metadata={} if drop_metadata else reader.metadata,
                compression=compression,
                threads=threads or default_threads(),
                pool=pool,
                progress=progress,
                options=options,
            ),
        )


def _selected(reader: Reader, select: str | Iterable[str] | None) -> Flat[Source]:
    flat = reader.flat
    if select is None:
        return flat
    chosen = set(names.select(reader.entries, select))
    orphans = [n for n in chosen if n in flat.aliases and flat.aliases[n].of not in chosen]
    if orphans:
        base = flat.aliases[orphans[0]].of
        raise UsageError(
            f"{orphans[0]!r} is a view of {base!r}, which is not selected",
            path=reader.path,
            remedy=f"select {base!r}, too",
        )
    return Flat(
        skeleton=prune(flat.skeleton, chosen),
        leaves={name: leaf for name, leaf in flat.leaves.items() if name in chosen},
        aliases={name: alias for name, alias in flat.aliases.items() if name in chosen},
        parts={name: part for name, part in flat.parts.items() if name in chosen},
    )
