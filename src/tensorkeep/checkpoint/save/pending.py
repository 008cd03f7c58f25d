"""A save that goes on in the background: begun, copied, written, and waited for; its error is never lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.checkpoint.save.save import About, SaveReport
from tensorkeep.errors import BusyError, UsageError
from tensorkeep.formats.base import StagedWrite
from tensorkeep.io.parallel import THREAD_START_SECONDS, Cancelled, default_threads

Callback = Callable[[], None]


class PendingSave:
    """A save that goes on in the background.

    Attributes
    ----------
    path : str
        Where the checkpoint appears.
    """

    def __init__(self, write: StagedWrite, about: About, memory: SaveMemory, begin: float, *, fits: bool) -> None:
        self.path = about.path
        self.memory = memory
        self.fits = fits  # whether the whole state can be copied before any of it is written
        self._write: StagedWrite | None = write
        self._about = about
        self._begin = begin
        self._stall = 0.0
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._staged = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # Beginning: whoever saves calls one of these

    def start(self, work: Callback) -> None:
        """Let ``work``, which calls `execute`, begin in a thread of its own; copy the state, which may change then."""
        write = self._unfinished()
        try:
            if self.fits:
                # While nothing else takes memory and cores from the copying, for which the caller waits.
                self._stage(write)
            self.spawn(work)
            if not self.fits:
                self._stage(write)
        except BaseException as error:
            # The caller has the error; the background, if there is one yet, only ends.
            self.give_up(error)
            write.cancel()
            self._staged.set()
            self._done.wait()
            _untold.discard(self)
            raise

    def spawn(self, work: Callback) -> None:
        """Let ``work`` begin in a thread of its own; if it cannot, this is over."""
        # Not a daemon: an interpreter that ends waits for it.
        thread = self._thread = threading.Thread(target=work, name="tensorkeep-save")
        try:
            thread.start()
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """End what was begun and interrupted, unless a thread has it, or it is over; `wait` raises the error."""
        if not self.done() and (self._thread is None or not _begins(self._thread)):
            self.abandon(error)

    def stage(self) -> None:
        """Copy the state before anything is written; return when it may change."""
        try:
            self._stage(self._unfinished())
        except BaseException as error:
            self.give_up(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """End what was never written; the error comes out of `wait`. A call that was interrupted is made once more."""
        self._error = error
        if self._write is not None:
            self._write.abandon()
        self._write = None
        self._done.set()

    def supersede(self) -> None:
        """End what was copied and never written, in favour of a later save."""
        self.abandon(
            BusyError(
                "was not written: a later save took its place in the queue", path=self.path, remedy="save less often"
            )
        )

    def run(self, after: Callback) -> None:
        """Write the state itself, in the caller's thread."""
        self._staged.set()
        self.execute(after)
        self.announce()

    def _stage(self, write: StagedWrite) -> None:
        # Where the writing has failed meanwhile, `wait` says why.
        with suppress(Cancelled):
            write.stage(_copying_threads())
        self._stall = time.perf_counter() - self._begin
        self._staged.set()

    # Writing

    def execute(self, after: Callback | None = None) -> None:
        """Write what is copied, or will be. Never raises; `announce` is to follow.

        Parameters
        ----------
        after : callable, optional
            Called when the checkpoint is durable; its error becomes that of the save.
        """
        try:
            written = self._unfinished().run()
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

    def announce(self) -> None:
        """Let those who wait know that it is over."""
        self._done.set()

    def _unfinished(self) -> StagedWrite:
        if self._write is None:
            raise AssertionError("it is over")
        return self._write

    # Waiting

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
        return self._report if self.done() else None

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
            If it failed; as `tensorkeep.save`. What was at the path before is still there.
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
            print(f"tensorkeep: NOT SAVED: {pending.path}: {pending._error}", file=sys.stderr)


atexit.register(_tell)


def _begins(thread: threading.Thread) -> bool:
    """Say whether a thread runs, or has run, whose start was interrupted."""
    end = time.monotonic() + THREAD_START_SECONDS
    while thread.ident is None and time.monotonic() < end:
        time.sleep(0.01)
    return thread.ident is not None


def _copying_threads() -> int:
    # Copying is bound by memory, and the caller waits: as many as there are cores, not twice as many.
    return max(1, default_threads() // 2)
