"""Boxes: grids, intersections and ranges; whether boxes tile an array; copies of boxes into any memory."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from simulated_ranks import at_random, by_dimension, random_tiling, save_by_ranks
from state.reloading import leaf_of
from tensorkeep.formats import base, boxes
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.boxes import (
    Box,
    Flaw,
    box_shape,
    box_to_ranges,
    find_flaw,
    grid,
    grow,
    intersection,
    range_to_boxes,
    relative,
)
from tensorkeep.formats.finding import open_reader


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


# Whether boxes tile an array.


SHAPES = [(), (1,), (7,), (4, 6), (3, 5, 4), (2, 3, 2, 5)]


def first_flaw(shape, boxes) -> Flaw | None:
    """Count the boxes over every element, one by one."""
    for element in itertools.product(*map(range, shape)):
        count = sum(all(o <= at < o + s for o, s, at in zip(*box, element, strict=True)) for box in boxes)
        if count != 1:
            return Flaw(element, count == 0)
    return None


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32))
def test_random_tilings_are_accepted_and_every_change_is_found(shape: tuple[int, ...], seed: int) -> None:
    random = Random(seed)
    boxes = random_tiling(random, shape, cuts=random.randrange(8))
    random.shuffle(boxes)
    assert find_flaw(shape, boxes) is None
    number = random.randrange(len(boxes))
    changes = [boxes[:number] + boxes[number + 1 :], [*boxes, boxes[number]]]
    offsets, sizes = boxes[number]
    for axis, length in enumerate(shape):
        for moved, grown in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            offset, size = offsets[axis] + moved, sizes[axis] + grown
            if offset >= 0 and size > 0 and offset + size <= length:
                one = (*offsets[:axis], offset, *offsets[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :])
                changes.append([*boxes[:number], one, *boxes[number + 1 :]])
    for changed in changes:
        assert find_flaw(shape, changed) == first_flaw(shape, changed) is not None


def test_equal_volumes_empty_arrays_and_scalars() -> None:
    # A gap and an overlap of one size.
    boxes = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((1, 2), (2, 2))]
    assert find_flaw((4, 4), boxes) == Flaw((1, 2), is_gap=False)
    assert find_flaw((3, 0), []) is None
    assert find_flaw((3,), []) == Flaw((0,), is_gap=True)
    assert find_flaw((), []) == Flaw((), is_gap=True)
    assert find_flaw((), [((), ()), ((), ())]) == Flaw((), is_gap=False)
    # What no mesh has, or would exceed the memory, is refused.
    with pytest.raises(ValueError, match="along 9 dimensions"):
        find_flaw((2,) * 9, [((0,) * 9, (1,) * 9)])
    assert find_flaw((2, *(1,) * 60), [((0,) * 61, (2, *(1,) * 60))]) is None
    with pytest.raises(OverflowError, match="has a length of"):
        find_flaw((2**63,), [((0,), (2**63,))])
    with pytest.raises(ValueError, match="into 20,000 boxes, more than can be checked"):
        find_flaw((2,) * 8, [((0,) * 8, (1,) * 8)] * 20_000)


# Reading boxes into memory of any layout.


SHAPE = (37, 20, 6)


def write(path: Path, kind: str, tensor: Any) -> None:
    if kind == "native":
        tensorkeep.save({"w": tensor}, path)
    elif kind == "torch":
        torch.save({"w": tensor}, path)
    else:
        split = at_random(3, seed=3, cuts=9) if kind == "anywhere" else by_dimension(3, 1)
        compression = "lossless" if kind == "anywhere" else "none"
        save_by_ranks(path, {"w": tensor}, 3, split, grid_bytes=512, compression=compression)


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose elements are in reverse order of dimensions, with gaps."""
    return torch.zeros(*reversed(shape), 2, dtype=dtype)[..., 0].permute(*reversed(range(len(shape))))


@pytest.mark.coder
@pytest.mark.parametrize("kind", ["native", "torch", "anywhere", pytest.param("columns", marks=pytest.mark.exhaustive)])
def test_boxes_are_read_into_any_layout(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(SHAPE).bfloat16()
    write(tmp_path / "c", kind, tensor)
    monkeypatch.setattr(base, "BLOCK_BYTES", 2048)
    random = Random(2)
    for verify, long_run in ((True, 1), (False, 64), (True, 10**6), (False, 10**6)):
        monkeypatch.setattr(boxes, "_LONG_RUN", long_run)
        settings = OpenSettings(verify=verify)
        with open_reader(tmp_path / "c", settings) as reader:
            for offsets, sizes in random_tiling(random, SHAPE, cuts=4):
                expected = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                for out in (torch.zeros(sizes, dtype=tensor.dtype), strided(sizes, tensor.dtype)):
                    reader.read_box("w", offsets, leaf_of(out), settings.pool)
                    assert torch.equal(out, expected), f"{sizes} at {offsets}, {long_run}, {verify}"


@pytest.mark.parametrize("kind", ["native", "anywhere"])
def test_boxes_of_numpy_arrays(tmp_path: Path, kind: str) -> None:
    array = np.arange(37 * 20 * 6).reshape(SHAPE).astype(np.complex128)
    write(tmp_path / "c", kind, array)
    settings = OpenSettings()
    with open_reader(tmp_path / "c", settings) as reader:
        out = np.zeros((5, 6, 3), array.dtype)[::-1]
        reader.read_box("w", (30, 13, 2), leaf_of(out), settings.pool)
        assert np.array_equal(out, array[30:35, 13:19, 2:5])


def test_scalars_and_empty_boxes(tmp_path: Path) -> None:
    tensorkeep.save({"s": torch.tensor(2.5), "e": torch.empty(0, 3)}, tmp_path / "c")
    settings, scalar = OpenSettings(), torch.tensor(0.0)
    with open_reader(tmp_path / "c", settings) as reader:
        reader.read_box("s", (), leaf_of(scalar), settings.pool)
        reader.read_box("e", (0, 0), leaf_of(torch.empty(0, 3)), settings.pool)
    assert scalar == 2.5


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "reads"),
    [
        # A column of a wide matrix takes one read for many rows, not one for each.
        ((1000, 50), (0, 7), (1000, 2), [(7, 999 * 50 + 9)]),
        # Long rows are read without what is between them.
        ((4, 10**6), (0, 100), (4, 500_000), [(row * 10**6 + 100, row * 10**6 + 500_100) for row in range(4)]),
    ],
    ids=["short rows", "long rows"],
)
def test_rows_are_read_together_if_little_is_between_them(
    shape: tuple[int, int], offsets: tuple[int, int], sizes: tuple[int, int], reads: list[tuple[int, int]]
) -> None:
    data = np.arange(shape[0] * shape[1], dtype=np.uint8)
    found: list[tuple[int, int]] = []

    def read(start: int, stop: int, out: Any) -> None:
        found.append((start, stop))
        out[:] = data[start:stop]

    out = np.zeros(sizes, np.uint8)
    boxes.read_box(read, shape, offsets, leaf_of(out), OpenSettings().pool, base.BLOCK_BYTES)
    assert sorted(found) == reads
    assert np.array_equal(out, data.reshape(shape)[:, offsets[1] : offsets[1] + sizes[1]])
