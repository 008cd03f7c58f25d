"""Tasks on threads: failures, interrupts, threads that cannot start; how many code at once, and when they pause."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn
from unittest import mock

import pytest

from faults.injection import in_child
from tensorkeep.errors import OutOfMemoryError, UsageError
from tensorkeep.storage import parallel
from tensorkeep.storage.clock import Clock, use_clock
from tensorkeep.storage.parallel import Cancellation, run


def test_the_first_failure_stops_the_other_tasks_and_is_raised() -> None:
    done = []

    def fail() -> None:
        raise ValueError("broken")

    tasks = [lambda: done.append(1), fail] + [lambda: done.append(2)] * 1000
    with pytest.raises(ValueError, match="broken"):
        run(tasks, 2)
    assert len(done) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorkeep")]


def exits(*_: object) -> NoReturn:
    sys.exit(3)


@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [(signal.SIGINT, signal.default_int_handler, KeyboardInterrupt), (signal.SIGTERM, exits, SystemExit)],
)
def test_signals_that_raise_twice_wait_for_running_tasks(
    number: signal.Signals, handler: Callable[..., object], raised: type[BaseException]
) -> None:
    """Otherwise tasks would continue, with files that the caller closes or whose descriptors others get."""
    started, pressed, finished = (threading.Event() for _ in range(3))
    handled = threading.Semaphore(0)

    def task() -> None:
        started.set()
        assert pressed.wait(60)
        finished.set()

    def press() -> None:
        started.wait()
        for _ in range(2):
            os.kill(os.getpid(), number)
            handled.acquire(timeout=60)
        pressed.set()

    def counted(*arguments: Any) -> None:
        handled.release()
        handler(*arguments)

    before = signal.signal(number, counted)
    try:
        threading.Thread(target=press, daemon=True).start()
        with pytest.raises(raised):
            run([task], 1, Cancellation())
        assert finished.is_set()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("reason", "error"), [("new thread", OutOfMemoryError), ("new thread: shutdown", UsageError)])
def test_no_thread_is_left_if_one_cannot_start(reason: str, error: type[Exception]) -> None:
    real = threading.Thread.start
    calls = []

    def start(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) == 3:
            raise RuntimeError(reason)
        real(thread)

    with mock.patch.object(threading.Thread, "start", start), pytest.raises(error, match="starts no more threads"):
        run([lambda: None] * 10, 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorkeep")]


@pytest.mark.parametrize("place", ["_set_native_id", "run"])
def test_threads_without_memory_are_an_error_and_not_a_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("LONGEST_THREAD_START", "THREAD_START_SECONDS"):
        monkeypatch.setattr(parallel, name, 0.05)
    for module, hook in ((sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, hook, lambda _: None)
    monkeypatch.setattr(threading.Thread, place, mock.Mock(side_effect=MemoryError))
    with pytest.raises(OutOfMemoryError):
        run([lambda: pytest.fail("it ran")], 2)
    threading._limbo.clear()  # type: ignore[attr-defined]


@pytest.mark.integration
def test_a_thread_that_forks_is_alive_in_the_child() -> None:
    def child() -> None:
        assert threading.current_thread().is_alive()

    codes: list[int] = []
    run([lambda: codes.append(in_child(child))], 1)
    assert codes == [0]


class Coding(Clock):
    """A thread that runs for some seconds between two looks at the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = 0.0
        self._step = seconds

    def thread_time(self) -> float:
        self._seconds += self._step
        return self._seconds


class Pauses(Cancellation):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)


def pace_of(beside: bool, cancellation: Cancellation | None = None) -> parallel.Pace:
    pace = parallel.Pace(cancellation or Cancellation())
    if beside:
        pace.beside.set()
    return pace


def code(pace: parallel.Pace) -> None:
    with pace.coding():
        pass


@pytest.mark.parametrize(
    ("beside", "ran", "waited", "pauses"),
    [
        (True, 0.01, 1.0, [0.03]),
        (True, 1.0, 1.0, [0.1]),  # the longest
        (True, 1.0, 0.1, []),
        (True, 0.01, 0.0, []),
        (False, 0.01, 1.0, []),
    ],
)
def test_a_thread_that_waited_for_a_processor_beside_training_pauses(
    monkeypatch: pytest.MonkeyPatch, beside: bool, ran: float, waited: float, pauses: list[float]
) -> None:
    times = iter([5.0, 5.0 + waited])
    monkeypatch.setattr(parallel, "thread_wait_seconds", lambda *, own: next(times))
    cancellation = Pauses()
    with use_clock(Coding(ran)):
        code(pace_of(beside, cancellation))
    assert cancellation.seconds == pytest.approx(pauses)


@pytest.mark.parametrize("beside", [False, True])
def test_coding_that_fails_lets_others_code(beside: bool) -> None:
    pace = pace_of(beside)
    for _ in range(100):
        with pytest.raises(ZeroDivisionError), pace.coding():
            _ = 1 / 0
    code(pace)


def test_half_of_the_processors_code_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_processors", lambda: set(range(8)))
    parallel._coding.reset()
    parallel._coding_beside.reset()
    try:
        for beside, most in ((False, 8), (True, 4)):
            pace = pace_of(beside)
            with ExitStack() as stack:
                for _ in range(most):
                    stack.enter_context(pace.coding())
                one_more = threading.Thread(target=code, args=(pace,), daemon=True)
                one_more.start()
                one_more.join(0.05)
                assert one_more.is_alive(), "more threads code than may"
            one_more.join()
    finally:
        monkeypatch.undo()
        parallel._coding.reset()
        parallel._coding_beside.reset()
