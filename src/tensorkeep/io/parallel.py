"""Running tasks on a few threads, in order, until done, a failure or Ctrl-C."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tensorkeep.io.clock import clock
from tensorkeep.machine import thread_wait_seconds, usable_processors

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, from any thread, one call at a time."""

POLL_SECONDS = 0.1
"""Interval at which a wait checks for cancellation."""

THREAD_START_SECONDS = 1.0
"""A thread that was started begins to run within this time."""


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
    """Raised in tasks that wait for a task that failed; `run` never raises it."""


class Cancellation:
    """A flag that tasks which wait for each other check."""

    def __init__(self) -> None:
        self._set = threading.Event()

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


def run(tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation | None = None) -> None:
    """Call every task on ``threads`` threads; tasks start in order.

    After the first exception, or a signal whose handler raises one (Ctrl-C), no further task starts, and those that
    run are waited for before it is raised.

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
    # Handlers of signals raise in the main thread only, at any instruction: KeyboardInterrupt of Ctrl-C, SystemExit of
    # a program's own handler. So another thread starts the workers and waits for them, and the main thread only waits
    # for that one, however often it is interrupted: tasks may use files that the caller closes afterwards.
    supervisor = threading.Thread(target=workers.supervise, name="tensorkeep-supervisor", daemon=True)
    interrupted: BaseException | None = None
    try:
        supervisor.start()
    except BaseException as error:
        interrupted = error
    while True:
        try:
            if interrupted:
                workers.cancellation.cancel()
            # An interrupt just before the supervisor began keeps it from ever starting.
            if workers.finished.wait(timeout=THREAD_START_SECONDS) or supervisor.ident is None:
                break
        except BaseException as error:
            interrupted = interrupted or error
    if failure := interrupted or workers.failure:
        raise failure


class _Workers:
    def __init__(self, tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self._tasks = iter(tasks)
        self._threads = threads
        self._lock = threading.Lock()

    def supervise(self) -> None:
        """Start the threads and wait for them."""
        workers: list[threading.Thread] = []
        try:
            for number in range(self._threads):
                worker = threading.Thread(target=self._work, name=f"tensorkeep-{number}", daemon=True)
                worker.start()
                workers.append(worker)
        except BaseException as error:  # the system has no more threads
            self._fail(error)
        finally:
            for worker in workers:
                worker.join()
            self.finished.set()

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
        except Cancelled:
            pass
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
