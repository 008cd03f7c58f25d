"""Boxes of an array, one slice per dimension: grids, intersections, ranges in C order."""

import itertools
from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[slice, ...]


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box."""
    return tuple(side.stop - side.start for side in box)


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the box that begins at an element and has these lengths."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the elements that two boxes of one array share; None if they share nothing.

    Examples
    --------
    >>> intersection((slice(0, 4), slice(2, 6)), (slice(3, 9), slice(0, 3)))
    (slice(3, 4, None), slice(2, 3, None))
    """
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return common if all(side.start < side.stop for side in common) else None


def relative(box: Box, outer: Box) -> Box:
    """Return a box by its indices within an array that holds the outer box alone."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer, strict=True))


def grow(shape: Sequence[int], chunk: Sequence[int], most_elements: int) -> tuple[int, ...]:
    """Return the shape of the largest block of full chunks of at most so many elements; at least one chunk.

    The last dimension grows first, so that the elements of a block are as contiguous in the C-order stream as possible.
    A block may exceed the array by less than one chunk along each dimension.

    Examples
    --------
    >>> grow((100, 100), (10, 10), 2000)
    (20, 100)
    """
    block = list(chunk)
    for axis in reversed(range(len(block))):
        count = -(-max(1, shape[axis]) // chunk[axis])
        fitting = max(1, most_elements // prod(block))
        block[axis] = chunk[axis] * min(count, fitting)
        if count > fitting:
            break
    return tuple(block)


def grid(shape: Sequence[int], block: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of a grid of blocks in C order, cut at the end of the array; nothing for an empty array."""
    if 0 in shape:
        return  # the other dimensions may have any length, and more blocks than can be listed
    axes = [
        [slice(start, min(start + step, length)) for start in range(0, length, step)]
        for length, step in zip(shape, block, strict=True)
    ]
    yield from itertools.product(*axes)


def box_to_ranges(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the array's C-order stream, in elements, that make up a box; in order."""
    lengths = box_shape(box)
    # After the last dimension that is cut, the box is contiguous.
    last = max((axis for axis in range(len(shape)) if lengths[axis] != shape[axis]), default=-1)
    if last < 0:
        yield 0, prod(shape)
        return
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = box[last].start * strides[last]
    count = lengths[last] * strides[last]
    for outer in itertools.product(*(range(side.start, side.stop) for side in box[:last])):
        at = start + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield at, at + count


def covering_range(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the shortest range of the array's C-order stream, in elements, that has all of a box with elements."""
    first = last = 0
    for side, length in zip(box, shape, strict=True):
        first, last = first * length + side.start, last * length + side.stop - 1
    return first, last + 1


def as_range(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the range of the array's C-order stream that is a box with elements; None if it is not one range.

    Examples
    --------
    >>> as_range((4, 6), (slice(1, 3), slice(0, 6)))
    (6, 18)
    """
    first, last = covering_range(shape, box)
    return (first, last) if last - first == prod(box_shape(box)) else None


def range_to_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up the elements ``start:stop`` of the C-order stream, in order.

    At most two for each dimension and one more: the end of a row, full rows at once, the start of a row.

    Examples
    --------
    >>> list(range_to_boxes((3, 4), 2, 8))
    [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None))]
    """
    yield from _boxes(tuple(shape), start, stop, ())


def _boxes(shape: tuple[int, ...], start: int, stop: int, outer: Box) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield outer
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the full rows
    if first > last:
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
