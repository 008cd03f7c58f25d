"""Boxes of an array, one slice per dimension: geometry, whether boxes tile an array, and copies of boxes."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorkeep.state.leaf import Bytes, Leaf
from tensorkeep.storage.buffers import BufferPool, round_up

Box = tuple[slice, ...]


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the elements that two boxes of one array share; None if they share nothing."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return common if all(side.start < side.stop for side in common) else None


def relative(box: Box, outer: Box) -> Box:
    """Return a box by its indices within the outer box."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer, strict=True))


def grow(shape: Sequence[int], chunk: Sequence[int], most_elements: int) -> tuple[int, ...]:
    """Return the shape of the largest block of full chunks of at most so many elements; at least one chunk.

    The last dimension grows first, so that the elements of a block are as contiguous in the C-order stream as possible.

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
    """Yield the ranges of the C-order stream, in elements, that make up a box; in order."""
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
    """Return the shortest range of the C-order stream, in elements, that covers a box with elements."""
    # The positions of the first and the last element, by Horner's scheme.
    first = last = 0
    for side, length in zip(box, shape, strict=True):
        first, last = first * length + side.start, last * length + side.stop - 1
    return first, last + 1


def as_range(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the range of the array's C-order stream that is a box with elements; None if it is not one range.

    >>> as_range((4, 6), (slice(1, 3), slice(0, 6)))
    (6, 18)
    """
    first, last = covering_range(shape, box)
    return (first, last) if last - first == prod(box_shape(box)) else None


def range_to_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up the elements ``start:stop`` of the C-order stream, in order.

    At most two for each dimension and one more: the end of a row, full rows at once, the start of a row.

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


# Whether boxes tile an array exactly: no gap, no overlap, nothing outside.
#
# The number of boxes over each element is constant except at borders, so the corners of the boxes determine it. Each
# corner adds +1 or -1: -1 if an odd number of its coordinates are ends. Boxes tile an array if and only if their
# corners add up to the corners of the array. The time is proportional to the number of boxes, however they are cut.

Integers = npt.NDArray[np.int64]
Corner = tuple[int, ...]

# Dimensions along which one tensor may be cut: a box has two to that power corners.
MAX_CUT_DIMENSIONS = 8

# Coordinates of all corners of one tensor's boxes: 256 MiB.
MAX_COORDINATES = 2**25


# The first element, in C order, that no box has, or that more than one box has.
class Flaw(NamedTuple):
    offsets: Corner
    is_gap: bool


def find_flaw(shape: Sequence[int], boxes: Iterable[tuple[Corner, Corner]]) -> Flaw | None:
    """Return the first flaw of boxes, given by offsets and positive sizes; None if they tile an array of this shape.

    Raises OverflowError if a length exceeds 64 bits; ValueError if the boxes are too many or cut too many dimensions.

    >>> find_flaw((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))])
    >>> find_flaw((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3))])
    Flaw(offsets=(2, 3), is_gap=True)
    """
    found = list(boxes)
    whole = tuple(shape)
    if max(whole, default=0) > np.iinfo(np.int64).max:
        raise OverflowError(f"has a length of {max(whole)}")
    size = len(found), len(whole)
    starts = np.array([offsets for offsets, _ in found], np.int64).reshape(size)
    lengths = np.array([sizes for _, sizes in found], np.int64).reshape(size)
    # Along a dimension that no box cuts, all boxes have the same two coordinates.
    cut = [axis for axis in range(len(whole)) if (lengths[:, axis] != whole[axis]).any()]
    # Both limits come before any corner is made: the boxes may come from a hostile file.
    if len(cut) > MAX_CUT_DIMENSIONS:
        raise ValueError(f"is cut along {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}")
    if len(found) * len(cut) << len(cut) > MAX_COORDINATES:
        raise ValueError(f"is cut along {len(cut)} dimensions into {len(found):,} boxes, more than can be checked")
    starts, lengths = starts[:, cut], lengths[:, cut]
    corners, signs = _corners(starts, starts + lengths)
    if 0 not in whole:
        ends = np.array([[whole[axis] for axis in cut]], np.int64)
        of_array, of_signs = _corners(np.zeros_like(ends), ends)
        corners, signs = np.concatenate([corners, of_array]), np.concatenate([signs, -of_signs])
    at, count = _first_left_over(corners, signs)
    if not count:
        return None
    element = [0] * len(whole)
    for axis, value in zip(cut, at, strict=True):
        element[axis] = int(value)
    return Flaw(tuple(element), count < 0)


def _corners(starts: Integers, stops: Integers) -> tuple[Integers, Integers]:
    dimensions = starts.shape[1]
    # Arrays of shape (corners, dimensions) and (corners,).
    corners, signs = [], []
    for choice in itertools.product((False, True), repeat=dimensions):
        corners.append(np.where(np.array(choice, bool), stops, starts))
        signs.append(np.full(len(starts), -1 if sum(choice) % 2 else 1, np.int64))
    return np.concatenate(corners), np.concatenate(signs)


def _first_left_over(corners: Integers, signs: Integers) -> tuple[Integers, int]:
    """Return the first corner, in C order, with a sum of signs other than 0, and the sum; 0 if none is left."""
    if not corners.shape[1]:
        return corners[:0].reshape(-1), int(signs.sum())
    # `lexsort` sorts by its last key first.
    order = np.lexsort(corners.T[::-1])
    corners, signs = corners[order], signs[order]
    # Equal corners are neighbours now: add up the signs of each group.
    is_first = np.concatenate([[True], (corners[1:] != corners[:-1]).any(axis=1)])[: len(corners)]
    firsts = np.flatnonzero(is_first)
    sums = np.add.reduceat(signs, firsts) if len(firsts) else signs
    left = np.flatnonzero(sums)
    # Before the first corner that is left over, in C order, every element is in exactly one box.
    return (corners[firsts[left[0]]], int(sums[left[0]])) if len(left) else (corners[:0].reshape(-1), 0)


# Reading a box of a tensor into memory of any layout, on any device.

# Longer contiguous runs are read alone, shorter ones together with the bytes between them.
_LONG_RUN = 256 * 1024


class BoxTarget:
    """The memory of a box, filled part by part: host memory in C order, or the memory of a leaf."""

    def __init__(self, shape: Sequence[int], itemsize: int, host: Bytes | None, leaf: Leaf | None = None) -> None:
        self._shape = shape
        self._itemsize = itemsize
        self._host = host
        self._leaf = leaf

    @classmethod
    def of_leaf(cls, leaf: Leaf) -> "BoxTarget":
        return cls(leaf.shape, leaf.dtype.itemsize, leaf.host_bytes(), leaf)

    def contiguous(self, region: Box) -> Bytes | None:
        """Return the memory of a part of the box; None if the part is not one range of host bytes."""
        found = None if self._host is None else as_range(self._shape, region)
        if found is None or self._host is None:
            return None
        return self._host[found[0] * self._itemsize : found[1] * self._itemsize]

    def spare_bytes(self, nbytes: int) -> int:
        # `put` compacts a part before it writes it to a leaf.
        return round_up(nbytes) if self._host is None else 0

    def put(self, region: Box, data: npt.NDArray[Any], spare: Bytes) -> None:
        """Copy elements, as `words` views them, into a part of the box."""
        if self._host is not None:
            words(self._host, self._shape, self._itemsize)[region] = data
            return
        # On a device, or of a layout that host memory cannot show: compact first, then one write by the leaf.
        assert self._leaf is not None
        compact = spare[: data.size * self._itemsize]
        words(compact, data.shape, self._itemsize)[...] = data
        part = replace(self._leaf, array=self._leaf.array[region]) if region else self._leaf
        part.write(0, len(compact), compact)


def words(data: Bytes, shape: Sequence[int], itemsize: int) -> npt.NDArray[Any]:
    """Return bytes as an array of elements that numpy copies bit for bit."""
    # Not as floats: copying one may quiet a signalling NaN.
    return data.view(f"u{itemsize}" if itemsize <= 8 else "c16").reshape(shape)


def read_box(
    read: Callable[[int, int, Bytes], None],
    shape: Sequence[int],
    offsets: Sequence[int],
    out: Leaf,
    pool: BufferPool,
    most_bytes: int,
) -> None:
    """Fill a leaf with a box of a tensor; ``read(start, stop, out)`` reads a range of its C-order bytes."""
    size = out.dtype.itemsize
    wanted = box_of(offsets, out.shape)
    target = BoxTarget.of_leaf(out)
    if not out.nbytes:
        return
    for part in _parts(shape, wanted, most_bytes // size, _LONG_RUN // size):
        first, last = covering_range(shape, part)
        start, stop = first * size, last * size
        region = relative(part, wanted)
        count = prod(box_shape(part)) * size
        host = target.contiguous(region)
        if host is not None and stop - start == count:
            read(start, stop, host)
            continue
        spare = target.spare_bytes(count)
        with pool.acquire(round_up(stop - start) + spare) as buffer:
            read(start, stop, buffer[: stop - start])
            strides = [prod(shape[axis + 1 :]) * size for axis in range(len(shape))]
            base = words(buffer[: stop - start], (last - first,), size)
            # The elements of the part lie in the buffer with the strides of the full tensor.
            data = np.lib.stride_tricks.as_strided(base, box_shape(part), strides)
            target.put(region, data, buffer[round_up(stop - start) :])


def _parts(shape: Sequence[int], box: Box, most: int, long_run: int) -> Iterator[Box]:
    """Yield parts of a box: ranges of at most ``most`` elements, or short runs within such a range."""
    first, last = covering_range(shape, box)
    together = as_range(shape, box) is not None
    axis = next((axis for axis, side in enumerate(box) if side.stop - side.start > 1), None)
    if axis is None or (last - first <= most and (together or _run(shape, box) < long_run)):
        yield box
        return
    # Cut along the first dimension that can be cut: into ranges of `most`, or row by row if long runs are far apart.
    stride = prod(shape[axis + 1 :])
    step = max(1, most // stride) if together or _run(shape, box) < long_run else 1
    side = box[axis]
    for start in range(side.start, side.stop, step):
        part = slice(start, min(start + step, side.stop))
        yield from _parts(shape, (*box[:axis], part, *box[axis + 1 :]), most, long_run)


def _run(shape: Sequence[int], box: Box) -> int:
    # The contiguous elements of a row: from the last dimension that is cut to the end.
    lengths = box_shape(box)
    last = max((axis for axis in range(len(shape)) if lengths[axis] != shape[axis]), default=0)
    return prod(lengths[last:])
