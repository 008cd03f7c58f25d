"""Saving in the background: the caller waits while its state is copied, the rest goes on while it works.

The copies lie in host buffers under one budget. A state that is larger streams through them: the caller is then held
until the last of it is copied, and memory stays where it is.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint import auto, tuning
from holdfast.checkpoint.arguments import MemorySize, checked_path, thread_count
from holdfast.checkpoint.finding import get_format
from holdfast.checkpoint.save import About, SaveReport, checked_metadata, format_of, size_of
from holdfast.checkpoint.save_memory import SaveMemory
from holdfast.errors import BusyError, DestinationExistsError, PathLike, UsageError
from holdfast.formats.base import StepRecord, Write, WriteSettings
from holdfast.io.buffers import BufferPool
from holdfast.io.parallel import Cancelled, Progress, default_threads
from holdfast.state import streams
from holdfast.state.tree import flatten

Callback = Callable[[], None]


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
    call takes new memory for the copy; `holdfast.CheckpointManager` keeps it from one save to the next, which makes the
    copying several times faster.

    Parameters
    ----------
    state, path, compression, format, overwrite, metadata, progress, threads, **options
        As for `holdfast.save`.
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
        As `holdfast.save`, as far as it is known before anything is written; what is found later comes out of
        `PendingSave.wait`.
    """
    begin = time.perf_counter()
    memory = SaveMemory(memory_budget)
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
    pending.start(on_end=memory.close)
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
    choice = tuning.choose(
        path,
        format,
        compression=compression,
        threads=threads,
        memory_budget=None,
        options=options,
        # The file's budget is for the buffers of a save that copies nothing.
        follow=[key for key in tuning.KEYS if key != "memory_budget"],
    )
    settings = WriteSettings(
        overwrite=overwrite,
        metadata=checked_metadata(metadata or {}),
        compression=choice.compression,
        threads=thread_count(choice.threads),
        progress=progress,
        options=choice.options,
        step=step,
    )
    flat = flatten(state)
    if not overwrite and os.path.lexists(path):
        raise DestinationExistsError(
            "exists already", path=path, remedy="choose another path, or ask to overwrite it (overwrite=True)"
        )
    streams.wait_for_caller(flat.leaves.values())
    with BufferPool() as measuring:
        settings, decision = auto.resolve(flat, Path(path), format, replace(settings, pool=measuring))
    delta = bool(options.get("delta"))
    pool = memory.working(settings.threads, delta=delta) if copy else memory.whole()
    about = About(os.fspath(path), format, settings.compression, *size_of(flat), decision, choice.settings_from)
    write = get_format(format).begin(flat, Path(path), replace(settings, pool=pool))
    fits = True
    if copy:
        needed = write.staging_bytes()
        staging = memory.staging(needed, from_cuda=streams.on_cuda(flat.leaves.values()))
        write.prepare(staging)
        fits = needed <= staging.budget
    return PendingSave(write, about, memory, begin, fits=fits)


class PendingSave:
    """A save that goes on in the background.

    Attributes
    ----------
    path : str
        Where the checkpoint appears.
    """

    def __init__(self, write: Write, about: About, memory: SaveMemory, begin: float, *, fits: bool) -> None:
        self.path = about.path
        self.memory = memory
        self.fits = fits  # whether the whole state can be copied before any of it is written
        self._write: Write | None = write
        self._about = about
        self._begin = begin
        self._stall = 0.0
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._staged = threading.Event()
        self._done = threading.Event()
        self._process = os.getpid()

    def start(self, *, after: Callback | None = None, on_end: Callback | None = None) -> None:
        """Begin to write, and copy the state; return when the state may change.

        Parameters
        ----------
        after : callable, optional
            Called in the background when the checkpoint is durable; its error becomes that of the save.
        on_end : callable, optional
            Called in the background at last, however the save ended.
        """
        write = self._unfinished()
        self.launch(after=after, on_end=on_end)
        try:
            self._stage(write)
        except BaseException:
            # The caller has the error; the background only ends.
            write.cancel()
            self._staged.set()
            self._done.wait()
            _untold.discard(self)
            raise

    def launch(self, *, after: Callback | None = None, on_end: Callback | None = None) -> None:
        """Begin to write what is staged, or will be; see `start`."""
        # Not a daemon: an interpreter that ends waits for it.
        arguments = self._unfinished(), after, on_end
        threading.Thread(target=self._run, args=arguments, name="holdfast-save").start()

    def run(self, *, after: Callback | None = None, on_end: Callback | None = None) -> None:
        """Write the state itself, in the caller's thread; see `start`."""
        self._staged.set()
        self._run(self._unfinished(), after, on_end)

    def stage(self) -> None:
        """Copy the state; return when it may change."""
        self._stage(self._unfinished())

    def _unfinished(self) -> Write:
        if self._write is None:
            raise AssertionError("it is over")
        return self._write

    def _stage(self, write: Write) -> None:
        # Where the writing has failed meanwhile, `wait` says why.
        with suppress(Cancelled):
            write.stage(_copying_threads())
        self._stall = time.perf_counter() - self._begin
        self._staged.set()

    def supersede(self) -> None:
        """End a save that was staged and never launched."""
        self._unfinished().abandon()
        self._write = None
        self._error = BusyError(
            "was not written: a later save took its place in the queue", path=self.path, remedy="save less often"
        )
        self._done.set()

    def _run(self, write: Write, after: Callback | None, on_end: Callback | None) -> None:
        try:
            written = write.run()
            seconds = time.perf_counter() - self._begin
            self._staged.wait()
            written = replace(written, peak_buffer_bytes=self.memory.peak_bytes)
            self._report = self._about.report(written, seconds, stall=self._stall or seconds)
            if after is not None:
                after()
        except BaseException as error:
            self._error = error
            _untold.add(self)
        finally:
            # It knows the caller's tensors, whose memory may be wanted elsewhere.
            self._write = None
            try:
                if on_end is not None:
                    on_end()
            finally:
                self._done.set()

    def done(self) -> bool:
        """Say whether it is over, well or not."""
        return self._done.is_set()

    def settled(self) -> None:
        """Wait until it is over, well or not."""
        self._done.wait()

    def failed(self) -> bool:
        """Say whether it is over and its error is still to be told."""
        return self.done() and self in _untold

    @property
    def report(self) -> SaveReport | None:
        """The report, or None while it goes on or if it failed."""
        return self._report

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable and visible.

        Parameters
        ----------
        timeout : float, optional
            Seconds; for ever by default.

        Returns
        -------
        SaveReport

        Raises
        ------
        TimeoutError
            If it goes on after that time.
        BusyError, DestinationExistsError, StoreError, ...
            If it failed; as `holdfast.save`. What was at the path before is still there.
        """
        if os.getpid() != self._process:
            raise UsageError("was started by another process", path=self.path, remedy="wait for it there")
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.path}: the save goes on after {timeout} s")
        if self._error is not None:
            _untold.discard(self)
            raise self._error
        if self._report is None:
            raise AssertionError("a save ends with a report or an error")
        return self._report


_untold: set[PendingSave] = set()
"""Saves that failed and whose error nobody has seen."""


def _tell() -> None:
    for pending in list(_untold):
        if pending._process == os.getpid():
            print(f"holdfast: NOT SAVED: {pending.path}: {pending._error}", file=sys.stderr)


atexit.register(_tell)


def _copying_threads() -> int:
    # Copying is bound by memory, and the caller waits: as many as there are cores, not twice as many.
    return max(1, default_threads() // 2)
