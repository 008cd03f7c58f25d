"""How long OpenMP threads spin is controlled by how long the threads of a run wait for processors."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorkeep import machine
from tensorkeep.train import spinning
from tensorkeep.train.spinning import SpinControl

THREADS = 2


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spinning, "_CHOSEN_BY_USER", ())
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_spinning_is_limited_while_threads_wait() -> None:
    with SpinControl(lambda: 0.0) as control:
        limited = []
        for waited in (0.0, 0.3, 0.3, 0.04, 0.3, 0.3, 0.3, 0.3, 0.04, 0.01, 0.3):
            control.update(waited)
            limited.append(control.limited)
    assert limited == [False] * 6 + [True] * 3 + [False] * 2
    assert not control.limited


def settled_threads() -> int:
    """Return the number of threads once those of earlier tests have ended: when it stays the same for a while."""
    counts = [-1]
    while len({*counts[-5:]}) > 1 or len(counts) < 6:
        counts.append(threads_of_system())
        time.sleep(0.05)
    return counts[-1]


def test_limiting_starts_teams_that_end_with_it() -> None:
    torch.ones(1 << 20).sum()  # starts the main team
    before = settled_threads()
    with SpinControl(lambda: 0.0) as control:
        watched = settled_threads()
        for _ in range(3):
            control.update(1.0)
        deadline = time.monotonic() + 10
        while threads_of_system() < watched + THREADS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads_of_system() >= watched + THREADS
    deadline = time.monotonic() + 10
    while threads_of_system() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads_of_system() == before


def test_the_wait_per_second_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "INTERVAL", 0.01)
    with SpinControl(itertools.count().__next__) as control:
        deadline = time.monotonic() + 10
        while not control.limited and time.monotonic() < deadline:
            time.sleep(0.01)
        assert control.limited


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_choice_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(spinning, "_CHOSEN_BY_USER", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    monkeypatch.setenv(variable, "PASSIVE")
    before = threading.active_count()
    with SpinControl():
        assert threading.active_count() == before


def test_one_thread_needs_no_control() -> None:
    torch.set_num_threads(1)
    before = threading.active_count()
    with SpinControl():
        assert threading.active_count() == before


def test_waiting_for_a_processor_is_counted() -> None:
    code = """
import os, sys, time
from tensorkeep.machine import thread_wait_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()
if child == 0:
    begin = time.monotonic()
    while time.monotonic() - begin < 5:
        pass
    os._exit(0)
begin, before = time.monotonic(), thread_wait_seconds()
while time.monotonic() - begin < 0.5:
    pass
os.kill(child, 9)
print(thread_wait_seconds() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) > 0.05


def test_a_kernel_that_does_not_count_waits(tmp_path: Path) -> None:
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)
    assert machine.thread_wait_seconds(proc=tmp_path) == 0


def threads_of_system() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
