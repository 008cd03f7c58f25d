"""Reading a box of a tensor into memory of any layout, on any device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.formats.boxes import Box, as_range, box_of, box_shape, covering_range, relative
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.buffers import BufferPool, round_up
from tensorkeep.io.files import Bytes
from tensorkeep.state.leaf import Leaf

_LONG_RUN = 256 * 1024
"""Bytes that lie together, from which on they are read alone; shorter runs are read with what is between them."""


class BoxTarget:
    """Memory of a box that is filled part by part: host memory in C order, or that of a leaf."""

    def __init__(self, shape: Sequence[int], itemsize: int, host: Bytes | None, leaf: Leaf | None = None) -> None:
        self._shape = shape
        self._itemsize = itemsize
        self._host = host
        self._leaf = leaf

    @classmethod
    def of_leaf(cls, leaf: Leaf) -> "BoxTarget":
        """Return the memory of a leaf."""
        return cls(leaf.shape, leaf.dtype.itemsize, leaf.host_bytes(), leaf)

    def contiguous(self, region: Box) -> Bytes | None:
        """Return the memory of a part of the box; None if that is not one range of bytes of this host."""
        found = None if self._host is None else as_range(self._shape, region)
        if found is None or self._host is None:
            return None
        return self._host[found[0] * self._itemsize : found[1] * self._itemsize]

    def spare_bytes(self, nbytes: int) -> int:
        """Return the memory that `put` needs for a part of this size."""
        return round_up(nbytes) if self._host is None else 0

    def put(self, region: Box, data: npt.NDArray[Any], spare: Bytes) -> None:
        """Copy elements, as `words` views them, into a part of the box."""
        if self._host is not None:
            words(self._host, self._shape, self._itemsize)[region] = data
            return
        assert self._leaf is not None
        compact = spare[: data.size * self._itemsize]
        words(compact, data.shape, self._itemsize)[...] = data
        part = replace(self._leaf, array=self._leaf.array[region]) if region else self._leaf
        part.write(0, len(compact), compact)


def words(data: Bytes, shape: Sequence[int], itemsize: int) -> npt.NDArray[Any]:
    """Return bytes as an array of elements that numpy copies bit for bit."""
    return data.view(f"u{itemsize}" if itemsize <= 8 else "c16").reshape(shape)


def read_box(
    read: Callable[[int, int, Bytes], None], shape: Sequence[int], offsets: Sequence[int], out: Leaf, pool: BufferPool
) -> None:
    """Fill a leaf with a box of a tensor, of which ``read`` returns ranges of bytes in C order.

    Rows that are short are read with what is between them, in ranges of at most one block.
    """
    size = out.dtype.itemsize
    wanted = box_of(offsets, out.shape)
    target = BoxTarget.of_leaf(out)
    if not out.nbytes:
        return
    for part in _parts(shape, wanted, BLOCK_BYTES // size, _LONG_RUN // size):
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
            data = np.lib.stride_tricks.as_strided(base, box_shape(part), strides)
            target.put(region, data, buffer[round_up(stop - start) :])


def _parts(shape: Sequence[int], box: Box, most: int, long_run: int) -> Iterator[Box]:
    """Yield a box in parts that each are one range of at most ``most`` elements, or short runs within such a range."""
    first, last = covering_range(shape, box)
    together = as_range(shape, box) is not None
    axis = next((axis for axis, side in enumerate(box) if side.stop - side.start > 1), None)
    if axis is None or (last - first <= most and (together or _run(shape, box) < long_run)):
        yield box
        return
    stride = prod(shape[axis + 1 :])
    step = max(1, most // stride) if together or _run(shape, box) < long_run else 1
    side = box[axis]
    for start in range(side.start, side.stop, step):
        part = slice(start, min(start + step, side.stop))
        yield from _parts(shape, (*box[:axis], part, *box[axis + 1 :]), most, long_run)


def _run(shape: Sequence[int], box: Box) -> int:
    """Return the number of elements of a box that lie together."""
    lengths = box_shape(box)
    last = max((axis for axis in range(len(shape)) if lengths[axis] != shape[axis]), default=0)
    return prod(lengths[last:])
