"""The background thread of saves: one save is written at a time, and the next one waits or is queued.

The whole path of a background save is here. `SaveQueue.add` runs in the caller's thread: it copies the state
(`SaveJob.copy`) and starts a thread. That thread, `SaveQueue._write_jobs`, writes the copy, then whatever was queued
meanwhile, and ends.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

from tensorkeep.checkpoint.forking import reset_in_child
from tensorkeep.checkpoint.save.job import SaveJob, run_now
from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.errors import UsageError
from tensorkeep.io.threads import shielded, start_thread

WhenBusy = Literal["wait", "replace"]

Prepare = Callable[[SaveMemory], SaveJob]
"""Checks a save and makes the job, with the memory that it may use."""


class SaveQueue:
    """The saves of one manager, or the only one of `tensorkeep.save_async`, and their memory.

    Saves are added by one thread at a time: see `one_at_a_time`. With ``"wait"`` a save waits until the one before is
    over. With ``"replace"`` it is copied and queued, in place of the one that is queued already; if memory cannot hold
    a second copy, it waits. Each copy then has half of the budget. Without ``keep_buffers`` they are freed after each
    save. Without ``alone`` other ranks save with this process; see `run_now`.
    """

    def __init__(
        self, when_busy: WhenBusy, budget: int | None, *, keep_buffers: bool = True, alone: bool = True
    ) -> None:
        self._alone = alone
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
        """Return a context in which other threads that save wait; UsageError if this thread is saving already."""
        if self._adding._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
            raise UsageError(
                "save() was called while this thread is in save(), probably by a signal handler",
                remedy="let the handler note the signal, and save after the step: see OnSignal",
            )
        return self._adding

    def wait_for_place(self) -> None:
        """Wait until a save can be added, if it has to wait."""
        if len(self._memories) == 1:
            self.drain()

    def add(self, prepare: Prepare) -> SaveJob:
        """Start a save, or queue it; when this returns, its state may change."""
        running = self._running
        # A queued save has the other memory. It is replaced only after the new one is known to be valid.
        memory = next(each for each in self._memories if not running or each is not running.memory)
        job = shielded(partial(prepare, memory)) if self._alone else prepare(memory)
        if running is not None and job.state_fits_in_buffers:
            self._enqueue(job)
        else:
            self.drain()
            self._start(job)
        return job

    def run(self, prepare: Prepare) -> SaveJob:
        """Run a save in this thread."""
        self.drain()
        return run_now(partial(prepare, self._memories[0]), alone=self._alone)

    def _enqueue(self, job: SaveJob) -> None:
        try:
            with self._lock:
                if self._queued is not None:
                    self._queued.supersede()
                    self._queued = None
            job.copy()
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
        """Return whether a save is queued, or was and the thread has taken it: its copies are needed."""
        with self._lock:
            return job is self._queued or job is self._running or job in self._ended

    def _start(self, job: SaveJob) -> None:
        """Copy the state and let a new thread write it."""
        try:
            with self._lock:
                self._running = job
            if job.state_fits_in_buffers:
                # Before the thread starts, which would take memory bandwidth and cores from the copying.
                job.copy()
            # Not a daemon: an interpreter that exits waits for it.
            job.thread = threading.Thread(target=self._write_jobs, args=(job,), name="tensorkeep-save")
            shielded(partial(start_thread, job.thread))
            job.copy()
        except BaseException as error:
            self._stop(job, error)
            raise

    def _stop(self, job: SaveJob, error: BaseException) -> None:
        """End a save whose copying or starting has failed or was interrupted."""
        if not job.finished.is_set() and (job.thread is None or job.thread.ident is None):
            job.abandon(error)
        job.cancel()
        with self._lock:
            if self._running is job:
                self._running = None

    # Called in the thread that writes

    def _write_jobs(self, first: SaveJob) -> None:
        """Write a save, and then what is queued by the time it is over."""
        job: SaveJob | None = first
        while job is not None:
            job.write()
            if not self._keep_buffers:
                job.memory.close()
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
        """Return whether a save is running."""
        return self._running is not None

    def drain(self) -> None:
        """Wait until nothing is running or queued, whether it succeeds or fails."""
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
        """Raise the error of a failed save, if it was not raised before."""
        with self._lock:
            ended, self._ended = self._ended, []
        for position, job in enumerate(ended):
            job.finished.wait()
            if job.has_unreported_error():
                with self._lock:
                    self._ended = ended[position + 1 :] + self._ended
                job.result()

    def close(self) -> None:
        """Free the buffers."""
        for memory in self._memories:
            memory.close()


def copies_of(when_busy: str, *, ranks: bool = False) -> int:
    """Return how many copies of a state there can be at once; UsageError for an unknown ``when_busy``.

    With ``ranks`` saves wait: on one rank a save may have begun that another one would replace.
    """
    copies = {"wait": 1} if ranks else {"wait": 1, "replace": 2}
    if when_busy not in copies:
        remedy = 'with group=, give "wait"' if ranks else 'give "wait" or "replace"'
        raise UsageError(f"when_busy is {when_busy!r}", remedy=remedy)
    return copies[when_busy]
