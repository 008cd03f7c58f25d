"""One save while it is copied, written and waited for, its report, and the handle that the caller has."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.errors import BusyError, UsageError
from tensorkeep.formats.write import StagedWrite, WriteResult
from tensorkeep.io.parallel import Cancelled, default_threads
from tensorkeep.io.threads import Signal, shielded

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
    seconds : float
        From the call until the checkpoint was durable and visible.
    durable_seconds : float
        The same value as ``seconds``.
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

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = tensorkeep.save({"w": torch.zeros(1000)}, f"{folder.name}/c")
    >>> report.tensors, report.state_bytes, report.new_bytes == report.stored_bytes
    (1, 4000, True)
    >>> folder.cleanup()
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


@dataclass(eq=False)
class SaveJob:
    """A save whose arguments are checked; made by `begin_save`.

    Either `run` is called, in the caller's thread. Or `copy` is, in the caller's thread, and `write`, in another one,
    after it or at the same time; that thread then sets ``finished``. If ``state_fits_in_buffers`` is False,
    the state is copied while it is written. A forked child cannot wait for the save: ``process`` is the one that began
    it.
    """

    path: str
    staged: StagedWrite | None  # None after the end
    make_report: Callable[..., SaveReport]
    memory: SaveMemory
    started: float
    state_fits_in_buffers: bool
    on_durable: Callable[[], None] | None
    process: int = field(default_factory=os.getpid)
    copied: Signal = field(default_factory=Signal)
    finished: Signal = field(default_factory=Signal)
    thread: threading.Thread | None = None
    stall_seconds: float | None = None
    report: SaveReport | None = None
    error: BaseException | None = None

    def run(self) -> SaveReport:
        """Write the checkpoint; return when it is durable."""
        assert self.staged is not None
        written = self.staged.run()
        seconds = time.perf_counter() - self.started
        self.copied.wait()
        stall_seconds = seconds if self.stall_seconds is None else self.stall_seconds
        written = replace(written, peak_buffer_bytes=max(written.peak_buffer_bytes, self.memory.peak_bytes))
        report = self.make_report(
            **asdict(written), seconds=seconds, durable_seconds=seconds, stall_seconds=stall_seconds
        )
        if self.on_durable is not None:
            self.on_durable()
        return report

    def copy(self) -> None:
        """Copy the state, unless that was done; when this returns, the caller may change it."""
        if self.copied.is_set():
            return
        assert self.staged is not None
        # If the writing fails meanwhile, it cancels the copying; its own error is raised by `result`.
        with suppress(Cancelled):
            # Copying is bound by memory bandwidth, and the caller waits: one thread a core.
            self.staged.stage(max(1, default_threads() // 2))
        self.stall_seconds = time.perf_counter() - self.started
        self.copied.set()

    def write(self) -> None:
        """Write the checkpoint, keeping an error for `result`."""
        try:
            self.report = self.run()
        except BaseException as error:
            self.error = error
            _unreported.add(self)
        finally:
            # Drop the references, so that the caller's tensors and the manager can be freed.
            self.staged = self.on_durable = None

    def abandon(self, error: BaseException) -> None:
        """End a save that no thread writes; `result` raises the error. A second call completes an interrupted one."""
        self.error = error
        if self.staged is not None:
            self.staged.abandon()
        self.staged = self.on_durable = None
        self.finished.set()

    def supersede(self) -> None:
        """End a save that was copied and not written, in favour of a later one."""
        logger.info("%s is not written: a later save took its place in the queue", self.path)
        message = "was not written: a later save took its place in the queue"
        self.abandon(BusyError(message, path=self.path, remedy="save less often"))

    def cancel(self) -> None:
        """Stop the thread that writes, and wait for it; its error is dropped, because the caller has another one."""
        self.stop()
        self.copied.set()
        self.finished.wait()
        _unreported.discard(self)

    def stop(self) -> None:
        """Make the writing stop as soon as it can."""
        staged = self.staged
        if staged is not None:
            staged.cancel()

    def hurry(self) -> None:
        """Let the thread that writes use all processors, as the caller waits for it now."""
        staged = self.staged
        if staged is not None:
            staged.hurry()

    def has_unreported_error(self) -> bool:
        """Return whether it is over, has failed, and `result` has not raised the error yet."""
        return self in _unreported

    def result(self) -> SaveReport:
        """Return the report of a save that is over, or raise its error."""
        if self.error is not None:
            _unreported.discard(self)
            raise self.error
        assert self.report is not None
        return self.report


def run_now(prepare: Callable[[], SaveJob], *, alone: bool) -> SaveJob:
    """Make a save and write it; return it when the checkpoint is durable.

    If the process saves ``alone``, no handler of a signal can raise in it. Otherwise an interrupt must end the waiting
    for other ranks.
    """
    jobs: list[SaveJob] = []

    def work() -> SaveJob:
        jobs.append(job := prepare())
        try:
            job.report = job.run()
        finally:
            job.staged = job.on_durable = None
            job.finished.set()
        return job

    def stop() -> None:
        for job in jobs:
            job.stop()

    return shielded(work, stop) if alone else work()


_unreported: set[SaveJob] = set()
"""Saves that failed and whose error `result` has not raised yet."""


def _log_unreported() -> None:
    for job in list(_unreported):
        if job.process == os.getpid():
            logger.error("NOT SAVED: %s: %s", job.path, job.error)


atexit.register(_log_unreported)


class PendingSave:
    """A save that runs in the background; returned by `tensorkeep.save_async` and `CheckpointManager.save`.

    Its error is never lost: `wait` raises it, the next save of a manager raises it, and if neither is called, it is
    logged when the interpreter exits.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = tensorkeep.save_async({"w": torch.zeros(1000)}, f"{folder.name}/step-1")
    >>> pending.wait().state_bytes
    4000
    >>> pending.done()
    True
    >>> folder.cleanup()
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<PendingSave {self.path!r}: {'over' if self.done() else 'running'}>"

    @property
    def path(self) -> str:
        """Where the checkpoint appears."""
        return self._job.path

    @property
    def report(self) -> SaveReport | None:
        """The report; None while the save runs, and if it failed."""
        return self._job.report if self.done() else None

    def done(self) -> bool:
        """Return whether the save is over, successfully or not."""
        return self._job.finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable and visible, at most for ``timeout`` seconds; return the report.

        Raises
        ------
        TimeoutError
            If the save is still running after that time.
        BusyError
            If another process writes to the path, or a later save took the place of this one in a manager's queue.
        DestinationExistsError, StoreError
            If something appeared at the path after the call, or the disk failed. What was there before is intact.
        UsageError
            If another process began the save; a forked child cannot wait for it.
        """
        if os.getpid() != self._job.process:
            raise UsageError("was started by another process", path=self.path, remedy="wait for it there")
        self._job.hurry()
        if not self._job.finished.wait(timeout):
            raise TimeoutError(f"{self.path}: the save is still running after {timeout} s")
        return self._job.result()
