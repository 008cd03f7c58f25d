"""Comparing the tensors of two checkpoints in parallel: how many elements differ, and by how much."""

import functools
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tensorkeep.checkpoint.inspect.distances import Distances, Tolerance, distances, norm_of_equal
from tensorkeep.checkpoint.load.ranges import contiguous_in, grid, reading_threads, strided_view
from tensorkeep.formats.base import Entry, Reader
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import LeafKind

_CUT_BYTES = 4 * 1024**2
"""Raw bytes of a range of a view, which need not be aligned to blocks."""

_Reading = Callable[[int, int, Bytes], None]
"""Reads a range of a tensor's raw bytes."""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one tensor differs, or the tensors of one layer together.

    ``different`` of its ``elements`` are beyond the tolerance; with no tolerance given, they have other bits. All else
    is computed in float64.

    Together, tensors of floating point and complex numbers are not mixed with integers, such as random states: if there
    are any, distances and norms are theirs alone, while ``elements`` and ``different`` count every tensor.

    Attributes
    ----------
    floating : bool
        Whether distances and norms are those of floating point or complex numbers, rather than of integers.
    largest : float
        The largest absolute difference, infinite for NaN against a number.
    norm_a, norm_b, norm_difference, dot : float
        The L2 norms of a, b and a - b, and the dot product of a and b, over the elements that are finite in both; an
        infinity or NaN against another value makes ``norm_difference`` infinite. All are 0 for equal tensors.
    """

    name: str
    elements: int
    different: int = 0
    largest: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_difference: float = 0.0
    dot: float = 0.0
    floating: bool = True

    @property
    def share(self) -> float:
        """The fraction of elements that differ."""
        return self.different / self.elements if self.elements else 0.0

    @property
    def relative_l2(self) -> float:
        """The relative L2 difference ``||a - b|| / ||a||``; infinite if only a is 0."""
        if self.norm_difference in (0, math.inf):
            return self.norm_difference
        return self.norm_difference / self.norm_a if self.norm_a else math.inf

    @property
    def cosine(self) -> float | None:
        """The cosine similarity of a and b; None if one of them is 0."""
        product = self.norm_a * self.norm_b
        return max(-1.0, min(1.0, self.dot / product)) if product and math.isfinite(product) else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, with what follows from them."""
        return {**asdict(self), "share": self.share, "relative_l2": self.relative_l2, "cosine": self.cosine}


def together(name: str, tensors: Iterable[TensorDiff]) -> TensorDiff:
    """Return how several tensors differ, with the distances of those of floating point if there are any."""
    found = list(tensors)
    measured = [each for each in found if each.floating] or found
    return TensorDiff(
        name,
        elements=sum(each.elements for each in found),
        different=sum(each.different for each in found),
        largest=max((each.largest for each in measured), default=0.0),
        norm_a=math.hypot(*(each.norm_a for each in measured)),
        norm_b=math.hypot(*(each.norm_b for each in measured)),
        norm_difference=math.hypot(*(each.norm_difference for each in measured)),
        dot=math.fsum(each.dot for each in measured),
        floating=all(each.floating for each in measured),
    )


def compare(
    left: Reader,
    right: Reader,
    common: list[str],
    tolerance: Tolerance,
    threads: int,
    pool: BufferPool,
    progress: Progress | None,
) -> list[TensorDiff]:
    """Compare tensors that both checkpoints have, of equal shapes; those of other dtypes by their values."""

    def is_same_view(name: str) -> bool:
        """Return whether both have the same view of a stored tensor that is compared itself."""
        alias = left.flat.aliases.get(name)
        same_type = left.entries[name].dtype == right.entries[name].dtype
        return alias is not None and alias == right.flat.aliases.get(name) and alias.of in compared and same_type

    compared = set(common)
    comparison = _Comparison(left, right, tolerance, pool)
    separate = [name for name in common if not is_same_view(name)]
    full = dict.fromkeys(name for name in separate if _is_full(left, name) and _is_full(right, name))
    meter = Meter(sum(left.entries[name].nbytes for name in separate), progress)
    usable = reading_threads(threads, pool, left, right)
    parallel.run(
        (
            functools.partial(comparison.read_and_add, name, start, stop, meter)
            for name in full
            for start, stop in grid(0, _elements(left.entries[name]), BLOCK_BYTES // comparison.widest(name))
        ),
        usable,
    )
    for name in (name for name in separate if name not in full):
        comparison.add_view(name, meter)
    # The norm of a tensor that has changed includes the ranges that have not.
    parallel.run(
        (
            functools.partial(comparison.add_equal, name, start, stop)
            for name, ranges in comparison.equal.items()
            if any(part.different for _, part in comparison.parts[name])
            for start, stop in ranges
        ),
        usable,
    )
    return [comparison.result(name) for name in common]


class _Comparison:
    """The parts of each tensor that were compared, by their first elements, and the ranges that are equal."""

    def __init__(self, left: Reader, right: Reader, tolerance: Tolerance, pool: BufferPool) -> None:
        self.left, self.right = left, right
        self._tolerance = tolerance
        self._pool = pool
        self._lock = threading.Lock()
        self.parts: dict[str, list[tuple[int, Distances]]] = {name: [] for name in left.entries}
        self.equal: dict[str, list[tuple[int, int]]] = {}

    def dtypes(self, name: str) -> tuple[DType, DType]:
        return self.left.entries[name].dtype, self.right.entries[name].dtype

    def widest(self, name: str) -> int:
        """Return the larger of the two item sizes of a tensor."""
        return max(dtype.itemsize for dtype in self.dtypes(name))

    def read_and_add(self, name: str, start: int, stop: int, meter: Meter) -> None:
        """Compare a range of elements of a full tensor."""
        one, other = _reading(self.left, name, self._pool), _reading(self.right, name, self._pool)
        with self._pool.acquire(2 * BLOCK_BYTES) as buffer:
            part = self._distances(name, one, other, start, stop, (buffer[:BLOCK_BYTES], buffer[BLOCK_BYTES:]))
        with self._lock:
            if part is None:
                self.equal.setdefault(name, []).append((start, stop))
            else:
                self.parts[name].append((start, part))
        meter.add((stop - start) * self.dtypes(name)[0].itemsize)

    def add_view(self, name: str, meter: Meter) -> None:
        """Compare a tensor that is a strided view in one of them."""
        # For a range that cuts blocks, the reader also holds the full blocks: short ranges, one at a time.
        buffers = np.empty(_CUT_BYTES, np.uint8), np.empty(_CUT_BYTES, np.uint8)
        one, other = _reading(self.left, name, self._pool), _reading(self.right, name, self._pool)
        dtype, _ = self.dtypes(name)
        for start, stop in grid(0, _elements(self.left.entries[name]), _CUT_BYTES // self.widest(name)):
            part = self._distances(name, one, other, start, stop, buffers)
            equal = None if part else norm_of_equal(buffers[0][: (stop - start) * dtype.itemsize], dtype)
            self.parts[name].append((start, part or equal or Distances()))
            meter.add((stop - start) * dtype.itemsize)

    def add_equal(self, name: str, start: int, stop: int) -> None:
        """Add the norm of a range that is equal in both."""
        dtype, _ = self.dtypes(name)
        size = dtype.itemsize
        with self._pool.acquire(BLOCK_BYTES) as buffer:
            data = buffer[: (stop - start) * size]
            _reading(self.left, name, self._pool)(start * size, stop * size, data)
            part = norm_of_equal(data, dtype)
        with self._lock:
            self.parts[name].append((start, part))

    def _distances(
        self, name: str, one: _Reading, other: _Reading, start: int, stop: int, buffers: tuple[Bytes, Bytes]
    ) -> Distances | None:
        a, b = (dtype.itemsize for dtype in self.dtypes(name))
        first, second = buffers[0][: (stop - start) * a], buffers[1][: (stop - start) * b]
        one(start * a, stop * a, first)
        other(start * b, stop * b, second)
        return distances(first, second, self.dtypes(name), self._tolerance)

    def result(self, name: str) -> TensorDiff:
        """Return how a tensor differs."""
        total = Distances.total(part for _, part in sorted(self.parts[name]))
        elements = _elements(self.left.entries[name])
        return TensorDiff(
            name,
            elements,
            total.different,
            total.largest,
            norm_a=math.sqrt(total.first),
            norm_b=math.sqrt(total.second),
            norm_difference=math.sqrt(total.difference),
            dot=total.dot,
            floating=any(dtype.kind in ("float", "complex") for dtype in self.dtypes(name)),
        )


def _elements(entry: Entry) -> int:
    return entry.nbytes // entry.dtype.itemsize


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
