"""Chunks, regions, and the budget of bytes in flight."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.errors import UsageError
from tensorkeep.formats.tensorstore.budget import ByteBudget
from tensorkeep.formats.tensorstore.chunking import Chunking, dividing, halving
from tensorkeep.formats.tensorstore.divisors import divisors
from tensorkeep.formats.tensorstore.regions import box_shape, boxes, grown, regions, runs
from tensorkeep.io.parallel import Cancelled

shapes = st.lists(st.integers(1, 97), min_size=1, max_size=4)


def documented_halving(write_shape: list[int], target_elements: int) -> list[int]:
    """The algorithm as its authors wrote it, but for the product, which numpy lets overflow."""
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
    assert list(halving(shape, target)) == documented_halving(shape, target)
    assert list(dividing(shape, target)) == documented_divisors(shape, target)


def test_the_documented_example_is_what_the_documents_say() -> None:
    assert halving([32000, 3200], 16_777_216) == (4000, 3200)
    assert dividing([32000, 3200], 16_777_216) == (4000, 3200)
    # As the documents do not say: at a mebibyte of float32 it is a hundredth of that.
    assert halving([32000, 3200], 262_144) == (500, 400)


@pytest.mark.parametrize("length", [1, 2, 97, 1024, 30_030, 2003 * 2011, 2003**3, 3**20])
def test_divisors_are_those_that_trying_all_gives(length: int) -> None:
    small = [i for i in range(1, math.isqrt(length) + 1) if length % i == 0]
    assert list(divisors(length)) == sorted({*small, *(length // i for i in small)})


def test_huge_and_prime_dimensions_are_chunked_at_once() -> None:
    assert dividing([2**61 - 1], 1000) == (1,)
    assert dividing([1_000_003 * 998_244_353], 2_000_000) == (1_000_003,)
    assert divisors(2**62)[-2] == 2**61


def test_options_of_chunks_mean_what_they_say() -> None:
    shape = [32000, 3200]
    assert Chunking.parse("64", "halving").shape_of(shape, 4) == (64, 64)
    assert Chunking.parse("64", "halving").shape_of([3, 100], 4) == (3, 64)
    assert Chunking.parse("64MiB", "halving").shape_of(shape, 4) == (4000, 3200)
    assert Chunking.parse("64MiB", "halving").shape_of(shape, 2) == (8000, 3200)
    assert Chunking.parse(16_777_216, "divisors").shape_of(shape, 2) == (4000, 3200)
    assert Chunking.parse(None, "halving").shape_of(shape, 2) == (32000, 3200)
    assert Chunking.parse(1, "halving").shape_of([0, 3], 4) == (1, 1)
    assert Chunking.parse("1B", "halving").shape_of([], 4) == ()
    for wrong in (0, -1, True, "0", "", "many", 1.5):
        with pytest.raises(UsageError):
            Chunking.parse(wrong, "halving")


@given(st.lists(st.integers(0, 9), max_size=4), st.data())
def test_regions_are_whole_chunks_and_cover_the_array_once(shape: list[int], data: st.DataObject) -> None:
    chunk = [data.draw(st.integers(1, max(1, length))) for length in shape]
    most = data.draw(st.integers(0, 500))
    block = grown(shape, chunk, most)
    assert all(length % step == 0 for length, step in zip(block, chunk, strict=True))
    assert math.prod(block) <= max(most, math.prod(chunk))
    padded = [-(-max(1, length) // step) * step for length, step in zip(shape, chunk, strict=True)]
    assert most < math.prod(padded) or list(block) == padded
    seen = np.zeros(shape, int)
    for box in regions(shape, block):
        seen[box] += 1
        assert all(part.start % step == 0 for part, step in zip(box, chunk, strict=True))
    assert (seen == 1).all()


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_and_runs_are_the_stream(shape: list[int], data: st.DataObject) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    found = [array[box].ravel() for box in boxes(shape, start, stop)]
    assert [n for part in found for n in part] == list(range(start, stop))
    box = _some_box(shape, data)
    listed = [n for first, last in runs(shape, box) for n in range(first, last)]
    assert listed == list(array[box].ravel())
    assert len(listed) == math.prod(box_shape(box))


def _some_box(shape: Sequence[int], data: st.DataObject) -> tuple[slice, ...]:
    starts = [data.draw(st.integers(0, length - 1)) for length in shape]
    return tuple(slice(at, data.draw(st.integers(at + 1, n))) for at, n in zip(starts, shape, strict=True))


def test_the_budget_is_never_exceeded_and_a_larger_step_goes_alone() -> None:
    budget = ByteBudget(100)
    random = np.random.default_rng(0)
    lock = threading.Lock()
    held: list[int] = []
    crowds: list[list[int]] = []

    def step(count: int) -> None:
        budget.acquire(count)
        with lock:
            held.append(count)
            crowds.append(list(held))
        time.sleep(0.0005)
        with lock:
            held.remove(count)
        budget.release(count)

    counts = [int(n) for n in random.integers(1, 100, 60)] + [250]
    random.shuffle(counts)
    threads = [threading.Thread(target=step, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a step waits for ever"
    assert len(crowds) == len(counts)
    assert any(len(crowd) > 1 for crowd in crowds)
    assert all(sum(crowd) <= 100 or crowd == [250] for crowd in crowds)
    assert budget.peak == 250


def test_steps_are_admitted_in_the_order_in_which_they_ask() -> None:
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
    threads[0].join(10)
    threads[1].join(10)
    assert admitted == [9, 1]
    budget.release(10)
    threads[2].join(10)
    assert admitted == [9, 1, 2]


def test_cancelling_wakes_whoever_waits() -> None:
    budget = ByteBudget(10)
    budget.acquire(10)
    seen: list[str] = []

    def wait() -> None:
        try:
            budget.acquire(1)
        except Cancelled:
            seen.append("cancelled")

    thread = threading.Thread(target=wait)
    thread.start()
    budget.cancel()
    thread.join(10)
    assert seen == ["cancelled"]
    budget.release(10)
    budget.wait_until_empty()
