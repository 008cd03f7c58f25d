"""Saves as jobs: their memory, their copy of the state, the queue that writes in the background, and their reports."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from tensorkeep.checkpoint.options import MemorySize
from tensorkeep.errors import BusyError, UsageError
from tensorkeep.formats.base import BLOCK_BYTES, StagedWrite, WriteResult, thread_bytes
from tensorkeep.formats.blockfile.write import buffers_per_thread
from tensorkeep.machine import available_bytes
from tensorkeep.storage.buffers import DEFAULT_BUDGET, MINIMUM_BUDGET, BufferPool, CudaPageLock
from tensorkeep.storage.object_store import part_bytes
from tensorkeep.storage.parallel import Cancelled, Signal, default_threads, reset_in_child, shielded, start_thread
from tensorkeep.units import counted, format_bytes, format_least_bytes, parse_bytes

# The buffers of saves: one memory budget for copying the state and writing it.

_SLIGHTLY_LARGER = 1.25


class SaveMemory:
    """Two warm pools of buffers; ``budget`` limits both, else the state's needs and half of the free memory."""

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._staging: BufferPool | None = None
        self._working: BufferPool | None = None
        self._page_lock: CudaPageLock | None = None

    def working(self, threads: int, *, delta: bool, in_store: bool = False) -> BufferPool:
        """The pool of the writing threads. Raises UsageError if the budget is too small to upload."""
        each = thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=True, delta=delta))
        if in_store:
            each += part_bytes(0)
            least = max(MINIMUM_BUDGET, each) + MINIMUM_BUDGET
            if self._budget is not None and self._budget < least:
                found = format_bytes(self._budget)
                text = f"a memory budget of {found} for each copy of the state is too small for saving into a store"
                raise UsageError(text, remedy=f"give at least {format_least_bytes(least)} for each")
        # A quarter of a given budget writes, the rest holds the copy of the state.
        limit = threads * each if self._budget is None else self._budget // 4
        self._working = _with_budget(self._working, max(MINIMUM_BUDGET, each, min(threads * each, limit)))
        return self._working

    def staging(self, needed: int, *, from_cuda: bool) -> BufferPool:
        """The pool for copies of ``needed`` bytes, page-locked for CUDA; `working` is called first."""
        assert self._working is not None
        if self._budget is not None:
            size = self._budget - self._working.budget
        # Neither too small nor much too large: keep the warm buffers.
        elif self._staging is not None and needed <= self._staging.budget <= 2 * max(needed, MINIMUM_BUDGET):
            size = self._staging.budget
        else:
            size = self._half_of_available(needed)
        if from_cuda:
            self._page_lock = self._page_lock or CudaPageLock()
        self._staging = _with_budget(self._staging, size, page_lock=self._page_lock if from_cuda else None)
        return self._staging

    def _half_of_available(self, needed: int) -> int:
        # The kept buffers are not available to others, but to this save.
        kept = 0 if self._staging is None else self._staging.allocated_bytes
        size = max(MINIMUM_BUDGET, min(needed, (available_bytes() + kept) // 2))
        # The kept buffers are faster to fill, which is worth more than a slightly larger pool.
        if self._staging is not None and size < needed and size <= _SLIGHTLY_LARGER * self._staging.budget:
            return self._staging.budget
        return size

    def single_pool(self) -> BufferPool:
        self._working = _with_budget(self._working, DEFAULT_BUDGET if self._budget is None else self._budget)
        return self._working

    @property
    def peak_bytes(self) -> int:
        """An upper bound: the two pools may have had their peaks at different times."""
        return sum(pool.peak_bytes for pool in (self._staging, self._working) if pool is not None)

    def close(self) -> None:
        for pool in (self._staging, self._working):
            if pool is not None:
                pool.close()


def checked_budget(
    budget: MemorySize | None, *, copies: int = 1, delta: bool = False, background: bool = True
) -> int | None:
    """Return a budget in bytes; UsageError if it is too small for one writing thread and ``copies``."""
    if budget is None:
        return None
    parsed = parse_bytes(budget)
    work = max(MINIMUM_BUDGET, thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=background, delta=delta)))
    least = copies * (work + MINIMUM_BUDGET if background else work)
    if parsed < least:
        what = ["saving in the background"] if background else ["saving"]
        what += ["of differences"] if delta else []
        what += [f"with {copies} copies of the state"] if copies > 1 else []
        text = f"a memory budget of {format_bytes(parsed)} is too small for {' '.join(what)}"
        raise UsageError(text, remedy=f"give at least {format_least_bytes(least)}")
    return parsed


def _with_budget(pool: BufferPool | None, budget: int, *, page_lock: CudaPageLock | None = None) -> BufferPool:
    if pool is not None and pool.budget == budget and pool.page_lock is page_lock:
        return pool
    if pool is not None:
        # Its buffers go to the new pool, by the spares of the process.
        pool.close()
    return BufferPool(budget, page_lock=page_lock)


# One save: its report, its job, and the handle that the caller gets.

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
        Bytes on disk of all files of the checkpoint, and of the files that this save wrote; earlier checkpoints
        share the rest.
    seconds : float
        From the call until the checkpoint was durable and visible.
    durable_seconds : float
        The same value as ``seconds``.
    stall_seconds : float
        How long the caller was blocked: the whole save, except for `tensorkeep.save_async`.
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

    def __repr__(self) -> str:
        stored = format_bytes(self.stored_bytes)
        shared = "" if self.new_bytes == self.stored_bytes else f", {format_bytes(self.new_bytes)} of them new"
        waited = "" if self.stall_seconds == self.seconds else f", the caller waited {self.stall_seconds:.3g} s"
        return (
            f"<SaveReport {self.path!r}: {counted(self.tensors, 'tensor')}, {format_bytes(self.state_bytes)} stored in "
            f"{stored}{shared} ({self.format}, compression {self.compression}), {self.seconds:.3g} s{waited}>"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)


@dataclass(eq=False)
class SaveJob:
    """A save: `run` in the caller's thread, or `copy` there and `write` in another one, which sets ``finished``."""

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
        assert self.staged is not None
        written = self.staged.run()
        seconds = time.perf_counter() - self.started
        # The writer may be faster than the caller, and the report has the stall of the caller.
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
        """When this returns, the caller may change the state."""
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
        try:
            self.report = self.run()
        except BaseException as error:
            self.error = error
            # Logged at exit unless somebody asks for the result.
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
        logger.info("%s is not written: a later save took its place in the queue", self.path)
        message = "was not written: a later save took its place in the queue"
        self.abandon(BusyError(message, path=self.path, remedy="save less often"))

    def cancel(self) -> None:
        """Stop the thread that writes, and wait for it. Its error is dropped: the caller has another one."""
        self.stop()
        # The writer may wait for the copy, which will not come.
        self.copied.set()
        self.finished.wait()
        _unreported.discard(self)

    def stop(self) -> None:
        # Read once, here and below: the thread that writes sets it to None at the end.
        if (staged := self.staged) is not None:
            staged.cancel()

    def hurry(self) -> None:
        """Let the thread that writes use all processors, as the caller waits for it now."""
        if (staged := self.staged) is not None:
            staged.hurry()

    def result(self) -> SaveReport:
        if self.error is not None:
            _unreported.discard(self)
            raise self.error
        assert self.report is not None
        return self.report


def run_now(prepare: Callable[[], SaveJob], *, alone: bool) -> SaveJob:
    """Make a save and write it. If the process saves ``alone``, no signal handler can raise in it."""
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

    # With other ranks, an interrupt must end the waiting for them, so it may raise anywhere.
    return shielded(work, stop) if alone else work()


# Failed saves with an error that `result` has not raised yet.
_unreported: set[SaveJob] = set()


def _log_unreported() -> None:
    # A copy: a save may end meanwhile. A forked child has the set of its parent, and must not report it.
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


# The background thread of saves: one save is written at a time, and the next one waits or is queued.
#
# The whole path of a background save is here. `SaveQueue.add` runs in the caller's thread: it copies the state
# (`SaveJob.copy`) and starts a thread. That thread, `SaveQueue._write_jobs`, writes the copy, then whatever was queued
# meanwhile, and ends.

WhenBusy = Literal["wait", "replace"]
# Checks a save and makes the job, with the memory that it may use.
Prepare = Callable[[SaveMemory], SaveJob]


class SaveQueue:
    """The saves of one manager, or the only one of `tensorkeep.save_async`, and their memory."""

    def __init__(
        self, when_busy: WhenBusy, budget: int | None, *, keep_buffers: bool = True, alone: bool = True
    ) -> None:
        self._alone = alone
        # Each copy has an equal part of the budget.
        self._budget = None if budget is None else budget // copies_of(when_busy)
        self._copies = copies_of(when_busy)
        self._keep_buffers = keep_buffers
        self._reset()
        # A forked child does not have the thread that writes; the saves of its parent are not its own.
        reset_in_child(self, SaveQueue._reset)

    def _reset(self) -> None:
        self._memories = [SaveMemory(self._budget) for _ in range(self._copies)]
        self._running: SaveJob | None = None
        self._queued: SaveJob | None = None
        self._ended: list[SaveJob] = []
        # No handler of a signal can raise between taking such a lock and entering its block. A condition, and a
        # function with @contextmanager, are entered by Python code.
        self._lock = threading.Lock()
        self._adding = threading.RLock()  # as it knows its thread

    # Called in the thread that saves

    def one_at_a_time(self) -> AbstractContextManager[object]:
        """Other threads wait until the context ends. Raises UsageError if this thread is saving already."""
        # A signal handler runs in this thread, and an RLock would let it in again, in the middle of an operation.
        if self._adding._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
            text = "save() was called while this thread is in save(), probably by a signal handler"
            raise UsageError(text, remedy="let the handler note the signal, and save after the step: see OnSignal")
        return self._adding

    def wait_for_place(self) -> None:
        if len(self._memories) == 1:
            self.drain()

    def add(self, prepare: Prepare) -> SaveJob:
        """Start a save, or queue it; when this returns, its state may change."""
        # With one memory, the caller has waited: see `wait_for_place`.
        running = self._running
        # A queued save has the other memory. It is replaced only after the new one is known to be valid.
        memory = next(each for each in self._memories if not running or each is not running.memory)
        job = shielded(partial(prepare, memory)) if self._alone else prepare(memory)
        # A state that does not fit is copied while it is written, so it cannot wait in the queue.
        if running is not None and job.state_fits_in_buffers:
            self._enqueue(job)
        else:
            self.drain()
            self._start(job)
        return job

    def run(self, prepare: Prepare) -> SaveJob:
        self.drain()
        return run_now(partial(prepare, self._memories[0]), alone=self._alone)

    def _enqueue(self, job: SaveJob) -> None:
        try:
            with self._lock:
                # Before the copy: the superseded save has the memory that this one needs.
                if self._queued is not None:
                    self._queued.supersede()
                    self._queued = None
            job.copy()
            # The running save may have ended during the copy, and its thread with it.
            with self._lock:
                if self._running is not None:
                    self._queued = job
                    return
        except BaseException as error:
            if not self._has(job):
                job.abandon(error)
            raise
        self._start(job)

    def _has(self, job: SaveJob) -> bool:
        """Whether a save is queued, or was and the thread has taken it: its copies are needed."""
        with self._lock:
            return job is self._queued or job is self._running or job in self._ended

    def _start(self, job: SaveJob) -> None:
        try:
            with self._lock:
                self._running = job
            if job.state_fits_in_buffers:
                # Before the thread starts, which would take memory bandwidth and cores from the copying.
                job.copy()
            # Not a daemon: an interpreter that exits waits for it.
            job.thread = threading.Thread(target=self._write_jobs, args=(job,), name="tensorkeep-save")
            shielded(partial(start_thread, job.thread))
            # What did not fit is copied now, piece by piece, as the writer frees buffers.
            job.copy()
        except BaseException as error:
            self._stop(job, error)
            raise

    def _stop(self, job: SaveJob, error: BaseException) -> None:
        """End a save after its copying or starting failed or was interrupted."""
        # No thread will ever finish it.
        if not job.finished.is_set() and (job.thread is None or job.thread.ident is None):
            job.abandon(error)
        job.cancel()
        with self._lock:
            if self._running is job:
                self._running = None

    # Called in the thread that writes

    def _write_jobs(self, first: SaveJob) -> None:
        job: SaveJob | None = first
        while job is not None:
            # Before `finished` is set: who waits for it may use the memory at once.
            job.write()
            if not self._keep_buffers:
                job.memory.close()
            # The next save is running before this one counts as over: `drain` sees no gap.
            ended, job = job, self._next_after(job)
            ended.finished.set()

    def _next_after(self, ended: SaveJob) -> SaveJob | None:
        with self._lock:
            self._ended.append(ended)
            job, self._queued = self._queued, None
            if job is not None and job.error is not None:
                # It was superseded, perhaps not completely: the save that took its place was interrupted.
                job.abandon(job.error)
                job = None
            self._running = job
            return job

    # Waiting

    def is_busy(self) -> bool:
        return self._running is not None

    def drain(self) -> None:
        """Wait until nothing is running or queued, whether it succeeds or fails."""
        # In a loop: the thread may take a queued save meanwhile.
        while (job := self._running) is not None:
            job.hurry()
            job.finished.wait()
            with self._lock:
                # The thread that writes has the next one by now, unless this one was abandoned.
                if self._running is job:
                    self._running = None
        with self._lock:
            ended = list(self._ended)
        for job in ended:
            job.finished.wait()

    def raise_failure(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for position, job in enumerate(ended):
            job.finished.wait()
            if job in _unreported:
                with self._lock:
                    # The later ones are raised by later calls, one error at a time.
                    self._ended = ended[position + 1 :] + self._ended
                job.result()

    def close(self) -> None:
        for memory in self._memories:
            memory.close()


def copies_of(when_busy: str, *, ranks: bool = False) -> int:
    """How many copies of a state exist at once; UsageError for an unknown ``when_busy``."""
    # With ranks, saves wait: on one rank a save may have begun that another rank would replace.
    copies = {"wait": 1} if ranks else {"wait": 1, "replace": 2}
    if when_busy not in copies:
        remedy = 'with group=, give "wait"' if ranks else 'give "wait" or "replace"'
        raise UsageError(f"when_busy is {when_busy!r}", remedy=remedy)
    return copies[when_busy]
