"""Running tasks on a few threads, in order, until done, failed or interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tensorkeep.machine import usable_processors

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, from any thread, one call at a time."""


POLL_SECONDS = 0.1
"""Seconds after which a wait that can be cancelled looks whether it was."""


def default_threads() -> int:
    """Return twice the cores that this process may use, between 2 and 8: half the threads wait for the disk."""
    return max(2, min(8, 2 * len(usable_processors())))


class Cancelled(Exception):
    """Raised in tasks that wait for a task that failed; never seen by callers of `run`."""


class Cancellation:
    """A flag that tasks which wait for each other must look at."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def cancel(self) -> None:
        self._set.set()

    def check(self) -> None:
        if self._set.is_set():
            raise Cancelled


class Order:
    """Lets tasks pass a point one by one, in the order of their numbers."""

    def __init__(self, cancellation: Cancellation) -> None:
        self._next = 0
        self._changed = threading.Condition()
        self._cancellation = cancellation

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all tasks of lower numbers have passed; the end of the block lets the next one pass.

        A task that raises in it must cancel the others, which wait for it.
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
    """Adds up bytes from many threads and hands them to a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self.total)


def run(tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation | None = None) -> None:
    """Call every task on ``threads`` threads; tasks start in order.

    The first exception stops the start of further tasks, waits for those that run, and is raised. An interrupt
    (Ctrl-C) does the same. When this returns or raises, no task is running.
    """
    crew = _Crew(tasks, threads, cancellation or Cancellation())
    # Interrupts reach the main thread alone, at any instant. So another one starts the threads and waits for them, and
    # the main thread only waits for that one: to the end, however often Ctrl-C is pressed, because tasks may use files
    # that the caller is about to close.
    foreman = threading.Thread(target=crew.lead, name="tensorkeep-foreman", daemon=True)
    interrupted: KeyboardInterrupt | None = None
    try:
        foreman.start()
    except KeyboardInterrupt as error:
        interrupted = error
    while True:
        try:
            if interrupted:
                crew.cancellation.cancel()
            # An interrupt may have come just before the foreman began; then it never will.
            if crew.finished.wait(timeout=THREAD_START_SECONDS) or foreman.ident is None:
                break
        except KeyboardInterrupt as error:
            interrupted = error
    if failure := interrupted or crew.failure:
        raise failure


THREAD_START_SECONDS = 1.0
"""Seconds within which a thread that was started begins to run."""


class _Crew:
    def __init__(self, tasks: Iterable[Callable[[], None]], threads: int, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self._tasks = iter(tasks)
        self._threads = threads
        self._lock = threading.Lock()

    def lead(self) -> None:
        workers: list[threading.Thread] = []
        try:
            for number in range(self._threads):
                worker = threading.Thread(target=self.work, name=f"tensorkeep-{number}", daemon=True)
                worker.start()
                workers.append(worker)
        except BaseException as error:  # there can be no more threads
            self._fail(error)
        finally:
            for worker in workers:
                worker.join()
            self.finished.set()

    def work(self) -> None:
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
