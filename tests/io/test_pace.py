"""How many threads code at once, and when they pause beside training."""

import threading
import time
from contextlib import ExitStack

import pytest

from tensorkeep.io import parallel


def wait_is_counted(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the calling thread have waited for a processor for so long by each time that it is asked."""
    times = iter(seconds)
    monkeypatch.setattr(parallel, "thread_wait_seconds", lambda *, own: next(times))


class Pauses(parallel.Cancellation):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_that_waited_for_a_processor_beside_training_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_is_counted(monkeypatch, 1.0, 2.0)
    pauses = Pauses()
    pace = parallel.Pace(pauses)
    pace.beside.set()
    with pace.coding():
        busy(0.002)
    assert len(pauses.seconds) == 1
    assert 0.006 <= pauses.seconds[0] <= 0.1


@pytest.mark.parametrize(("beside", "waits"), [(False, (1.0, 2.0)), (True, (1.0, 1.0))])
def test_a_thread_does_not_pause_otherwise(
    beside: bool, waits: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_is_counted(monkeypatch, *waits)
    pauses = Pauses()
    pace = parallel.Pace(pauses)
    if beside:
        pace.beside.set()
    with pace.coding():
        time.sleep(0.01)  # waiting for anything else than a processor does not count
        busy(0.002)
    assert pauses.seconds == []


@pytest.mark.parametrize("beside", [False, True])
def test_coding_that_fails_lets_others_code(beside: bool) -> None:
    pace = parallel.Pace(parallel.Cancellation())
    if beside:
        pace.beside.set()
    for _ in range(100):
        with pytest.raises(ZeroDivisionError), pace.coding():
            _ = 1 / 0
    with pace.coding():
        pass


def test_half_of_the_processors_code_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_processors", lambda: set(range(8)))
    parallel._coding.reset()
    parallel._coding_beside.reset()
    try:
        for beside, most in ((False, 8), (True, 4)):
            pace = parallel.Pace(parallel.Cancellation())
            if beside:
                pace.beside.set()
            with ExitStack() as stack:
                for _ in range(most):
                    stack.enter_context(pace.coding())
                one_more = threading.Thread(target=lambda pace=pace: code(pace), daemon=True)
                one_more.start()
                one_more.join(0.05)
                assert one_more.is_alive(), "more threads code than may"
            one_more.join()
    finally:
        monkeypatch.undo()
        parallel._coding.reset()
        parallel._coding_beside.reset()


def code(pace: parallel.Pace) -> None:
    with pace.coding():
        pass
