"""Statistics of tensors by blocks: which blocks to read, extremes, moments, NaN counts and histograms."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensorkeep.checkpoint.ranges import Range, grouped, reading_threads
from tensorkeep.formats.base import BLOCK_BYTES, Reader, StoredLeaf
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.units import format_bytes

DEFAULT_SAMPLE = 2 * 1024**3
BINS = 48
# The fraction of elements at each end that may lie beyond the range, if they would make it much wider.
_TAIL = 0.001
# The range includes the tails if they make it at most this many times as wide.
_WIDER = 1.5
_STEPS = np.linspace(0.0, 1.0, BINS + 1)
# Interpolated counts are off by rounding: subtracted before `ceil`, so that an empty bin stays empty.
_ROUNDING = 1e-6
# Positive numbers that span more than this factor have a logarithmic scale.
_DECADES = 1000.0
# Numbers that are computed with at once: their float64 copies take 1 MiB, beside the buffers of the budget.
_PIECE = 2**17
# Fewer codes are counted one by one, more codes in a table of all codes.
_FEW = 2**13
Floats = npt.NDArray[np.float64]
# Places of codes that are not finite.
_NAN, _INFINITE = -1, -2
_PACKED = "float4_e2m1fn_x2"
_HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64", _PACKED: "uint8"}


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The codes of a dtype: its elements are counted by 8 or 16 bits.

    ``values`` are the distinct finite values, ascending; ``low`` and ``high`` are the interval around each, halfway to
    its neighbours. ``place`` has the index of the value of a code, or a negative number for NaN and infinities.
    """

    values: Floats
    low: Floats
    high: Floats
    place: npt.NDArray[np.intp]
    # Dtypes of one or two bytes: a code is the element. Wider elements are rounded towards zero to the upper half of a
    # float32: sign, exponent and seven bits. Counts of codes can be added from block to block, before the range of all
    # values is known.
    exact: bool
    integers: bool


def numbers_of(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype of the numbers in elements; a complex element has two numbers."""
    return np.dtype(_HALVES[dtype.name]) if dtype.name in _HALVES else dtype.numpy


def encoded(numbers: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return the codes of numbers. Numbers that are rounded must be finite."""
    if dtype.name == _PACKED:
        # A byte has two elements of 4 bits. Their order in the tensor does not matter for counts.
        return np.concatenate((numbers & 15, numbers >> 4))
    if numbers.dtype.itemsize <= 2:
        return numbers.view(np.uint8 if numbers.dtype.itemsize == 1 else np.uint16)
    # Numbers beyond float32 become infinite, so that the distribution does not have them.
    with np.errstate(over="ignore"):
        # Little-endian: the second half is the upper one.
        return numbers.astype(np.float32).view(np.uint16)[1::2]


def _values(dtype: DType) -> Floats:
    numbers = numbers_of(dtype)
    if dtype.name == _PACKED:
        return np.asarray(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn), np.float64)
    if dtype.kind == "bool":
        # A byte of a bool tensor from a file may have any value; all but 0 are true.
        return np.asarray(np.minimum(np.arange(256), 1), np.float64)
    if numbers.itemsize <= 2:
        width = np.uint8 if numbers.itemsize == 1 else np.uint16
        return np.asarray(np.arange(256**numbers.itemsize, dtype=width).view(numbers), np.float64)
    upper = np.arange(65536, dtype=np.uint32) << 16
    # The middle of the numbers with this upper half. But around zero, most numbers are zero itself.
    middle = np.where(upper << 1 == 0, upper, upper | 0x8000).astype(np.uint32)
    return np.asarray(middle.view(np.float32), np.float64)


@cache
def codes_of(dtype: DType) -> Codes:
    exact = numbers_of(dtype).itemsize <= 2
    integers = dtype.kind in ("int", "uint", "bool") and dtype.name != _PACKED
    with np.errstate(all="ignore"):
        numbers = _values(dtype)
    place = np.full(len(numbers), _NAN, np.intp)
    place[np.isinf(numbers)] = _INFINITE
    finite = np.isfinite(numbers)
    # Values are fewer than codes: 0.0 and -0.0 have two codes.
    values, inverse = np.unique(numbers[finite], return_inverse=True)
    place[finite] = inverse
    middles = (values[:-1] + values[1:]) / 2
    # The outermost intervals are symmetric around their values.
    first, last = 2 * values[0] - middles[0], 2 * values[-1] - middles[-1]
    return Codes(values, np.append(first, middles), np.append(middles, last), place, exact, integers)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Elements by value, in bins of equal width; with ``log`` of equal width on a logarithmic scale.

    ``beyond`` counts the elements outside of ``low`` to ``high``; with ``log`` also the zeros.
    """

    low: float
    high: float
    counts: list[int]
    log: bool = False
    beyond: int = 0


class Distribution:
    """Distinct values in ascending order, with the interval around a value and its count of elements."""

    def __init__(self, values: Floats, low: Floats, high: Floats, counts: Floats) -> None:
        self.values, self.low, self.high, self.counts = values, low, high, counts
        # Counts up to and including a value: quantiles and bins are lookups in it.
        self.up_to = np.cumsum(counts)

    @property
    def total(self) -> float:
        return float(self.up_to[-1]) if len(self.up_to) else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the value that a fraction of the elements does not exceed."""
        return float(self.values[min(int(self.up_to.searchsorted(fraction * self.total)), len(self.values) - 1)])

    def counts_between(self, edges: Floats, least: float, largest: float) -> Floats:
        """Count elements between edges. The elements of a value are spread evenly over its interval."""
        ends, counts = (np.empty(2 * len(self.values)) for _ in range(2))
        ends[::2], ends[1::2] = self.low, self.high
        counts[::2], counts[1::2] = self.up_to - self.counts, self.up_to
        # No element is outside of the extremes, although an interval may be.
        np.minimum(np.maximum(ends, least, out=ends), largest, out=ends)
        # An interval that ends at the first edge counts in the first bin.
        edges = edges.copy()
        edges[0] = math.nextafter(edges[0], -math.inf)
        # The counts below an edge, linear within an interval; their differences are the bins.
        found = np.interp(edges, ends, counts)
        return found[1:] - found[:-1]


def histogram_of(found: Distribution, least: float, largest: float, *, integers: bool) -> Histogram | None:
    """Return the histogram of elements between ``least`` and ``largest``; None if the two are equal."""
    # Numbers beyond float32 have no code.
    if not (least < largest and math.isfinite(largest - least) and found.total):
        return None
    if integers:
        # A bin for each number, if there are few.
        least, largest = least - 0.5, largest + 0.5
        if largest - least <= BINS:
            edges = np.arange(least, largest + 0.5)
            return _binned(found, edges, least, largest)
    elif least >= 0 and (positive := _positive(found)) is not None:
        # By quantiles: one tiny number alone does not make a logarithmic scale.
        first, last = positive.quantile(_TAIL), positive.quantile(1 - _TAIL)
        if last > first * _DECADES:
            edges = np.geomspace(first, largest, BINS + 1)
            return _binned(positive, edges, 0.0, largest, total=found.total, log=True)
    low, high = _range(found, least, largest)
    edges = low + (high - low) * _STEPS
    # Rounding could leave the largest value outside.
    edges[-1] = high
    return _binned(found, edges, least, largest)


def _positive(found: Distribution) -> Distribution | None:
    """Return the distribution of positive numbers, or None if they are a minority."""
    kept = found.values > 0
    # A logarithmic scale cannot show zeros, so that they must be a minority.
    if 2 * found.counts[kept].sum() < found.total:
        return None
    return Distribution(found.values[kept], found.low[kept], found.high[kept], found.counts[kept])


def _range(found: Distribution, least: float, largest: float) -> tuple[float, float]:
    """Return the range of all elements, or without the tails if they make it much wider."""
    low, high = found.quantile(_TAIL), found.quantile(1 - _TAIL)
    margin = (high - low) * (_WIDER - 1) / 2
    if not margin:
        return least, largest
    return (
        least if least >= low - margin else low - margin / 4,
        largest if largest <= high + margin else high + margin / 4,
    )


def _binned(
    found: Distribution, edges: Floats, least: float, largest: float, *, total: float | None = None, log: bool = False
) -> Histogram:
    counts = found.counts_between(edges, least, largest)
    beyond = max(0, round((found.total if total is None else total) - float(counts.sum())))
    return Histogram(float(edges[0]), float(edges[-1]), np.ceil(counts - _ROUNDING).astype(int).tolist(), log, beyond)


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of the numbers of a tensor that were read. A complex element counts as two numbers.

    The extremes, ``mean`` and ``std`` (of the population) are of the finite numbers, and None without one.
    ``histogram`` is None without two different finite numbers.
    """

    numbers: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    least: float | int | None = None
    largest: float | int | None = None
    mean: float | None = None
    std: float | None = None
    histogram: Histogram | None = None

    @property
    def not_finite_text(self) -> str:
        counts = ((self.nan, "NaN"), (self.infinite, "infinite"))
        return ", ".join(f"{count:,} {what}" for count, what in counts if count)


class _Piece(NamedTuple):
    size: int
    mean: float
    # The sum of squared deviations from the mean of the piece.
    squares: float


class Accumulator:
    """Adds up the statistics of a tensor from ranges of its bytes, in any order and from any thread."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._type = numbers_of(dtype)
        self._codes: Codes = codes_of(dtype)
        self._lock = threading.Lock()
        self._counts = np.zeros(len(self._codes.place), np.int64)
        self._pieces: list[_Piece] = []
        self._numbers = self._nan = self._infinite = self._zeros = 0
        self._extremes: list[float | int] = []

    def add(self, data: Bytes) -> None:
        numbers = data.view(self._type)
        # In pieces, because the copies that the computations make are not in the memory budget.
        for first in range(0, len(numbers), _PIECE):
            self._add_piece(numbers[first : first + _PIECE])

    def _add_piece(self, numbers: npt.NDArray[Any]) -> None:
        if self._codes.exact:
            self._count(encoded(numbers, self._dtype))
            return
        # NaN in the data is NaN in the extremes, so that most pieces need no test of each element.
        extremes: tuple[Any, ...] = numbers.min(), numbers.max()
        nan = infinite = 0
        count = len(numbers)
        if not np.isfinite(extremes).all():
            nan = int(np.count_nonzero(np.isnan(numbers)))
            numbers = numbers[np.isfinite(numbers)]
            infinite = count - nan - len(numbers)
            extremes = (numbers.min(), numbers.max()) if len(numbers) else ()
        self._count(encoded(numbers, self._dtype))
        zeros = len(numbers) - int(np.count_nonzero(numbers))
        piece = _moments(numbers)
        with self._lock:
            self._numbers += count
            self._nan += nan
            self._infinite += infinite
            self._zeros += zeros
            self._pieces.append(piece)
            # Integers of Python are exact; int64 would be rounded by a comparison with float64.
            found = [*self._extremes, *(each.item() for each in extremes)]
            self._extremes = [min(found), max(found)] if found else []

    def _count(self, codes: npt.NDArray[Any]) -> None:
        # Few codes are added one by one: a table of all 65,536 counts would take longer than a small tensor.
        if len(codes) < _FEW:
            with self._lock:
                np.add.at(self._counts, codes, 1)
            return
        counts = np.bincount(codes, minlength=len(self._counts))
        with self._lock:
            self._counts += counts

    def result(self) -> TensorStatistics:
        codes = np.flatnonzero(self._counts)
        counts = self._codes.place[codes], self._counts[codes]
        distribution = self._distribution(*counts)
        if not self._codes.exact:
            mean, std = _combined(self._pieces)
            least, largest = self._extremes or (None, None)
            found = TensorStatistics(self._numbers, self._nan, self._infinite, self._zeros, least, largest, mean, std)
        else:
            found = self._of_codes(distribution, *counts)
        if found.least is None or found.largest is None:
            return found
        histogram = histogram_of(distribution, float(found.least), float(found.largest), integers=self._codes.integers)
        return replace(found, histogram=histogram)

    def _distribution(self, places: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Distribution:
        # NaN and infinities have negative places.
        finite = places >= 0
        # Two codes may have one value: 0.0 and -0.0.
        distinct, inverse = np.unique(places[finite], return_inverse=True)
        total = np.asarray(np.bincount(inverse, counts[finite], minlength=len(distinct)), np.float64)
        table = self._codes
        return Distribution(table.values[distinct], table.low[distinct], table.high[distinct], total)

    def _of_codes(self, found: Distribution, places: npt.NDArray[Any], counts: npt.NDArray[Any]) -> TensorStatistics:
        # Exact integers, and one pass over at most 65,536 codes instead of all elements.
        numbers, nan, infinite = (int(counts[chosen].sum()) for chosen in (..., places == _NAN, places == _INFINITE))
        count = numbers - nan - infinite
        if not count:
            return TensorStatistics(numbers, nan, infinite)
        values = found.values
        mean = float((values * found.counts).sum()) / count
        std = math.sqrt(float((found.counts * (values - mean) ** 2).sum()) / count)
        zeros = int(found.counts[values == 0].sum())
        number = int if self._codes.integers else float
        return TensorStatistics(numbers, nan, infinite, zeros, number(values[0]), number(values[-1]), mean, std)


def _moments(numbers: npt.NDArray[Any]) -> _Piece:
    if not len(numbers):
        return _Piece(0, 0.0, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        # float64, because sums of squares of float16 and bfloat16 overflow or lose all digits.
        wide = numbers.astype(np.float64)
        mean = float(wide.mean())
        # Around the mean of the piece: sums of raw squares would cancel.
        wide -= mean
        # `np.dot` would start threads of its own beside ours.
        return _Piece(len(numbers), mean, float(np.einsum("i,i->", wide, wide)))


def _combined(pieces: list[_Piece]) -> tuple[float | None, float | None]:
    count = sum(piece.size for piece in pieces)
    if not count:
        return None, None
    try:
        # The exact sums of `fsum` do not depend on the order of the threads.
        mean = math.fsum(piece.size * piece.mean for piece in pieces) / count
        # Chan, Golub and LeVeque: deviations of the pieces, and the deviations of their means.
        squares = math.fsum(piece.squares + piece.size * (piece.mean - mean) ** 2 for piece in pieces)
        return mean, math.sqrt(squares / count)
    except (OverflowError, ValueError):
        return None, None  # beyond float64


@dataclass(frozen=True, slots=True)
class Sample:
    """The ranges to read of stored tensors: 1 of ``every`` blocks, in total ``nbytes`` of ``total`` raw bytes."""

    ranges: Mapping[str, list[tuple[int, int]]]
    every: int
    nbytes: int
    total: int

    @property
    def text(self) -> str:
        if self.every == 1:
            return f"Every element was read ({format_bytes(self.total)})."
        return (
            f"The statistics are of a sample: 1 of every {self.every} blocks of a tensor, at least one block, together "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.total)}."
        )


def choose_sample(reader: Reader, limit: int) -> Sample:
    """Return an evenly spread sample of about ``limit`` raw bytes, with at least one block of every tensor."""
    leaves = reader.flat.leaves
    steps = {name: _step(reader.block_bytes(name), leaf) for name, leaf in leaves.items()}
    total = sum(leaf.nbytes for leaf in leaves.values())
    every = 1
    while True:
        ranges = {name: list(_ranges(leaf.nbytes, steps[name], every)) for name, leaf in leaves.items()}
        nbytes = sum(stop - start for each in ranges.values() for start, stop in each)
        # It ends when every tensor has only one block left to read.
        if nbytes <= limit or all(len(each) <= 1 for each in ranges.values()):
            return Sample(ranges, every, nbytes, total)
        # Each doubling halves what is read of large tensors.
        every *= 2


def _step(block_bytes: int, leaf: StoredLeaf) -> int:
    """Return the bytes of a range: one block, several small blocks, or a part of a block larger than a buffer."""
    # Whole blocks, because a coded block is decoded as a whole.
    step = BLOCK_BYTES // block_bytes * block_bytes or BLOCK_BYTES
    return max(step // leaf.dtype.itemsize * leaf.dtype.itemsize, leaf.dtype.itemsize)


def _ranges(nbytes: int, step: int, every: int) -> Iterator[tuple[int, int]]:
    """Yield 1 of ``every`` ranges of a tensor, from the middle of its neighbours."""
    blocks = -(-nbytes // step)
    count = -(-blocks // every)
    for number in range(count):
        start = (2 * number + 1) * blocks // (2 * count) * step
        yield start, min(start + step, nbytes)


def read_ranges(
    reader: Reader,
    ranges: Mapping[str, list[tuple[int, int]]],
    use: Callable[[str, Bytes], None],
    *,
    threads: int,
    pool: BufferPool,
    progress: Progress | None = None,
) -> None:
    """Read ranges of stored tensors in parallel, and call ``use`` with the name and the bytes of each."""
    meter = Meter(sum(stop - start for each in ranges.values() for start, stop in each), progress)

    def read(group: list[Range]) -> None:
        # One buffer for the group: ranges of small tensors are read by one task.
        with pool.acquire(max(stop - start for _, start, stop in group)) as buffer:
            for name, start, stop in group:
                data = buffer[: stop - start]
                reader.read(name, start, stop, data)
                use(name, data)
                meter.add(stop - start)

    chosen = ((name, *place) for name, places in ranges.items() for place in places)
    parallel.run((partial(read, group) for group in grouped(chosen)), reading_threads(threads, pool, reader))


def measure(
    reader: Reader, sample: Sample, *, threads: int, pool: BufferPool, progress: Progress | None = None
) -> dict[str, TensorStatistics]:
    leaves = reader.flat.leaves
    left = {name: len(ranges) for name, ranges in sample.ranges.items()}
    # Empty tensors have no block that would create their statistics.
    found = {name: Accumulator(leaves[name].dtype).result() for name, count in left.items() if not count}
    begun: dict[str, Accumulator] = {}
    lock = threading.Lock()

    # The counts of a tensor are dropped after its last block, so that memory does not grow with the number of tensors.
    def use(name: str, data: Bytes) -> None:
        with lock:
            if name not in begun:
                begun[name] = Accumulator(leaves[name].dtype)
        begun[name].add(data)
        with lock:
            left[name] -= 1
            ended = begun.pop(name) if not left[name] else None
        if ended is not None:
            found[name] = ended.result()

    read_ranges(reader, sample.ranges, use, threads=threads, pool=pool, progress=progress)
    return {name: found[name] for name in leaves}
