"""Running tasks on a few threads, in order, until done, failed or interrupted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, from any thread, one call at a time."""


def default_threads() -> int:
    """Return twice the cores that this process may use, between 2 and 8: half the threads wait for the disk."""
    return max(2, min(8, 2 * len(os.sched_getaffinity(0))))


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
    crew = _Crew(tasks, cancellation or Cancellation())
    workers = [threading.Thread(target=crew.work, name=f"holdfast-{i}", daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        crew.wait(threads)
    except BaseException:
        crew.cancellation.cancel()
        raise
    finally:
        for worker in workers:
            worker.join()
    if crew.failure is not None:
        raise crew.failure


class _Crew:
    def __init__(self, tasks: Iterable[Callable[[], None]], cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.failure: BaseException | None = None
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._finished = threading.Semaphore(0)

    def wait(self, threads: int) -> None:
        for _ in range(threads):
            self._finished.acquire()

    def work(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
        except Cancelled:
            pass
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            self.cancellation.cancel()
        finally:
            self._finished.release()

    def _next(self) -> Callable[[], None] | None:
        self.cancellation.check()
        with self._lock:
            return next(self._tasks, None)
