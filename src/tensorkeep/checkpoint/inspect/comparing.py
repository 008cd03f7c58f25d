"""Comparing the tensors of two checkpoints in parallel, range by range."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from tensorkeep.checkpoint.inspect.differences import Tolerance, differences
from tensorkeep.checkpoint.load.ranges import grid
from tensorkeep.checkpoint.load.views import contiguous_in, strided_view
from tensorkeep.formats.base import BLOCK_BYTES, Reader, thread_bytes
from tensorkeep.io import parallel
from tensorkeep.io.buffers import ALIGNMENT, BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import LeafKind

_CUT_BYTES = 4 * 1024**2
"""Raw bytes of a range of a view, which need not be aligned to blocks."""

_Reading = Callable[[int, int, Bytes], None]
"""Reads a range of a tensor's raw bytes."""


@dataclass(slots=True)
class TensorDiff:
    """How one tensor differs.

    Attributes
    ----------
    name : str
    elements : int
        Elements of the tensor.
    different : int
        Elements beyond the tolerance; with no tolerance given, elements with other bits.
    largest : float
        The largest absolute difference; NaN against a number counts as infinite.
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
    differing = [n for n in common if not _same_view(left, right, n, found)]
    whole = [n for n in differing if _is_whole(left, n) and _is_whole(right, n)]
    meter = Meter(sum(left.entries[n].nbytes for n in differing), progress)
    comparison = _Comparison(tolerance, meter)

    def task(name: str, start: int, stop: int) -> None:
        one, other = _run(left, name), _run(right, name)
        with pool.acquire(2 * BLOCK_BYTES) as buffer:
            comparison.add(found[name], left.entries[name].dtype, one, other, start, stop, buffer)

    tasks = (
        functools.partial(task, name, start, stop)
        for name in whole
        for start, stop in grid(0, left.entries[name].nbytes, BLOCK_BYTES)
    )
    parallel.run(tasks, _threads(left, right, common, threads, pool))
    for name in (n for n in differing if not (_is_whole(left, n) and _is_whole(right, n))):
        # For a range that cuts blocks, the reader also holds the full blocks: short ranges, one at a time.
        buffer = np.empty(2 * _CUT_BYTES, np.uint8)
        one, other = _reading(left, name, pool), _reading(right, name, pool)
        for start, stop in grid(0, left.entries[name].nbytes, _CUT_BYTES):
            comparison.add(found[name], left.entries[name].dtype, one, other, start, stop, buffer)
    return list(found.values())


class _Comparison:
    """Adds up the differences that many threads find."""

    def __init__(self, tolerance: Tolerance, meter: Meter) -> None:
        self._tolerance = tolerance
        self._meter = meter
        self._lock = threading.Lock()

    def add(
        self, found: TensorDiff, dtype: DType, left: _Reading, right: _Reading, start: int, stop: int, buffer: Bytes
    ) -> None:
        """Compare a range of one tensor; the buffer is at least twice as large."""
        half = len(buffer) // 2 // ALIGNMENT * ALIGNMENT
        one, other = buffer[: stop - start], buffer[half : half + stop - start]
        left(start, stop, one)
        right(start, stop, other)
        count, largest = differences(one, other, dtype, self._tolerance)
        with self._lock:
            found.different += count
            found.largest = max(found.largest, largest)
        self._meter.add(stop - start)


def _same_view(left: Reader, right: Reader, name: str, compared: Container[str]) -> bool:
    """Return whether both have the same view of a stored tensor that is compared itself."""
    a, b = left.flat.aliases.get(name), right.flat.aliases.get(name)
    return a is not None and a == b and a.of in compared


def _is_whole(reader: Reader, name: str) -> bool:
    alias = reader.flat.aliases.get(name)
    return alias is None or alias.is_full(reader.flat.leaves[alias.of].shape)


def _stored(reader: Reader, name: str) -> str:
    alias = reader.flat.aliases.get(name)
    return name if alias is None else alias.of


def _run(reader: Reader, name: str) -> _Reading:
    """Return a function that reads a tensor that is contiguous in a stored tensor."""
    run = contiguous_in(reader, name)
    assert run is not None
    stored, offset = run
    return lambda start, stop, out: reader.read(stored, offset + start, offset + stop, out)


def _reading(reader: Reader, name: str, pool: BufferPool) -> _Reading:
    """Return a function that reads any tensor; for a strided view, the stored tensor is loaded first."""
    if contiguous_in(reader, name) is not None:
        return _run(reader, name)
    kind: LeafKind = "tensor" if reader.entries[name].dtype.has_torch else "ndarray"
    if min(reader.flat.aliases[name].strides, default=0) < 0:
        kind = "ndarray"
    return strided_view(reader, name, kind, pool).read


def _threads(left: Reader, right: Reader, names: list[str], wanted: int, pool: BufferPool) -> int:
    # Both ranges, and what a reader needs in addition: a full block and its stored bytes, if its blocks are larger.
    block_bytes = max(
        (reader.block_bytes(_stored(reader, name)) for reader in (left, right) for name in names), default=BLOCK_BYTES
    )
    more = max(left.buffers, right.buffers) - 2
    beside = thread_bytes(block_bytes, buffers=more + (1 if block_bytes <= BLOCK_BYTES else 2))
    return pool.threads(wanted, thread_bytes(BLOCK_BYTES, buffers=2) + beside)
