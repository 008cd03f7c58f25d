"""How long OpenMP threads spin is controlled by how long the threads of a run wait for processors."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chatgot.step import cpu
from chatgot.step.cpu import SpinControl
from tensorkeep import machine

THREADS = 2


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "_SPIN_SETTINGS", ())
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other threads do. What never happens fails the test, by the limit of a test's time."""
    while not holds():
        time.sleep(0.01)


def test_spinning_is_limited_while_threads_wait() -> None:
    with SpinControl(lambda: 0.0) as control:
        limited = []
        for waited in (0.0, 0.3, 0.3, 0.04, 0.3, 0.3, 0.3, 0.3, 0.04, 0.01, 0.3):
            control.update(waited)
            limited.append(control.limited)
    assert limited == [False] * 6 + [True] * 3 + [False] * 2
    assert not control.limited


def test_limiting_starts_teams_that_end_with_it() -> None:
    torch.ones(1 << 20).sum()  # starts the main team
    with SpinControl(lambda: 0.0) as control:
        before = set(machine.thread_ids())
        for _ in range(3):
            control.update(1.0)
        assert control.limited
        wait_until(lambda: len(set(machine.thread_ids()) - before) >= THREADS)
        teams = set(machine.thread_ids()) - before
    wait_until(lambda: not teams & set(machine.thread_ids()))


def test_the_wait_per_second_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "INTERVAL", 0.01)
    with SpinControl(itertools.count().__next__) as control:
        wait_until(lambda: control.limited)


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", None])
def test_the_user_decides_and_one_thread_has_no_control(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is None:
        torch.set_num_threads(1)
    else:
        monkeypatch.setattr(cpu, "_SPIN_SETTINGS", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
        monkeypatch.setenv(variable, "PASSIVE")
    with SpinControl() as control:
        assert not control._thread.is_alive()
        assert control._thread not in threading.enumerate()


@pytest.mark.integration
def test_waiting_for_a_processor_is_counted() -> None:
    code = """
import os
from tensorkeep.machine import thread_wait_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
parent, before = os.getpid(), thread_wait_seconds()
if os.fork() == 0:
    while os.getppid() == parent:
        pass
    os._exit(0)
while thread_wait_seconds() - before < 0.05:
    pass
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_kernel_that_does_not_count_waits(tmp_path: Path) -> None:
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)
    assert machine.thread_wait_seconds(proc=tmp_path) == 0
