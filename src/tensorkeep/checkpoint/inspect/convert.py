"""Converting a checkpoint from any format to any other, without ever holding the whole of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint import settings
from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, checked_path, thread_count
from tensorkeep.checkpoint.finding import get_format, open_reader
from tensorkeep.checkpoint.save.save import SaveReport, save_flat
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, Reader, WriteSettings, thread_bytes
from tensorkeep.io.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import names
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat, prune


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    to: str = "native",
    compression: str | None = None,
    select: str | Iterable[str] | None = None,
    overwrite: bool = False,
    drop_metadata: bool = False,
    verify: bool = True,
    format: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    **options: Any,
) -> SaveReport:
    """Write a checkpoint again, in another format or with another compression.

    Parameters
    ----------
    src, dst : path-like
    to : str
        The format to write.
    compression : str, optional
        As for `save`; a ``tensorkeep.toml`` above the destination is followed, too.
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
    TensorkeepError
        Whatever loading the source or saving to the destination raises; the source is never changed.
    """
    begin = time.perf_counter()
    choice = settings.choose(
        checked_path(dst), to, compression=compression, threads=threads, memory_budget=memory_budget, options=options
    )
    with (
        budget_pool(DEFAULT_BUDGET if choice.memory_budget is None else choice.memory_budget) as pool,
        open_reader(checked_path(src), OpenSettings(verify=verify, pool=pool), format) as reader,
    ):
        _refuse_inside(src, dst)
        return save_flat(
            _selected(reader, select),
            dst,
            format=to,
            begin=begin,
            settings_from=choice.settings_from,
            settings=WriteSettings(
                overwrite=overwrite,
                metadata={} if drop_metadata else reader.metadata,
                compression=choice.compression,
                threads=_threads(reader, thread_count(choice.threads), pool),
                pool=pool,
                progress=progress,
                options=get_format(to).parse_options(choice.options),
                step=reader.step,
            ),
        )


def _refuse_inside(src: PathLike, dst: PathLike) -> None:
    if Path(os.path.realpath(src)) in Path(os.path.realpath(dst)).parents:
        raise UsageError(
            "the destination lies inside the source, which is never changed",
            path=dst,
            remedy="choose a path outside of it",
        )


def _threads(reader: Reader, wanted: int, pool: BufferPool) -> int:
    # A range of a source with larger blocks needs a whole block beside what writing needs, and its stored bytes.
    block_bytes = max((reader.block_bytes(name) for name in reader.flat.leaves), default=BLOCK_BYTES)
    beside = 0 if block_bytes <= BLOCK_BYTES else thread_bytes(block_bytes, buffers=2)
    beside += thread_bytes(block_bytes, buffers=reader.buffers - 2)
    return pool.threads(wanted, thread_bytes(BLOCK_BYTES, buffers=3) + beside)


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
