"""Boxes of an array: regions made of whole chunks, and the boxes and runs that a range of the C-order stream is.

A box is one slice per dimension. Whoever writes a region that is made of whole chunks never reads a chunk back, and
whoever reads such a region decodes each chunk once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[slice, ...]


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box."""
    return tuple(part.stop - part.start for part in box)


def grown(shape: Sequence[int], chunk: Sequence[int], most_elements: int) -> tuple[int, ...]:
    """Return the largest block of whole chunks that is at most so many elements, but one chunk at least.

    Grown from the last dimension, so that its elements follow one another in the stream as far as they can. A block
    may reach beyond the array by less than one chunk along each dimension.
    """
    block = list(chunk)
    for axis in reversed(range(len(block))):
        count = -(-max(1, shape[axis]) // chunk[axis])
        fitting = max(1, most_elements // prod(block))
        block[axis] = chunk[axis] * min(count, fitting)
        if count > fitting:
            break
    return tuple(block)


def regions(shape: Sequence[int], block: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of a grid of blocks, cut at the array's end, in C order; nothing for an empty array."""
    axes = [
        [slice(at, min(at + step, length)) for at in range(0, length, step)]
        for length, step in zip(shape, block, strict=True)
    ]
    yield from itertools.product(*axes)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the array's C-order stream, in elements, that a box is; in order."""
    lengths = box_shape(box)
    # Behind the last dimension that is cut, the box is one run.
    last = max((axis for axis in range(len(shape)) if lengths[axis] != shape[axis]), default=-1)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if last < 0:
        yield 0, prod(shape)
        return
    start = box[last].start * strides[last]
    count = lengths[last] * strides[last]
    for outer in itertools.product(*(range(part.start, part.stop) for part in box[:last])):
        at = start + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield at, at + count


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together are the elements ``start:stop`` of the C-order stream, in order."""
    yield from _boxes(tuple(shape), start, stop, ())


def _boxes(shape: tuple[int, ...], start: int, stop: int, outer: Box) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield outer
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        row = start // inner
        yield from _boxes(shape[1:], start - row * inner, stop - row * inner, (*outer, slice(row, row + 1)))
        return
    if start < first * inner:
        head = (*outer, slice(first - 1, first))
        yield from _boxes(shape[1:], start - (first - 1) * inner, inner, head)
    if first < last:
        yield (*outer, slice(first, last), *(slice(0, length) for length in shape[1:]))
    if last * inner < stop:
        yield from _boxes(shape[1:], 0, stop - last * inner, (*outer, slice(last, last + 1)))
