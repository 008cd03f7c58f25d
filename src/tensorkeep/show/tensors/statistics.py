"""Statistics of one tensor, added up from its blocks: smallest, largest, mean, deviation, NaN, histogram."""

import math
import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorkeep.show.tensors.codes import INFINITE, NAN, Codes, codes_of, encoded, numbers_of
from tensorkeep.show.tensors.histogram import Distribution, Histogram, histogram_of
from tensorkeep.state.dtypes import DType
from tensorkeep.storage.direct_io import Bytes

_PIECE = 2**17
"""Numbers that are computed with at once: their float64 copies take 1 MiB, beside the buffers of the budget."""

_FEW = 2**13
"""Fewer codes are sorted, more are counted in a table of all codes."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the numbers of a tensor that were read; of complex elements, of both their parts.

    Attributes
    ----------
    numbers : int
        How many numbers were read.
    nan, infinite, zeros : int
    least, largest, mean, std : float or None
        Of the finite numbers, None without any. The deviation is that of the numbers, divided by their count.
    histogram : Histogram or None
        None without two different finite numbers.
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

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "histogram": None if self.histogram is None else self.histogram.as_dict()
        }


class _Piece(NamedTuple):
    """What is added up of a piece: its place in the tensor, and its size, mean and squared deviations."""

    start: int
    size: int
    mean: float
    squares: float


class Accumulator:
    """Adds up the statistics of a tensor from ranges of its bytes, which any threads pass; the order does not count."""

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._type = numbers_of(dtype)
        self._codes: Codes = codes_of(dtype)
        self._lock = threading.Lock()
        self._sorted: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
        self._table: npt.NDArray[np.int64] | None = None
        self._pieces: list[_Piece] = []
        self._numbers = self._nan = self._infinite = self._zeros = 0
        self._extremes: list[float | int] = []

    def add(self, start: int, data: Bytes) -> None:
        """Add a range of the raw bytes of the tensor, which begins at its byte ``start``."""
        numbers = data.view(self._type)
        for first in range(0, len(numbers), _PIECE):
            self._add_piece(start + first * self._type.itemsize, numbers[first : first + _PIECE])

    def _add_piece(self, start: int, numbers: npt.NDArray[Any]) -> None:
        if self._codes.exact:
            counted = self._count(encoded(numbers, self._dtype))
            with self._lock:
                self._merge(*counted)
            return
        extremes: tuple[Any, ...] = numbers.min(), numbers.max()
        nan = infinite = 0
        count = len(numbers)
        if not np.isfinite(extremes).all():
            nan = int(np.count_nonzero(np.isnan(numbers)))
            numbers = numbers[np.isfinite(numbers)]
            infinite = count - nan - len(numbers)
            extremes = (numbers.min(), numbers.max()) if len(numbers) else ()
        counted = self._count(encoded(numbers, self._dtype))
        zeros = len(numbers) - int(np.count_nonzero(numbers))
        piece = _moments(start, numbers)
        with self._lock:
            self._merge(*counted)
            self._numbers += count
            self._nan += nan
            self._infinite += infinite
            self._zeros += zeros
            self._pieces.append(piece)
            # Python's integers are exact, and compare with each other and with floats.
            self._extremes = _outermost([*self._extremes, *(each.item() for each in extremes)])

    def _count(self, codes: npt.NDArray[Any]) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return the distinct codes, or None for all of them, and the count of each."""
        if len(codes) < _FEW:
            return np.unique(codes, return_counts=True)
        return None, np.bincount(codes, minlength=len(self._codes.place))

    def _merge(self, codes: npt.NDArray[Any] | None, counts: npt.NDArray[Any]) -> None:
        if self._table is None:
            if codes is not None and self._sorted is None:
                self._sorted = codes, counts
                return
            self._table = np.zeros(len(self._codes.place), np.int64)
            if self._sorted is not None:
                first, its_counts = self._sorted
                self._table[first] += its_counts
        if codes is None:
            self._table += counts
        else:
            self._table[codes] += counts

    def result(self) -> Statistics:
        """Return the statistics of what was added."""
        counts = self._distinct()
        distribution = self._distribution(*counts)
        if not self._codes.exact:
            mean, std = _together(sorted(self._pieces))
            least, largest = self._extremes or (None, None)
            found = Statistics(self._numbers, self._nan, self._infinite, self._zeros, least, largest, mean, std)
        else:
            found = self._of_codes(distribution, *counts)
        if found.least is None or found.largest is None:
            return found
        histogram = histogram_of(distribution, float(found.least), float(found.largest), integers=self._codes.integers)
        return replace(found, histogram=histogram)

    def _distinct(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the places of the codes that occur, and the count of each."""
        if self._table is not None:
            codes = np.flatnonzero(self._table)
            return self._codes.place[codes], self._table[codes]
        if self._sorted is not None:
            return self._codes.place[self._sorted[0]], self._sorted[1]
        return np.zeros(0, np.intp), np.zeros(0, np.int64)

    def _distribution(self, places: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Distribution:
        finite = places >= 0
        # Two codes may have one value: 0.0 and -0.0.
        distinct, inverse = np.unique(places[finite], return_inverse=True)
        total = np.asarray(np.bincount(inverse, counts[finite], minlength=len(distinct)), np.float64)
        table = self._codes
        return Distribution(table.values[distinct], table.low[distinct], table.high[distinct], total)

    def _of_codes(self, found: Distribution, places: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Statistics:
        """Return the statistics without the histogram, all of which follow from the counts of exact codes."""
        numbers, nan, infinite = (int(counts[chosen].sum()) for chosen in (..., places == NAN, places == INFINITE))
        count = numbers - nan - infinite
        if not count:
            return Statistics(numbers, nan, infinite)
        values = found.values
        mean = float((values * found.counts).sum()) / count
        std = math.sqrt(float((found.counts * (values - mean) ** 2).sum()) / count)
        zeros = int(found.counts[values == 0].sum())
        least, largest = (float(values[end]) for end in (0, -1))
        if self._codes.integers:
            return Statistics(numbers, nan, infinite, zeros, int(least), int(largest), mean, std)
        return Statistics(numbers, nan, infinite, zeros, least, largest, mean, std)


def _moments(start: int, numbers: npt.NDArray[Any]) -> _Piece:
    if not len(numbers):
        return _Piece(start, 0, 0.0, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = numbers.astype(np.float64)
        mean = float(wide.mean())
        wide -= mean
        # Unlike `np.dot`, without threads of its own beside ours.
        return _Piece(start, len(numbers), mean, float(np.einsum("i,i->", wide, wide)))


def _together(pieces: list[_Piece]) -> tuple[float | None, float | None]:
    """Return mean and deviation of all pieces, rounded once, so that they do not depend on the threads."""
    count = sum(piece.size for piece in pieces)
    if not count:
        return None, None
    try:
        mean = math.fsum(piece.size * piece.mean for piece in pieces) / count
        squares = math.fsum(piece.squares + piece.size * (piece.mean - mean) ** 2 for piece in pieces)
        return mean, math.sqrt(squares / count)
    except (OverflowError, ValueError):
        return None, None  # beyond float64


def _outermost(numbers: list[float | int]) -> list[float | int]:
    return [min(numbers), max(numbers)] if numbers else []
