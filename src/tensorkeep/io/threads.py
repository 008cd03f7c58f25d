"""Threads that start or fail in a limited time, and calls that no handler of a signal interrupts."""

import _thread
import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tensorkeep.errors import OutOfMemoryError, UsageError

THREAD_START_SECONDS = 1.0
"""A thread that was started begins to run within this time."""

LONGEST_THREAD_START = 30.0
"""Seconds after which a thread that has not begun is given up, on the busiest machine."""

Result = TypeVar("Result")

NO_MORE_THREADS = "end other processes, or raise the limits (ulimit -u and -v, pids.max of the control group)"


class Signal:
    """A flag that threads can wait for.

    `threading.Event` takes its lock in Python code: a handler of a signal that raises there leaves the lock taken for
    ever, and the next call waits for it. Here a plain lock, which one call takes, is free when the flag is set.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._at_fork_reinit()

    def _at_fork_reinit(self) -> None:
        """Replace the lock; `threading` calls this in a forked child, where another thread may have held it."""
        self._gate = threading.Lock()
        if not self._is_set:
            self._gate.acquire()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag."""
        self._is_set = True
        self._open()

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError as error:
            if "unlocked" not in str(error):  # it is not open: a handler of a signal has raised this
                raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most for so long; return whether it is."""
        # In turns: an interrupt may keep the lock from being opened, for this thread or for others that wait.
        while not self._is_set:
            if self._gate.acquire(timeout=THREAD_START_SECONDS if timeout is None else timeout):
                self._open()
            elif timeout is not None:
                break
        return self._is_set


class _Started(Signal):
    """The event that `threading.Thread.start` waits for, with a limit.

    A new thread that has no memory to begin with ends without setting it, and the wait would never end.
    """

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(LONGEST_THREAD_START if timeout is None else timeout):
            raise MemoryError("a new thread does not begin")
        return True


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raises OutOfMemoryError if the system has no more of them, or no memory for another one."""
    vars(thread)["_started"] = _Started()
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise _no_more_threads(error) from error


def _no_more_threads(error: BaseException) -> BaseException:
    """Return the error for a thread that was not started; the error itself if a handler of a signal has raised it."""
    if not isinstance(error, MemoryError) and not (type(error) is RuntimeError and "new thread" in str(error)):
        return error
    if "shutdown" in str(error):
        return UsageError(
            "the interpreter is exiting, and starts no more threads",
            remedy="save and load before the program ends, not in a function of atexit",
        )
    return OutOfMemoryError(f"the system starts no more threads ({error})", remedy=NO_MORE_THREADS)


class _Call(Generic[Result]):
    """A function that another thread calls, unless it was given up before."""

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
        """Let a `threading.Thread` call the function."""
        try:
            start_thread(threading.Thread(target=self._run, name="tensorkeep-supervisor", daemon=True))
        except BaseException as error:
            self.give_up(error)

    def _run(self) -> None:
        if self._take():
            _local.call = self
            try:
                self._result.append(self._context.run(self._function))
            except BaseException as error:
                self._failure = error
            finally:
                del self._function
                self.finished.set()

    def _take(self) -> bool:
        """Return whether nobody else has taken the call."""
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
        return not was_taken

    def nested(self, function: Callable[[], Result], cancel: Callable[[], object]) -> Result:
        """Call a function that `cancel` of this call cancels, too, in the thread of this call."""
        with self._lock:
            self._cancels.append(cancel)
            is_cancelled, self._is_cancelled = self._is_cancelled, False
        try:
            if is_cancelled:
                cancel()
            return function()
        finally:
            self._cancels.remove(cancel)

    def cancel(self) -> None:
        """Cancel the nested calls that run, or else the next one; not those that clean up after it."""
        with self._lock:
            cancels = [*self._cancels]
            self._is_cancelled = not cancels
        for cancel in cancels:
            cancel()

    def give_up(self, error: BaseException) -> bool:
        """Let `result` raise an error, and return True, if no thread has begun to call the function, nor will."""
        if not self._take():
            return False
        self._failure = error
        self.finished.set()
        return True

    def result(self) -> Result:
        """Return what the function has returned, or raise what it has raised."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
            return self._result.pop()
        finally:
            del failure  # whose traceback has this frame: a cycle would keep the state until it is collected


_local = threading.local()
"""Has the `_Call` that a thread was started for."""


def shielded(function: Callable[[], Result], cancel: Callable[[], object] = lambda: None) -> Result:
    """Call a function in another thread, where no handler of a signal can raise in it; return its result.

    Python calls the handlers of signals in the main thread, between any two of its instructions, and many of them
    raise: KeyboardInterrupt of Ctrl-C, SystemExit, the TimeoutError of an alarm. A file that was just opened, or a
    lock that was just taken, would be lost before its owner knows of it. So the main thread only waits. If it is
    interrupted, it calls ``cancel``, which may be called again and again, waits until the function has ended, and
    raises the interrupt. A caller in another thread, which no handler interrupts, calls the function itself; ``cancel``
    is called then, too, if that thread is one for which the main thread waits here.
    """
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
    while True:
        try:
            if interrupted:
                cancel()
                if is_new:
                    is_new = False
                    call.cancel()
                call.give_up(interrupted)
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
