"""Buffer pools: the byte budget, reuse, and page-locking."""

import gc
import mmap
import threading

import numpy as np
import pytest

import tensorkeep
from tensorkeep.io.buffers import ALIGNMENT, BufferPool

MIB = 1024**2


def test_a_pool_never_exceeds_its_budget() -> None:
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


def test_a_request_waits_until_the_budget_allows_it() -> None:
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


def test_a_small_request_does_not_use_a_large_buffer() -> None:
    with BufferPool(64 * MIB) as pool:
        with pool.acquire(40 * MIB):
            pass
        with pool.acquire(MIB) as small:
            assert len(small) <= 2 * MIB
            with pool.acquire(60 * MIB):  # would wait for ever if the small request used the large buffer
                pass


def test_the_number_of_threads_is_limited_by_the_budget() -> None:
    pool = BufferPool(100 * MIB)
    assert pool.threads(8, 30 * MIB) == 3
    assert pool.threads(2, 30 * MIB) == 2
    with pytest.raises(tensorkeep.UsageError, match="at least"):
        pool.threads(2, 101 * MIB)


class RecordingPageLock:
    """Stands for CUDA's page-locking; records what is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, memory: mmap.mmap) -> None:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        assert address not in self.locked
        self.locked[address] = len(memory)

    def unlock(self, memory: mmap.mmap) -> None:
        del self.locked[np.frombuffer(memory, np.uint8).ctypes.data]


def test_buffers_are_page_locked_while_they_belong_to_the_pool() -> None:
    page_lock = RecordingPageLock()
    pool = BufferPool(64 * MIB, page_lock=page_lock)
    for _ in range(3):  # once, not at each use
        with pool.acquire(10 * MIB) as array:
            assert array.ctypes.data in page_lock.locked
    with pool.acquire(40 * MIB), pool.acquire(20 * MIB):  # the first buffer is dropped
        assert sorted(page_lock.locked.values()) == [20 * MIB, 40 * MIB]
    pool.close()
    assert not page_lock.locked
    with pool.acquire(10 * MIB):
        assert page_lock.locked
    del pool, array
    gc.collect()
    assert not page_lock.locked
