"""Tasks on threads: failures, interrupts, and threads that cannot start."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn
from unittest import mock

import pytest

from tensorkeep.io.parallel import Cancellation, run


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
    finished = threading.Event()
    started = threading.Event()

    def task() -> None:
        started.set()
        time.sleep(0.6)
        finished.set()

    def press() -> None:
        started.wait()
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.15)

    before = signal.signal(number, handler)
    try:
        threading.Thread(target=press, daemon=True).start()
        with pytest.raises(raised):
            run([task], 1, Cancellation())
        assert finished.is_set()
    finally:
        signal.signal(number, before)


def test_no_thread_is_left_if_one_cannot_start() -> None:
    real = threading.Thread.start
    calls = []

    def start(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) == 3:
            raise RuntimeError("can't start new thread")
        real(thread)

    with mock.patch.object(threading.Thread, "start", start), pytest.raises(RuntimeError, match="new thread"):
        run([lambda: time.sleep(0.1)] * 10, 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorkeep")]
