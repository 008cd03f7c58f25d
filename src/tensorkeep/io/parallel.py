"""Running tasks on a few threads, in order, until done, a failure or Ctrl-C."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

from tensorkeep.errors import OutOfMemoryError
from tensorkeep.io.clock import clock
from tensorkeep.io.threads import NO_MORE_THREADS, Signal, shielded, start_thread
from tensorkeep.machine import thread_wait_seconds, usable_processors

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, from any thread, one call at a time."""

T = TypeVar("T")

POLL_SECONDS = 0.1
"""Interval at which a wait checks for cancellation."""


def default_threads() -> int:
    """Return twice the processors that this process may use, between 2 and 8: half the threads wait for the disk."""
    return max(2, min(8, 2 * len(usable_processors())))


class Permits:
    """A bounded number of permits, which threads hold by ``with permits.permit``; ``count`` returns how many."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self.reset()
        # In a forked child, permits that other threads held would never be released.
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Make all permits free."""
        self.permit = threading.BoundedSemaphore(self._count())


_coding = Permits(lambda: len(usable_processors()))
_coding_beside = Permits(lambda: max(1, len(usable_processors()) // 2))


class Cancelled(Exception):
    """Raised in tasks that wait for a task that failed; by `run` only where the main thread was interrupted."""


class Cancellation:
    """A flag that tasks which wait for each other check."""

    def __init__(self) -> None:
        self._set = Signal()

    def cancel(self) -> None:
        """Set the flag."""
        self._set.set()

    def check(self) -> None:
        """Raise `Cancelled` if the flag is set."""
        if self._set.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Wait until the flag is set, at most for so long."""
        self._set.wait(seconds)


class Pace:
    """How the threads of one save share the processors while they code.

    As many code at once as there are processors: more would only push each other's data out of the caches. While
    ``beside`` is set, the caller continues to train: then half as many code, and each one that had to wait for a
    processor pauses. A lower priority would do the same, but a thread that loses its processor while it holds the
    interpreter's lock would stop the training with it.
    """

    _WAITED = 0.2
    """Seconds of waiting for each second of coding from which on a thread pauses."""

    _PAUSE = 3.0
    """Seconds of pausing for each second of coding: a quarter of a processor is used, and steps are hardly slower."""

    _LONGEST_PAUSE = 0.1

    def __init__(self, cancellation: Cancellation) -> None:
        self.beside = threading.Event()
        self._cancellation = cancellation

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Code in the block, when it is this thread's turn."""
        if not self.beside.is_set():
            with _coding.permit:
                yield
            return
        with _coding_beside.permit:
            waited, ran = thread_wait_seconds(own=True), clock().thread_time()
            yield
            waited, ran = thread_wait_seconds(own=True) - waited, clock().thread_time() - ran
            if waited > self._WAITED * ran and self.beside.is_set():
                self._cancellation.wait(min(self._PAUSE * ran, self._LONGEST_PAUSE))


class Order:
    """Lets tasks pass a point one at a time, in the order of their numbers."""

    def __init__(self, cancellation: Cancellation) -> None:
        self._next = 0
        self._changed = threading.Condition()
        self._cancellation = cancellation

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all tasks with lower numbers have passed; the end of the block lets the next one pass.

        A task that raises in the block must cancel the tasks that wait for it.
        """
        with self._changed:
            while self._next != number:
                self._cancellation.check()
                self._changed.wait(timeout=POLL_SECONDS)
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()


class Meter:
    """Adds up bytes from many threads and reports the sum to a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Report that ``count`` more bytes are done."""
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self.total)


def answer_within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns in a thread; TimeoutError if it takes longer, which it then does unnoticed.

    Examples
    --------
    >>> answer_within(60, lambda: 7)
    7
    """
    answers: SimpleQueue[T | BaseException] = SimpleQueue()

    def work() -> None:
        try:
            answers.put(function())
        except BaseException as error:
            answers.put(error)

    start_thread(threading.Thread(target=work, name="tensorkeep-question", daemon=True))
    try:
        answer = answers.get(timeout=clock().patience(seconds))
    except Empty:
        raise TimeoutError(f"no answer for {seconds:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def run(tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation | None = None) -> None:
    """Call every task on ``threads`` threads; tasks start in order.

    After the first exception, or a signal whose handler raises one (Ctrl-C), no further task starts, and those that
    run are waited for before it is raised: tasks may use files that the caller closes afterwards.

    Examples
    --------
    >>> squares = [0] * 4
    >>> def square(number):
    ...     squares[number] = number**2
    >>> run([lambda n=n: square(n) for n in range(4)], threads=2)
    >>> squares
    [0, 1, 4, 9]
    """
    workers = _Workers(tasks, threads, cancellation or Cancellation())
    shielded(workers.supervise, workers.stop)
    failure, workers.failure = workers.failure, None
    try:
        if failure:
            raise failure
    finally:
        del failure  # whose traceback has this frame: a cycle would keep what the tasks use until it is collected
    if workers.is_stopped:
        raise Cancelled


class _Workers:
    def __init__(self, tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.failure: BaseException | None = None
        self.is_stopped = False
        self._all_started = Signal()
        self._is_over = False
        self._tasks = iter(tasks)
        self._threads = max(1, threads)  # of no tasks, callers may want none
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Let no further task start, as the main thread was interrupted; `run` raises Cancelled."""
        self.is_stopped = True
        self.cancellation.cancel()

    def supervise(self) -> None:
        """Start the threads and wait for them."""
        workers: list[threading.Thread] = []
        try:
            for number in range(self._threads):
                worker = threading.Thread(target=self._work, name=f"tensorkeep-{number}", daemon=True)
                start_thread(worker)
                workers.append(worker)
        except BaseException as error:  # the system has no more threads
            self._fail(error)
        finally:
            self._all_started.set()
            for worker in workers:
                worker.join()
            if not self._is_over and not self.failure:
                self.failure = OutOfMemoryError("all threads have ended before their work", remedy=NO_MORE_THREADS)

    def _work(self) -> None:
        # The threads take their memory before the tasks take the rest of it.
        self._all_started.wait()
        try:
            while (task := self._next()) is not None:
                task()
            self._is_over = True
        except Cancelled:
            self._is_over = True
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
        self.cancellation.cancel()

    def _next(self) -> Callable[[], None] | None:
        self.cancellation.check()
        with self._lock:
            return next(self._tasks, None)
