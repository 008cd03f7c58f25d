"""One save while it is copied, written and waited for, and its report: what `SaveQueue` runs."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.errors import BusyError
from tensorkeep.formats.write import StagedWrite, WriteResult
from tensorkeep.io.parallel import Cancelled, default_threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(WriteResult):
    """What a save wrote and what it cost.

    Attributes
    ----------
    path, format, compression : str
        As written, also where they were inferred or chosen by measuring.
    state_bytes, tensors : int
        Raw bytes of the tensors, where shared storage counts once, and how many were stored.
    stored_bytes, new_bytes : int
        Bytes on disk of all files of the checkpoint, and of those that this save wrote; the rest is shared with
        earlier checkpoints.
    seconds, durable_seconds : float
        From the call until the checkpoint was durable and visible.
    stall_seconds : float
        How long the caller was blocked: all of it, except for `tensorkeep.save_async`.
    peak_buffer_bytes : int
        The peak of host buffer memory of this save.
    direct_io : bool
        Whether the page cache was bypassed (``O_DIRECT``); some file systems refuse that.
    auto : dict or None
        For ``compression="auto"``: the measured rates, the predictions, and the reason for the choice.
    settings_from : str or None
        The settings file, if at least one of its values was used.
    base, base_refused : str or None
        The earlier checkpoint that unchanged blocks were taken from, and why some or all of its blocks were not.
    """

    path: str
    format: str
    compression: str
    state_bytes: int
    tensors: int
    seconds: float
    stall_seconds: float
    durable_seconds: float
    auto: dict[str, Any] | None = None
    settings_from: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)


class SaveJob:
    """A save whose arguments are checked; made by `begin_save`.

    Either `run` is called, in the caller's thread. Or `copy` is, in the caller's thread, and `write` and `finish`, in
    another one, after it or at the same time. If ``fits`` is False, the buffers cannot hold the whole state, and it is
    copied while it is written. A forked child cannot wait for the save: ``process`` is the one that began it.
    """

    def __init__(
        self,
        path: str,
        write: StagedWrite,
        make_report: Callable[..., SaveReport],
        memory: SaveMemory,
        *,
        started: float,
        copied: bool,
        fits: bool,
        on_durable: Callable[[], None] | None,
    ) -> None:
        self.path = path
        self.memory = memory
        self.fits = fits
        self.thread: threading.Thread | None = None
        self.process = os.getpid()
        self._write: StagedWrite | None = write
        self._make_report = make_report
        self._started = started
        self._on_durable = on_durable
        self._stall_seconds: float | None = None
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._copied = threading.Event()
        self._over = threading.Event()
        if copied:
            self._copied.set()

    def run(self) -> SaveReport:
        """Write the checkpoint; return when it is durable."""
        written = self._unfinished().run()
        seconds = time.perf_counter() - self._started
        self._copied.wait()
        stall_seconds = seconds if self._stall_seconds is None else self._stall_seconds
        written = replace(written, peak_buffer_bytes=max(written.peak_buffer_bytes, self.memory.peak_bytes))
        report = self._make_report(
            **asdict(written), seconds=seconds, durable_seconds=seconds, stall_seconds=stall_seconds
        )
        if self._on_durable is not None:
            self._on_durable()
        return report

    def copy(self) -> None:
        """Copy the state, unless that was done; when this returns, the caller may change it."""
        if self._copied.is_set():
            return
        # If the writing fails meanwhile, it cancels the copying; its own error is raised by `result`.
        with suppress(Cancelled):
            # Copying is bound by memory bandwidth, and the caller waits: one thread a core.
            self._unfinished().stage(max(1, default_threads() // 2))
        self._stall_seconds = time.perf_counter() - self._started
        self._copied.set()

    def write(self) -> None:
        """Write the checkpoint, keeping an error for `result`; `finish` is called next."""
        try:
            self._report = self.run()
        except BaseException as error:
            self._error = error
            _unreported.add(self)
        finally:
            # They refer to the caller's tensors, whose memory may be needed elsewhere, and to the manager.
            self._write = self._on_durable = None

    def finish(self) -> None:
        """Wake up those who wait."""
        self._over.set()

    def abandon(self, error: BaseException) -> None:
        """End a save that no thread writes; `result` raises the error. A second call completes an interrupted one."""
        self._error = error
        if self._write is not None:
            self._write.abandon()
        self._write = self._on_durable = None
        self._over.set()

    def supersede(self) -> None:
        """End a save that was copied and not written, in favour of a later one."""
        logger.info("%s is not written: a later save took its place in the queue", self.path)
        message = "was not written: a later save took its place in the queue"
        self.abandon(BusyError(message, path=self.path, remedy="save less often"))

    def cancel(self) -> None:
        """Stop the thread that writes, and wait for it; its error is dropped, because the caller has another one."""
        write = self._write
        if write is not None:
            write.cancel()
        self._copied.set()
        self._over.wait()
        _unreported.discard(self)

    def is_over(self) -> bool:
        """Return whether it has succeeded or failed."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has succeeded or failed; return whether it has."""
        return self._over.wait(timeout)

    def has_unreported_error(self) -> bool:
        """Return whether it has failed and `result` has not raised the error yet."""
        return self.is_over() and self in _unreported

    def result(self) -> SaveReport:
        """Return the report of a save that is over, or raise its error."""
        if self._error is not None:
            _unreported.discard(self)
            raise self._error
        if self._report is None:
            raise AssertionError("a save ends with a report or an error")
        return self._report

    @property
    def report(self) -> SaveReport | None:
        """The report; None before the end, or if it failed."""
        return self._report if self.is_over() else None

    def _unfinished(self) -> StagedWrite:
        if self._write is None:
            raise AssertionError("the save is over")
        return self._write


_unreported: set[SaveJob] = set()
"""Saves that failed and whose error `result` has not raised yet."""


def _log_unreported() -> None:
    for job in list(_unreported):
        if job.process == os.getpid():
            logger.error("NOT SAVED: %s: %s", job.path, job._error)


atexit.register(_log_unreported)
