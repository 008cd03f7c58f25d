"""Comparing the tensors of two checkpoints in parallel: how many elements differ, and by how much at most."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorkeep.checkpoint.load.ranges import contiguous_in, grid, reading_threads, strided_view
from tensorkeep.formats.base import Reader
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io import parallel
from tensorkeep.io.buffers import ALIGNMENT, BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import LeafKind

_CUT_BYTES = 4 * 1024**2
"""Raw bytes of a range of a view, which need not be aligned to blocks."""

_PIECE = 2**18
"""Elements that are compared at once, so that intermediate results stay in the cache of the core."""

_Reading = Callable[[int, int, Bytes], None]
"""Reads a range of a tensor's raw bytes."""


class Tolerance(NamedTuple):
    """Elements are the same when ``|a - b| <= atol + rtol * |b|``; with both 0 their bits are compared."""

    atol: float
    rtol: float


@dataclass(slots=True)
class TensorDiff:
    """How one tensor differs.

    ``different`` of its ``elements`` are beyond the tolerance; with no tolerance given, they have other bits.
    ``largest`` is the largest absolute difference, infinite for NaN against a number.
    """

    name: str
    elements: int
    different: int = 0
    largest: float = 0.0

    @property
    def share(self) -> float:
        """The fraction of elements that differ."""
        return self.different / self.elements if self.elements else 0.0


def compare(
    left: Reader,
    right: Reader,
    common: list[str],
    tolerance: Tolerance,
    threads: int,
    pool: BufferPool,
    progress: Progress | None,
) -> list[TensorDiff]:
    """Compare tensors that both checkpoints have, of equal dtypes and shapes."""
    found = {n: TensorDiff(n, left.entries[n].nbytes // left.entries[n].dtype.itemsize) for n in common}

    def is_same_view(name: str) -> bool:
        """Return whether both have the same view of a stored tensor that is compared itself."""
        alias = left.flat.aliases.get(name)
        return alias is not None and alias == right.flat.aliases.get(name) and alias.of in found

    differing = [name for name in common if not is_same_view(name)]
    full = dict.fromkeys(name for name in differing if _is_full(left, name) and _is_full(right, name))
    meter = Meter(sum(left.entries[name].nbytes for name in differing), progress)
    lock = threading.Lock()

    def add(name: str, one: _Reading, other: _Reading, start: int, stop: int, buffer: Bytes) -> None:
        """Compare a range of one tensor; the buffer is at least twice as large."""
        half = len(buffer) // 2 // ALIGNMENT * ALIGNMENT
        first, second = buffer[: stop - start], buffer[half : half + stop - start]
        one(start, stop, first)
        other(start, stop, second)
        count, largest = _differences(first, second, left.entries[name].dtype, tolerance)
        with lock:
            found[name].different += count
            found[name].largest = max(found[name].largest, largest)
        meter.add(stop - start)

    def task(name: str, start: int, stop: int) -> None:
        with pool.acquire(2 * BLOCK_BYTES) as buffer:
            add(name, _reading(left, name, pool), _reading(right, name, pool), start, stop, buffer)

    tasks = (
        functools.partial(task, name, start, stop)
        for name in full
        for start, stop in grid(0, left.entries[name].nbytes, BLOCK_BYTES)
    )
    parallel.run(tasks, reading_threads(threads, pool, left, right))
    for name in (name for name in differing if name not in full):
        # For a range that cuts blocks, the reader also holds the full blocks: short ranges, one at a time.
        buffer = np.empty(2 * _CUT_BYTES, np.uint8)
        one, other = _reading(left, name, pool), _reading(right, name, pool)
        for start, stop in grid(0, left.entries[name].nbytes, _CUT_BYTES):
            add(name, one, other, start, stop, buffer)
    return list(found.values())


def _is_full(reader: Reader, name: str) -> bool:
    alias = reader.flat.aliases.get(name)
    return alias is None or alias.is_full(reader.flat.leaves[alias.of].shape)


def _reading(reader: Reader, name: str, pool: BufferPool) -> _Reading:
    """Return a function that reads any tensor; for a strided view, the stored tensor is loaded first."""
    place = contiguous_in(reader, name)
    if place is not None:
        stored, offset = place
        return lambda start, stop, out: reader.read(stored, offset + start, offset + stop, out)
    kind: LeafKind = "tensor" if reader.entries[name].dtype.has_torch else "ndarray"
    if min(reader.flat.aliases[name].strides, default=0) < 0:
        kind = "ndarray"
    return strided_view(reader, name, kind, pool).read


def _differences(one: Bytes, other: Bytes, dtype: DType, tolerance: Tolerance) -> tuple[int, float]:
    """Return how many elements differ, and the largest absolute difference, infinite for NaN against a number."""
    count, largest = 0, 0.0
    step = _PIECE * dtype.itemsize
    for start in range(0, len(one), step):
        a, b = one[start : start + step], other[start : start + step]
        if not np.array_equal(a, b):
            found = _of_piece(a, b, dtype, tolerance)
            count, largest = count + found[0], max(largest, found[1])
    return count, largest


def _of_piece(one: Bytes, other: Bytes, dtype: DType, tolerance: Tolerance) -> tuple[int, float]:
    width = dtype.itemsize
    if width == 16:
        unlike = (one.view(np.uint64) != other.view(np.uint64)).reshape(-1, 2).any(axis=1)
    else:
        unlike = one.view(f"u{width}") != other.view(f"u{width}")
    places = np.flatnonzero(unlike)
    if width == 8 and dtype.kind in ("int", "uint"):
        distance, size = _of_long_integers(one.view(dtype.numpy)[places], other.view(dtype.numpy)[places])
    else:
        distance, size = _of_numbers(_numbers(one, dtype, places), _numbers(other, dtype, places))
    if not any(tolerance):
        return len(places), float(distance.max())
    with np.errstate(all="ignore"):
        beyond = ~(distance <= tolerance.atol + tolerance.rtol * size)
    return int(beyond.sum()), float(distance.max())


def _of_long_integers(x: Any, y: Any) -> tuple[Any, Any]:
    """Return |x - y| and |y| as float64. The subtraction is exact: float64 has no integers beyond 2**53."""
    # Modulo 2**64 the difference of the larger and the smaller is exact, whatever the signs.
    distance = np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)
    return distance.astype(np.float64), np.abs(y.astype(np.float64))


def _of_numbers(x: Any, y: Any) -> tuple[Any, Any]:
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        nan = np.isnan(x) & np.isnan(y)
        distance[np.isnan(distance) & ~nan] = np.inf
        distance[(x == y) | nan] = 0.0
        return distance, np.abs(y)


def _numbers(data: Bytes, dtype: DType, places: np.ndarray[Any, np.dtype[np.intp]]) -> Any:
    """Return the elements at some places as float64 (complex128 for complex ones)."""
    if dtype.has_numpy:
        picked = data.view(dtype.numpy)[places]
        return picked.astype(np.complex128 if dtype.kind == "complex" else np.float64)
    if dtype.kind == "complex":
        halves = data.view(np.float16).reshape(-1, 2)[places].astype(np.float64)
        return halves[:, 0] + 1j * halves[:, 1]
    return data[places].astype(np.float64)
