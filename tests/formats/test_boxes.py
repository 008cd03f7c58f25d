"""Grids, intersections and ranges of boxes."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.formats.boxes import Box, box_shape, box_to_ranges, grid, grow, intersection, range_to_boxes, relative


def some_box(shape: Sequence[int], data: st.DataObject) -> Box:
    starts = [data.draw(st.integers(0, length - 1)) for length in shape]
    return tuple(slice(at, data.draw(st.integers(at + 1, n))) for at, n in zip(starts, shape, strict=True))


@given(st.lists(st.integers(0, 9), max_size=4), st.data())
def test_grid_of_full_chunks_covers_the_array_once(shape: list[int], data: st.DataObject) -> None:
    chunk = [data.draw(st.integers(1, max(1, length))) for length in shape]
    most = data.draw(st.integers(0, 500))
    block = grow(shape, chunk, most)
    assert all(length % step == 0 for length, step in zip(block, chunk, strict=True))
    assert math.prod(block) <= max(most, math.prod(chunk))
    padded = [-(-max(1, length) // step) * step for length, step in zip(shape, chunk, strict=True)]
    assert most < math.prod(padded) or list(block) == padded
    counts = np.zeros(shape, int)
    for box in grid(shape, block):
        counts[box] += 1
        assert all(side.start % step == 0 for side, step in zip(box, chunk, strict=True))
    assert (counts == 1).all()


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_and_ranges_follow_the_c_order_stream(shape: list[int], data: st.DataObject) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    found = [array[box].ravel() for box in range_to_boxes(shape, start, stop)]
    assert [n for part in found for n in part] == list(range(start, stop))
    box = some_box(shape, data)
    listed = [n for first, last in box_to_ranges(shape, box) for n in range(first, last)]
    assert listed == list(array[box].ravel())
    assert len(listed) == math.prod(box_shape(box))


@given(st.lists(st.integers(1, 6), max_size=3), st.data())
def test_intersection_holds_the_common_elements(shape: list[int], data: st.DataObject) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    a, b = some_box(shape, data), some_box(shape, data)
    common = intersection(a, b)
    expected = np.intersect1d(array[a], array[b]).tolist()
    assert ([] if common is None else array[common].ravel().tolist()) == expected
    if common is not None:
        assert np.array_equal(array[a][relative(common, a)], array[common])
