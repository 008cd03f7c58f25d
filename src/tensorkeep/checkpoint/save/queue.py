"""One save at a time: the next one waits for it, or waits in its place in a queue of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.checkpoint.save.pending import Callback, PendingSave
from tensorkeep.errors import UsageError

WhenBusy = Literal["wait", "replace"]


class _Job(NamedTuple):
    """A save, and what is called when it is durable."""

    pending: PendingSave
    after: Callback


class SaveQueue:
    """The saves of one manager, and the memory that they share.

    Saves are added by one thread at a time; one other thread writes.

    Parameters
    ----------
    when_busy : str
        ``"wait"``: a save waits until the one before is over. ``"replace"``: it is copied and queued, in the place of
        what is queued already; where the memory does not hold a second copy, it waits.
    budget : int, optional
        Bytes; with ``"replace"`` each copy has half of it.
    """

    def __init__(self, when_busy: WhenBusy, budget: int | None) -> None:
        copies = copies_of(when_busy)
        self._memories = [SaveMemory(None if budget is None else budget // copies) for _ in range(copies)]
        self._running: PendingSave | None = None
        self._queued: _Job | None = None
        self._ended: list[PendingSave] = []
        # Entered and left in one step each, which Ctrl-C does not divide; a condition is entered by Python's code.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def make_room(self) -> None:
        """Wait until a save can be added, if it has to wait."""
        if len(self._memories) == 1:
            self.drain()

    def add(self, prepare: Callable[[SaveMemory], PendingSave], after: Callback) -> PendingSave:
        """Start a save, or queue it.

        Parameters
        ----------
        prepare : callable
            Checks and makes it, with the memory that it is given.
        after : callable
            Called in the background when it is durable.
        """
        running = self._running
        # What is queued has the other memory; it makes room only once the new save is known to be in order.
        job = _Job(prepare(next(each for each in self._memories if not running or each is not running.memory)), after)
        if running is not None and job.pending.fits:
            self._enqueue(job)
        else:
            self.drain()
            self._begin(job, job.pending.start)
        return job.pending

    def run(self, prepare: Callable[[SaveMemory], PendingSave], after: Callback) -> PendingSave:
        """Run a save in the caller's thread; see `add`."""
        self.drain()
        pending = prepare(self._memories[0])
        pending.run(after)
        return pending

    def _enqueue(self, job: _Job) -> None:
        try:
            with self._lock:
                if self._queued is not None:
                    self._queued.pending.supersede()
                    self._queued = None
            job.pending.stage()
            with self._lock:
                if self._running is not None:
                    self._queued = job
                    return
        except BaseException as error:
            if self._queued is not job:
                job.pending.give_up(error)
            raise
        self._begin(job, job.pending.spawn)

    def _begin(self, job: _Job, start: Callable[[Callback], None]) -> None:
        try:
            with self._lock:
                self._running = job.pending
            start(partial(self._work, job))
        except BaseException as error:
            job.pending.give_up(error)
            with self._lock:
                if self._running is job.pending and job.pending.done():
                    self._running = None
                self._changed.notify_all()
            raise

    def _work(self, first: _Job) -> None:
        """Write a save, and then what is queued by the time it is over; the life of the writing thread."""
        job: _Job | None = first
        while job is not None:
            pending = job.pending
            pending.execute(job.after)
            job = self._advance(pending)
            pending.announce()

    def _advance(self, over: PendingSave) -> _Job | None:
        with self._lock:
            self._ended.append(over)
            job, self._queued = self._queued, None
            if job is not None and job.pending.done():
                job = None  # it was superseded, and what came in its place was interrupted
            self._running = job.pending if job else None
            self._changed.notify_all()
            return job

    def drain(self) -> None:
        """Wait until nothing is running or queued, whether it failed or not."""
        with self._lock:
            while self._running is not None:
                self._changed.wait()
            ended = list(self._ended)
        for pending in ended:
            pending.settled()

    def raise_failure(self) -> None:
        """Raise the error of a save that is over, if nobody has seen it."""
        with self._lock:
            ended, self._ended = self._ended, []
        for position, pending in enumerate(ended):
            pending.settled()
            if pending.failed():
                with self._lock:
                    self._ended = ended[position + 1 :] + self._ended
                pending.wait()

    def close(self) -> None:
        """Give the memory back."""
        for memory in self._memories:
            memory.close()


def copies_of(when_busy: str) -> int:
    """Return how many copies of a state there can be at once.

    Raises
    ------
    UsageError
        If there is no such way to wait.
    """
    copies = {"wait": 1, "replace": 2}
    if when_busy not in copies:
        raise UsageError(f"when_busy is {when_busy!r}", remedy='give "wait" or "replace"')
    return copies[when_busy]
