"""Tasks on threads: failures, interrupts, and threads that cannot start."""

import os
import signal
import threading
import time
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


def test_ctrl_c_pressed_twice_waits_for_running_tasks() -> None:
    finished = threading.Event()
    started = threading.Event()

    def task() -> None:
        started.set()
        time.sleep(0.6)
        finished.set()

    def press() -> None:
        started.wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.15)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        run([task], 1, Cancellation())
    assert finished.is_set()


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
