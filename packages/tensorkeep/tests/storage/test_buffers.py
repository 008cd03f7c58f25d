"""Buffer pools: the byte budget, reuse, and page-locking."""

import gc
import itertools
import mmap
import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from tensorkeep.storage import buffers
from tensorkeep.storage.buffers import ALIGNMENT, Buffer, BufferPool
from tensorkeep.storage.parallel import Cancellation

MIB = 1024**2


def never_waits() -> Cancellation:
    """Return a cancellation with which `acquire` raises `Cancelled` where it would wait."""
    cancellation = Cancellation()
    cancellation.cancel()
    return cancellation


def test_a_pool_never_exceeds_its_budget_nor_wastes_it() -> None:
    with BufferPool(64 * MIB) as pool:
        with pool.acquire(40 * MIB) as first, pool.acquire(20 * MIB) as second:
            assert len(first) >= 40 * MIB
            assert len(second) >= 20 * MIB
            assert not first.ctypes.data % ALIGNMENT
        pool.acquire(64 * MIB).release()
        assert pool.peak_bytes <= 64 * MIB
        with pytest.raises(tensorkeep.UsageError, match="more than the memory budget"):
            pool.acquire(65 * MIB)
    with BufferPool(64 * MIB) as pool:
        pool.acquire(40 * MIB).release()
        with pool.acquire(MIB) as small:
            assert len(small) <= 2 * MIB
            pool.acquire(60 * MIB, never_waits()).release()  # would wait if the small request used the large buffer


def test_a_request_waits_until_the_budget_allows_it() -> None:
    pool = BufferPool(64 * MIB)
    order = []

    def second() -> None:
        with pool.acquire(50 * MIB):
            order.append("second")

    with pool.acquire(50 * MIB):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_the_number_of_threads_is_limited_by_the_budget() -> None:
    pool = BufferPool(100 * MIB)
    assert [pool.threads(wanted, 30 * MIB) for wanted in (8, 2)] == [3, 2]
    with pytest.raises(tensorkeep.UsageError, match="at least"):
        pool.threads(2, 101 * MIB)


def test_a_buffer_of_an_earlier_pool_takes_nothing_from_other_threads() -> None:
    with BufferPool(256 * MIB) as earlier, earlier.acquire(34 * MIB), earlier.acquire(34 * MIB):
        pass
    with BufferPool(64 * MIB) as pool, ExitStack() as loans:
        assert pool.threads(8, 18 * MIB) == 3
        for _ in range(3):
            loans.enter_context(pool.acquire(17 * MIB, never_waits()))


@given(st.integers(0, 2**32))
def test_threads_within_what_was_granted_never_wait(seed: int) -> None:
    rng = random.Random(seed)
    each = rng.randint(8, 40) * MIB
    with BufferPool(rng.randint(64, 160) * MIB) as pool:
        held: list[list[Buffer]] = [[] for _ in range(pool.threads(6, each))]
        for _ in range(300):
            loans = rng.choice(held)
            left = each - sum(loan.size for loan in loans)
            if left > 4 * MIB and (not loans or rng.random() < 0.5):
                loans.append(pool.acquire(rng.randint(1, left - 2 * MIB), never_waits()))
                assert pool.allocated_bytes <= pool.budget
            elif loans:
                loans.pop(rng.randrange(len(loans))).release()
        for loan in itertools.chain(*held):
            loan.release()


def test_a_larger_buffer_is_used_if_no_thread_needs_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_spares", buffers._Spares())
    with BufferPool(64 * MIB) as pool:
        pool.threads(1, 20 * MIB)
        pool.acquire(16 * MIB).release()
        with pool.acquire(10 * MIB) as array:
            assert len(array) == 16 * MIB


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
