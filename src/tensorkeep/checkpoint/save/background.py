"""Saving in the background: the caller waits while its state is copied, the rest goes on while it works.

The copies lie in host buffers under one budget. A state that is larger streams through them: the caller is then held
until the last of it is copied, and memory stays where it is.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint import settings as settings_file
from tensorkeep.checkpoint.arguments import MemorySize, checked_path, thread_count
from tensorkeep.checkpoint.finding import get_format
from tensorkeep.checkpoint.save import auto
from tensorkeep.checkpoint.save.memory import SaveMemory, checked_budget
from tensorkeep.checkpoint.save.pending import PendingSave
from tensorkeep.checkpoint.save.save import About, checked_metadata, format_of, size_of
from tensorkeep.checkpoint.save.trial import Rates, measure
from tensorkeep.errors import DestinationExistsError, PathLike
from tensorkeep.formats.base import StepRecord, WriteSettings
from tensorkeep.io.parallel import Progress
from tensorkeep.state import cuda
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat, flatten


def save_async(
    state: object,
    path: PathLike,
    *,
    compression: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    **options: Any,
) -> PendingSave:
    """Save a nested state in the background; when this returns, the state may change.

    The checkpoint becomes visible whole, or not at all, some time later: `PendingSave.wait` returns then, or raises
    what went wrong. An interpreter that ends waits for it, and prints the error of a save that nobody waited for. Each
    call takes new memory for the copy; `tensorkeep.CheckpointManager` keeps it from one save to the next, which makes
    the copying several times faster.

    Parameters
    ----------
    state, path, compression, format, overwrite, metadata, progress, threads, **options
        As for `tensorkeep.save`.
    memory_budget : int or str, optional
        Bytes that the copy and all other buffers together may take, at least 128 MiB. A larger state holds the caller
        until the last of it is copied; formats other than ``"native"`` refuse it. By default what the state needs, but
        at most half of the memory that is available.

    Returns
    -------
    PendingSave

    Raises
    ------
    UnsupportedLeafError, DestinationExistsError, UsageError, UnsupportedError
        As `tensorkeep.save`, as far as it is known before anything is written; what is found later comes out of
        `PendingSave.wait`.
    """
    begin = time.perf_counter()
    memory = SaveMemory(checked_budget(memory_budget, delta=bool(options.get("delta"))))
    pending = begin_save(
        state,
        path,
        memory,
        begin=begin,
        compression=compression,
        format=format,
        overwrite=overwrite,
        metadata=metadata,
        progress=progress,
        threads=threads,
        options=options,
    )

    def work() -> None:
        pending.execute()
        memory.close()
        pending.announce()

    try:
        pending.start(work)
    except BaseException:
        memory.close()
        raise
    return pending


def begin_save(
    state: object,
    path: PathLike,
    memory: SaveMemory,
    *,
    begin: float,
    compression: str | None,
    format: str | None,
    overwrite: bool,
    metadata: dict[str, Any] | None,
    progress: Progress | None,
    threads: int | None,
    options: dict[str, Any],
    step: StepRecord | None = None,
    copy: bool = True,
) -> PendingSave:
    """Return a save that was checked and only has to be started; see `save_async`.

    Parameters
    ----------
    memory : SaveMemory
        What the buffers come from; it must stay open until the save is done.
    begin : float
        ``time.perf_counter()`` at the caller's call.
    copy : bool
        Whether it will be started in the background; otherwise `PendingSave.run` is to be called.
    """
    checked_path(path)
    format = format or format_of(path)
    choice = settings_file.choose(
        path,
        format,
        compression=compression,
        threads=threads,
        memory_budget=None,
        options=options,
        # The file's budget is for the buffers of a save that copies nothing.
        follow=[key for key in settings_file.KEYS if key != "memory_budget"],
    )
    settings = WriteSettings(
        overwrite=overwrite,
        metadata=checked_metadata(metadata or {}),
        compression=choice.compression,
        threads=thread_count(choice.threads),
        progress=progress,
        options=get_format(format).parse_options(choice.options),
        step=step,
    )
    flat = flatten(state)
    if not overwrite and os.path.lexists(path):
        raise DestinationExistsError(
            "exists already", path=path, remedy="choose another path, or ask to overwrite it (overwrite=True)"
        )
    cuda.wait_for_caller(flat.leaves.values())
    settings, decision = auto.resolve(flat, Path(path), format, settings, measure=partial(_measure, memory))
    delta = bool(options.get("delta"))
    pool = memory.working(settings.threads, delta=delta) if copy else memory.whole()
    about = About(os.fspath(path), format, settings.compression, *size_of(flat), decision, choice.settings_from)
    write = get_format(format).begin(flat, Path(path), replace(settings, pool=pool))
    fits = True
    if copy:
        needed = write.staging_bytes()
        staging = memory.staging(needed, from_cuda=cuda.on_cuda(flat.leaves.values()))
        write.prepare(staging)
        fits = needed <= staging.budget
    return PendingSave(write, about, memory, begin, fits=fits)


def _measure(memory: SaveMemory, flat: Flat[Source], destination: Path, settings: WriteSettings) -> Rates:
    """Measure with the memory that the save will have, which is made free for it."""
    memory.close()
    with memory.whole() as pool:
        return measure(flat, destination, replace(settings, pool=pool))
