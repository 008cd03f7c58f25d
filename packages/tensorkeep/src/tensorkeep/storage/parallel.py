"""Threads: tasks in parallel, calls that no signal handler interrupts, and state that forked children reset."""

import _thread
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from tensorkeep.errors import OutOfMemoryError, UsageError
from tensorkeep.machine import thread_wait_seconds, usable_processors
from tensorkeep.storage.clock import clock

# Forked children have neither the threads nor the usable locks of their parent.

T = TypeVar("T")
# Weak, so that the registry keeps no instance alive.
_resets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def reset_in_child(instance: T, reset: Callable[[T], None]) -> None:
    """Call ``reset(instance)`` in every child that is forked while the instance exists, the newest instance first."""
    _resets[instance] = reset


def _reset_all() -> None:
    for instance, reset in reversed(list(_resets.items())):
        reset(instance)


os.register_at_fork(after_in_child=_reset_all)


# Threads that start or fail in a limited time, and calls that no handler of a signal interrupts.

# A thread that was started begins to run within this time.
THREAD_START_SECONDS = 1.0
# Seconds after which a thread that has not begun is given up, on the busiest machine.
LONGEST_THREAD_START = 30.0
Result = TypeVar("Result")
NO_MORE_THREADS = "end other processes, or raise the limits (ulimit -u and -v, pids.max of the control group)"


class Signal:
    """A flag that threads can wait for. A signal handler that raises inside leaves no lock taken."""

    def __init__(self) -> None:
        # `threading.Event` takes its lock in Python code, where a handler may raise and leave the lock taken for ever.
        # One call takes or frees this lock.
        self._is_set = False
        self._at_fork_reinit()

    def _at_fork_reinit(self) -> None:
        # `threading` calls this in a forked child, where another thread may have held the lock.
        self._gate = threading.Lock()
        if not self._is_set:
            self._gate.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._open()

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError as error:
            if "unlocked" not in str(error):  # it is not open: a handler of a signal has raised this
                raise

    def wait(self, timeout: float | None = None) -> bool:
        # In turns: an interrupt may keep the lock from being opened, for this thread or for others that wait.
        while not self._is_set:
            if self._gate.acquire(timeout=THREAD_START_SECONDS if timeout is None else timeout):
                # Pass the lock on to the next thread that waits.
                self._open()
            elif timeout is not None:
                break
        return self._is_set


class _Started(Signal):
    """The event that `threading.Thread.start` waits for, with a limit: a thread without memory never sets it."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(LONGEST_THREAD_START if timeout is None else timeout):
            raise MemoryError("a new thread does not begin")
        return True


def start_thread(thread: threading.Thread) -> None:
    """Raises OutOfMemoryError if the system refuses another thread, or has no memory for one."""
    vars(thread)["_started"] = _Started()
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise _no_more_threads(error) from error


def _no_more_threads(error: BaseException) -> BaseException:
    """Return the error for a thread that was not started; the error itself if a signal handler has raised it."""
    if not isinstance(error, MemoryError) and not (type(error) is RuntimeError and "new thread" in str(error)):
        return error
    if "shutdown" in str(error):
        return UsageError(
            "the interpreter is exiting, and starts no more threads",
            remedy="save and load before the program ends, not in a function of atexit",
        )
    return OutOfMemoryError(f"the system starts no more threads ({error})", remedy=NO_MORE_THREADS)


class _Call(Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        self.finished = Signal()
        self._function = function
        self._context = contextvars.copy_context()  # options of torch are context variables
        self._cancels: list[Callable[[], object]] = []
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._is_taken = False
        self._result: list[Result] = []
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            start_thread(threading.Thread(target=self._run, name="tensorkeep-supervisor", daemon=True))
        except BaseException as error:
            # `start` itself may fail for lack of memory, and the main thread waits for the result.
            self.give_up(error)

    def _run(self) -> None:
        if self._take():
            _local.call = self
            try:
                self._result.append(self._context.run(self._function))
            except BaseException as error:
                self._failure = error
            finally:
                # The function holds the state, which must be freed with the call.
                del self._function
                self.finished.set()

    def _take(self) -> bool:
        # Only the first of the new thread and `give_up` wins; the function never runs after it was given up.
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
        return not was_taken

    def nested(self, function: Callable[[], Result], cancel: Callable[[], object]) -> Result:
        with self._lock:
            self._cancels.append(cancel)
            # A cancellation that came before this call began is for this call.
            is_cancelled, self._is_cancelled = self._is_cancelled, False
        try:
            if is_cancelled:
                cancel()
            return function()
        finally:
            self._cancels.remove(cancel)

    def cancel(self) -> None:
        """Cancel the nested calls that run, or else the next one; not those that clean up afterwards."""
        with self._lock:
            cancels = [*self._cancels]
            self._is_cancelled = not cancels
        for cancel in cancels:
            cancel()

    def give_up(self, error: BaseException) -> bool:
        """Let `result` raise an error if no thread has begun to call the function; return whether this is the case."""
        if not self._take():
            return False
        self._failure = error
        self.finished.set()
        return True

    def result(self) -> Result:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
            return self._result.pop()
        finally:
            del failure  # its traceback has this frame: the cycle would keep the state until a garbage collection


# Has the `_Call` that a thread was started for.
_local = threading.local()


def shielded(function: Callable[[], Result], cancel: Callable[[], object] = lambda: None) -> Result:
    """Call a function in another thread, where no signal handler can raise in it.

    On an interrupt, ``cancel`` is called, possibly several times, and the interrupt is raised when the function has
    ended. In other threads than the main one the function is called directly; ``cancel`` is called if the main thread
    is interrupted.
    """
    # Python calls signal handlers in the main thread only, between any two instructions, and many raise:
    # KeyboardInterrupt, SystemExit, the TimeoutError of an alarm. A new file or lock would be lost before its owner has
    # a reference.
    if threading.get_ident() != threading.main_thread().ident:
        outer: _Call[Result] | None = getattr(_local, "call", None)
        return function() if outer is None else outer.nested(function, cancel)
    call = _Call(function)
    interrupted: BaseException | None = None
    waited, is_new = 0.0, False
    try:
        # Not `Thread.start`, which a handler that raises in it leaves half done; so it is called by a thread.
        _thread.start_new_thread(call.start, ())
    except BaseException as error:
        interrupted = _no_more_threads(error)
    # Each round is inside of try: a second Ctrl-C while the first one is handled must not end the waiting.
    while True:
        try:
            if interrupted:
                cancel()
                if is_new:
                    is_new = False
                    call.cancel()
                call.give_up(interrupted)
            # With a timeout, so that a thread that never begins is noticed.
            if call.finished.wait(timeout=THREAD_START_SECONDS):
                break
            waited += THREAD_START_SECONDS
            if waited >= LONGEST_THREAD_START:
                call.give_up(_no_more_threads(MemoryError("a new thread does not begin")))
        except BaseException as error:
            interrupted = interrupted or error
            is_new = True
    try:
        if interrupted:
            raise interrupted
        return call.result()
    finally:
        del call, interrupted  # as in `result`


# Running tasks on a few threads, in order, until done, a failure or Ctrl-C.

# Called with the bytes done and the total bytes, from any thread, one call at a time.
Progress = Callable[[int, int], None]
# How often a wait checks for cancellation.
POLL_SECONDS = 0.1


def default_threads() -> int:
    """Twice the usable processors, between 2 and 8: half the threads wait for the disk."""
    return max(2, min(8, 2 * len(usable_processors())))


class ForkSafeSemaphore:
    """A bounded semaphore, ``permit``, of ``count()`` permits; in a forked child, all permits are free again."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self.reset()
        # In a forked child, permits that other threads held would never be released.
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.permit = threading.BoundedSemaphore(self._count())


_coding = ForkSafeSemaphore(lambda: len(usable_processors()))
_coding_beside = ForkSafeSemaphore(lambda: max(1, len(usable_processors()) // 2))


class Cancelled(Exception):
    """Raised in tasks that wait for a task that failed; by `run` only if the main thread was interrupted."""


class Cancellation(Signal):
    cancel = Signal.set

    def check(self) -> None:
        if self.is_set():
            raise Cancelled


class Pace:
    """Limits the threads that code at once. While ``beside`` is set, the caller trains: half as many, with pauses."""

    # A thread pauses after it has waited this long for a processor, per second of coding.
    _WAITED = 0.2

    # Seconds of pausing for each second of coding: a quarter of a processor is used, and steps are hardly slower.
    _PAUSE = 3.0

    _LONGEST_PAUSE = 0.1

    def __init__(self, cancellation: Cancellation) -> None:
        self.beside = threading.Event()
        self._cancellation = cancellation

    @contextmanager
    def coding(self) -> Iterator[None]:
        # As many code at once as there are processors: more would push each other's data out of the caches.
        if not self.beside.is_set():
            with _coding.permit:
                yield
            return
        with _coding_beside.permit:
            # The kernel's own measure of contention, which other processes cause as well.
            waited, ran = thread_wait_seconds(own=True), clock().thread_time()
            yield
            waited, ran = thread_wait_seconds(own=True) - waited, clock().thread_time() - ran
            if waited > self._WAITED * ran and self.beside.is_set():
                # A lower priority would also leave processors to the training. But a thread that loses its processor
                # while it holds the interpreter's lock stops the training with it.
                self._cancellation.wait(min(self._PAUSE * ran, self._LONGEST_PAUSE))


class Order:
    def __init__(self, cancellation: Cancellation) -> None:
        self._next = 0
        self._changed = threading.Condition()
        self._cancellation = cancellation

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all lower numbers have passed. A task that raises in the block must cancel the others."""
        with self._changed:
            while self._next != number:
                self._cancellation.check()
                self._changed.wait(timeout=POLL_SECONDS)
        # Not in try/finally: after an error, the next task must not pass.
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()


class Meter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._progress is not None:
            # The callback is called under the lock, so that one call at a time sees a growing sum.
            with self._lock:
                self._done += count
                self._progress(self._done, self.total)


def answer_within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns in a thread; TimeoutError if it takes longer, which it then does unnoticed."""
    answers: SimpleQueue[T | BaseException] = SimpleQueue()

    def work() -> None:
        # A thread blocked in a system call cannot be interrupted; it is a daemon, and its late answer is dropped.
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

    After the first exception, or an interrupt such as Ctrl-C, no further task starts. The running tasks end before the
    exception is raised, because tasks may use files that the caller closes afterwards.
    """
    workers = _Workers(tasks, threads, cancellation or Cancellation())
    # The running tasks end first: they may use files that the caller closes afterwards.
    shielded(workers.supervise, workers.stop)
    failure, workers.failure = workers.failure, None
    try:
        if failure:
            raise failure
    finally:
        del failure  # its traceback has this frame: the cycle would keep the tasks until a garbage collection
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
        self.is_stopped = True
        self.cancellation.cancel()

    def supervise(self) -> None:
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
            # Workers that have started wait for this, also if a later one failed to start.
            for worker in workers:
                worker.join()
            if not self._is_over and not self.failure:
                self.failure = OutOfMemoryError("all threads have ended before their work", remedy=NO_MORE_THREADS)

    def _work(self) -> None:
        # Threads get their memory before tasks fill the rest.
        self._all_started.wait()
        try:
            while (task := self._next()) is not None:
                task()
            self._is_over = True
        # Another task has failed, and its error is the one to raise.
        except Cancelled:
            self._is_over = True
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            # The first error counts; the others follow from it.
            self.failure = self.failure or error
        self.cancellation.cancel()

    def _next(self) -> Callable[[], None] | None:
        self.cancellation.check()
        with self._lock:
            return next(self._tasks, None)
