"""Moving bytes: buffers under a budget, tasks on threads, files that are read and written around the page cache."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tensorkeep
from tensorkeep.io.buffers import ALIGNMENT, BufferPool, aligned_copy
from tensorkeep.io.files import DirectFile
from tensorkeep.io.parallel import Cancellation, run
from tensorkeep.io.source_file import SourceFile

MIB = 1024**2


def test_the_pool_never_holds_more_than_its_budget() -> None:
    with BufferPool(64 * MIB) as pool:
        with pool.acquire(40 * MIB) as first, pool.acquire(20 * MIB) as second:
            assert len(first) >= 40 * MIB
            assert len(second) >= 20 * MIB
            assert not first.ctypes.data % ALIGNMENT
        with pool.acquire(64 * MIB):
            pass
        assert pool.peak_bytes <= 64 * MIB
        with pytest.raises(tensorkeep.UsageError, match="more than the memory budget"), pool.acquire(65 * MIB):
            pass


def test_who_wants_more_waits_until_it_is_there() -> None:
    pool = BufferPool(64 * MIB)
    order = []

    def second() -> None:
        with pool.acquire(50 * MIB):
            order.append("second")

    with pool.acquire(50 * MIB):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_small_need_does_not_take_a_large_buffer() -> None:
    with BufferPool(64 * MIB) as pool:
        with pool.acquire(40 * MIB):
            pass
        with pool.acquire(MIB) as small:
            assert len(small) <= 2 * MIB
            with pool.acquire(60 * MIB):  # would wait for ever, had the small need taken the large buffer
                pass


def test_threads_are_as_many_as_memory_is_there_for() -> None:
    pool = BufferPool(100 * MIB)
    assert pool.threads(8, 30 * MIB) == 3
    assert pool.threads(2, 30 * MIB) == 2
    with pytest.raises(tensorkeep.UsageError, match="at least"):
        pool.threads(2, 101 * MIB)


def test_the_first_failure_stops_the_rest_and_is_raised() -> None:
    done = []

    def fail() -> None:
        raise ValueError("broken")

    tasks = [lambda: done.append(1), fail] + [lambda: done.append(2)] * 1000
    with pytest.raises(ValueError, match="broken"):
        run(tasks, 2)
    assert len(done) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorkeep")]


def test_ctrl_c_twice_still_waits_for_the_tasks_that_run() -> None:
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


def test_a_thread_that_cannot_start_leaves_none_behind() -> None:
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


def test_many_threads_fall_back_together(tmp_path: Path) -> None:
    real, together = os.pwrite, threading.Barrier(2)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if offset < 2 * ALIGNMENT and not seen.count(offset):
            seen.append(offset)
            together.wait(timeout=10)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, data, offset)

    seen: list[int] = []
    file = DirectFile(tmp_path / "x")
    page = aligned_copy(bytes(range(256)) * 16)
    with mock.patch.object(os, "pwrite", pwrite):
        run([lambda place=place: file.write(place * 4096, page) for place in range(8)], 4)
    file.finish(8 * 4096)
    assert (tmp_path / "x").read_bytes() == page.tobytes() * 8
    assert not file.direct


@pytest.mark.parametrize("page_cache", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("offset", "count"), [(0, 10), (5000, 3 * MIB), (4096, 8192), (3 * MIB - 7, MIB + 7), (4 * MIB - 1, 1)]
)
def test_fetch_gives_the_bytes_wherever_they_lie(
    tmp_path: Path, page_cache: bool, warm: bool, offset: int, count: int
) -> None:
    content = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    path = tmp_path / "x"
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if not warm:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with SourceFile(path, page_cache=page_cache) as file, BufferPool().acquire(count + 2 * ALIGNMENT) as scratch:
        assert np.array_equal(file.fetch(offset, count, scratch), content[offset : offset + count])


@pytest.mark.parametrize("page_cache", [True, False])
def test_a_file_that_ends_too_early_is_said(tmp_path: Path, page_cache: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(2 * MIB))
    with SourceFile(path, page_cache=page_cache) as file, BufferPool().acquire(3 * MIB) as scratch:
        os.truncate(path, MIB + 5)
        with pytest.raises(tensorkeep.CorruptCheckpointError, match="ends at byte 1,048,581"):
            file.fetch(MIB - 100, MIB, scratch)


class Ledger:
    """Stands for CUDA's page-locking."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, memory: mmap.mmap) -> None:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        assert address not in self.locked
        self.locked[address] = len(memory)

    def unlock(self, memory: mmap.mmap) -> None:
        del self.locked[np.frombuffer(memory, np.uint8).ctypes.data]


def test_buffers_are_page_locked_as_long_as_they_are_the_pools() -> None:
    ledger = Ledger()
    pool = BufferPool(64 * MIB, page_lock=ledger)
    for _ in range(3):  # once, not at each loan
        with pool.acquire(10 * MIB) as array:
            assert array.ctypes.data in ledger.locked
    with pool.acquire(40 * MIB), pool.acquire(20 * MIB):  # the first buffer has to make room
        assert sorted(ledger.locked.values()) == [20 * MIB, 40 * MIB]
    pool.close()
    assert not ledger.locked
    with pool.acquire(10 * MIB):
        assert ledger.locked
    del pool, array
    gc.collect()
    assert not ledger.locked
