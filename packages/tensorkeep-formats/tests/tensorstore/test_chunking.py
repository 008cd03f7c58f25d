"""Chunk shapes, and the budget of bytes in flight."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.errors import UsageError
from tensorkeep.storage.parallel import Cancelled
from tensorkeep_formats.tensorstore import FORMAT
from tensorkeep_formats.tensorstore.specs import chunk_shape, divisors
from tensorkeep_formats.tensorstore.writer import ByteBudget

shapes = st.lists(st.integers(1, 97), min_size=1, max_size=4)


def documented_halving(write_shape: list[int], target_elements: int) -> list[int]:
    """The algorithm as its authors wrote it, with a product that does not overflow."""
    if target_elements < 1:
        target_elements = 1
    if not write_shape:
        return [1]
    chunk_shape = list(write_shape)
    while math.prod(chunk_shape) > target_elements and max(chunk_shape) > 1:
        max_idx = chunk_shape.index(max(chunk_shape))
        chunk_shape[max_idx] = max(1, chunk_shape[max_idx] // 2)
    return chunk_shape


def documented_divisors(write_shape: list[int], target_elements: int) -> list[int]:
    """The algorithm as its authors wrote it."""
    if target_elements < 1:
        target_elements = 1
    rank = len(write_shape)
    if rank == 0:
        return [1]
    dim_factors = []
    for size in write_shape:
        factors = [i for i in range(1, size + 1) if size % i == 0]
        dim_factors.append(factors)
    current_chunk = [factors[-1] for factors in dim_factors]
    while math.prod(current_chunk) > target_elements:
        max_dim = -1
        max_size = 1
        for i in range(rank):
            if current_chunk[i] > max_size:
                max_size = current_chunk[i]
                max_dim = i
        if max_size <= 1:
            break
        factors = dim_factors[max_dim]
        current_idx = factors.index(current_chunk[max_dim])
        if current_idx > 0:
            current_chunk[max_dim] = factors[current_idx - 1]
        else:
            break
    return current_chunk


@given(shapes, st.integers(0, 20_000))
def test_both_algorithms_are_the_documented_ones(shape: list[int], target: int) -> None:
    limit = f"{4 * target + 1}B"  # of elements of four bytes, also for a target of 0
    assert list(chunk_shape(shape, 4, limit, "halving")) == documented_halving(shape, target)
    assert list(chunk_shape(shape, 4, limit, "divisors")) == documented_divisors(shape, target)
    for length in shape:
        assert divisors(length) == [i for i in range(1, length + 1) if length % i == 0]


def test_each_kind_of_chunk_limit() -> None:
    shape = [32000, 3200]
    # The documented example; the documents do not mention that 1 MiB of float32 gives far smaller chunks.
    for algorithm in ("halving", "divisors"):
        assert chunk_shape(shape, 4, 16_777_216, algorithm) == (4000, 3200)
    assert chunk_shape(shape, 4, 262_144, "halving") == (500, 400)
    assert chunk_shape(shape, 4, "64", "halving") == (64, 64)
    assert chunk_shape([3, 100], 4, "64", "halving") == (3, 64)
    assert chunk_shape(shape, 4, "64MiB", "halving") == (4000, 3200)
    assert chunk_shape(shape, 2, "64MiB", "halving") == (8000, 3200)
    assert chunk_shape(shape, 2, 16_777_216, "divisors") == (4000, 3200)
    assert chunk_shape(shape, 2, None, "halving") == (32000, 3200)
    assert chunk_shape([0, 3], 4, 1, "halving") == (1, 1)
    assert chunk_shape([], 4, "1B", "halving") == ()
    # An empty array may have a dimension of any length; prime and square dimensions of a terabyte are divided fast.
    assert chunk_shape([0, 2**61 - 1], 4, 2**20, "divisors") == (1, 2**20 - 1)
    assert chunk_shape([999_999_999_989], 1, 1000, "divisors") == (1,)
    assert chunk_shape([1_000_003 * 1_000_003], 1, 2_000_000, "divisors") == (1_000_003,)
    for wrong in (0, -1, True, "0", "", "many", 1.5):
        with pytest.raises(UsageError):
            FORMAT.parse_options({"chunk": wrong})


def test_budget_is_never_exceeded_except_by_one_larger_region() -> None:
    budget = ByteBudget(100)
    lock, met = threading.Lock(), threading.Barrier(3)
    held: list[int] = []
    crowds: list[list[int]] = []

    def step(count: int, meet: bool) -> None:
        budget.acquire(count)
        with lock:
            held.append(count)
            crowds.append(list(held))
        if meet:
            met.wait(60)
        with lock:
            held.remove(count)
        budget.release(count)

    counts = [250, *np.random.default_rng(0).integers(1, 100, 60).tolist()]
    with ThreadPoolExecutor(2 + len(counts)) as pool:
        steps = [pool.submit(step, count, True) for count in (40, 60)]
        met.wait(60)  # both hold their bytes
        for done in [*steps, *(pool.submit(step, count, False) for count in counts)]:
            done.result(60)
    assert len(crowds) == 2 + len(counts)
    assert all(sum(crowd) <= 100 or crowd == [250] for crowd in crowds)
    assert budget.peak == 250


def test_regions_are_admitted_in_the_order_of_their_requests() -> None:
    budget = ByteBudget(10)
    budget.acquire(8)
    admitted: list[int] = []
    threads = []
    for count in (9, 1, 2):  # the second would fit beside the eight, but is not the first in the queue
        thread = threading.Thread(target=lambda n=count: (budget.acquire(n), admitted.append(n)))
        thread.start()
        threads.append(thread)
        while len(budget._waiting) < len(threads):
            time.sleep(0.001)
    assert admitted == []
    budget.release(8)
    threads[0].join(60)
    threads[1].join(60)
    assert admitted == [9, 1]
    budget.release(10)
    threads[2].join(60)
    assert admitted == [9, 1, 2]


def test_cancelling_wakes_waiting_threads() -> None:
    budget = ByteBudget(10)
    budget.acquire(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(budget.acquire, 1)
        budget.cancel()
        with pytest.raises(Cancelled):
            waiting.result(60)
    budget.release(10)
    budget.wait_until_empty()
