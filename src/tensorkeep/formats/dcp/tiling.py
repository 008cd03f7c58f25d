"""Whether boxes make up a tensor, each element once, and which of them a run of elements needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First corner and size."""

_MOST_BOXES = 8192
"""Of a tensor that is cut in several dimensions: they are compared each with each."""


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that boxes cover a tensor, each element once.

    Raises
    ------
    ValueError
        Saying what is wrong.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError("a piece has another number of dimensions")
        if any(first + size > length for first, size, length in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a piece of {list(sizes)} at {list(offsets)} reaches beyond {list(shape)}")
    full = [box for box in boxes if 0 not in box[1]]
    held = sum(prod(sizes) for _, sizes in full)
    if held < prod(shape):
        raise ValueError(f"they hold {held:,} of {prod(shape):,} elements")
    # Boxes inside, as many elements as there are: they cover all if and only if no two overlap.
    if held > prod(shape) or _overlap(len(shape), full):
        raise ValueError("they overlap")


def _overlap(dimensions: int, boxes: Sequence[Box]) -> bool:
    if len(boxes) < 2:
        return False
    corners = np.array([offsets for offsets, _ in boxes], np.int64).reshape(len(boxes), dimensions)
    ends = corners + np.array([sizes for _, sizes in boxes], np.int64).reshape(len(boxes), dimensions)
    cut = [axis for axis in range(dimensions) if (corners[:, axis] != corners[0, axis]).any()]
    if len(cut) == 1:
        order = np.argsort(corners[:, cut[0]])
        return bool((ends[order[:-1], cut[0]] > corners[order[1:], cut[0]]).any())
    if len(boxes) > _MOST_BOXES:
        raise ValueError(f"{len(boxes):,} pieces in several dimensions are too many to check")
    return any(
        bool(((corners[i + 1 :] < ends[i]) & (corners[i] < ends[i + 1 :])).all(axis=1).any())
        for i in range(len(boxes) - 1)
    )


def runs(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that together are the elements [first, last) of the C order, in order, each with its place in them.

    As many as a few for each dimension: the end of a row, whole rows at once, the start of a row.
    """
    if first >= last:
        return
    if not shape or last - first == prod(shape):
        yield ((0,) * len(shape), tuple(shape)), 0
        return
    row = prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:
        yield from _within(shape, begin - 1, first, last, first)
        return
    if first < begin * row:
        yield from _within(shape, begin - 1, first, begin * row, first)
    if begin < end:
        yield ((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])), begin * row - first
    if end * row < last:
        yield from _within(shape, end, end * row, last, first)


def _within(shape: Sequence[int], index: int, first: int, last: int, origin: int) -> Iterator[tuple[Box, int]]:
    row = prod(shape[1:])
    for (offsets, sizes), place in runs(shape[1:], first - index * row, last - index * row):
        yield ((index, *offsets), (1, *sizes)), place + first - origin


def copy_common(target: npt.NDArray[Any], at: Sequence[int], source: npt.NDArray[Any], lies: Sequence[int]) -> None:
    """Copy what two boxes of one tensor have in common, given their corners."""
    into, out_of = [], []
    for mine, length, theirs, extent in zip(at, target.shape, lies, source.shape, strict=True):
        low, high = max(mine, theirs), min(mine + length, theirs + extent)
        if low >= high:
            return
        into.append(slice(low - mine, high - mine))
        out_of.append(slice(low - theirs, high - theirs))
    target[tuple(into)] = source[tuple(out_of)]


def have_common(a: Box, b: Box) -> bool:
    """Say whether two boxes have an element in common."""
    return all(max(x, y) < min(x + m, y + n) for (x, m, y, n) in zip(a[0], a[1], b[0], b[1], strict=True))
