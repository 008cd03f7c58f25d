"""The arithmetic of a comparison: how far two ranges of numbers are apart, in float64, a piece at a time."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import DType

_PIECE = 2**13
"""Elements that are compared at once: float64 results of this size stay in the cache, and need no new pages."""


class Tolerance(NamedTuple):
    """Elements are the same when ``|a - b| <= atol + rtol * |b|``; with both 0 their bits are compared."""

    atol: float
    rtol: float


class Distances(NamedTuple):
    """Sums over a range: the elements that differ, the largest distance, and squares.

    ``difference``, ``first`` and ``second`` are the sums of |a - b|^2, |a|^2 and |b|^2, and ``dot`` that of a * b, over
    the elements that are finite in both. An infinity or NaN against another value makes ``difference`` infinite.
    """

    different: int = 0
    largest: float = 0.0
    difference: float = 0.0
    first: float = 0.0
    second: float = 0.0
    dot: float = 0.0

    @staticmethod
    def total(parts: Iterable["Distances"]) -> "Distances":
        """Return the sums over all parts, rounded once, so that they do not depend on the threads."""
        columns = tuple(zip(Distances(), *parts, strict=True))
        sums = (math.inf if math.inf in column else math.fsum(column) for column in columns[2:])
        return Distances(sum(columns[0]), max(columns[1]), *sums)


def distances(one: Bytes, other: Bytes, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Distances | None:
    """Return how far two ranges are apart, or None if their dtypes and bits are the same."""
    a, b = dtypes
    if a == b and all(np.array_equal(x, y) for x, y in _pieces(one, other, dtypes)):
        return None
    return Distances.total([_of_piece(x, y, dtypes, tolerance) for x, y in _pieces(one, other, dtypes)])


def norm_of_equal(data: Bytes, dtype: DType) -> Distances:
    """Return the sums over a range that is the same in both."""
    same = dtype, dtype
    return Distances.total([_of_piece(x, x, same, Tolerance(0, 0)) for x, _ in _pieces(data, data, same)])


def _pieces(one: Bytes, other: Bytes, dtypes: tuple[DType, DType]) -> Iterator[tuple[Bytes, Bytes]]:
    a, b = (_PIECE * dtype.itemsize for dtype in dtypes)
    for index in range(-(-len(one) // a)):
        yield one[index * a : (index + 1) * a], other[index * b : (index + 1) * b]


def _of_piece(one: Bytes, other: Bytes, dtypes: tuple[DType, DType], tolerance: Tolerance) -> Distances:
    a, b = dtypes
    x, y = _numbers(one, a), _numbers(other, b)
    with np.errstate(all="ignore"):
        first, second = _dot(x, x), _dot(y, y)
        all_finite = math.isfinite(first + second)
        if a == b and a.itemsize == 8 and a.kind in ("int", "uint"):
            distance = _of_long_integers(one.view(a.numpy), other.view(a.numpy))
        else:
            distance = np.abs(x - y) if all_finite else _of_numbers(x, y)
        if any(tolerance):
            within = distance <= tolerance.atol + tolerance.rtol * np.abs(y)
            # An infinity is within the tolerance of nothing else, whatever the tolerance times infinity is.
            different = (distance != 0) & ~(within & np.isfinite(distance))
        else:
            different = _unlike(one, other, a.itemsize) if a == b else distance != 0
        if not all_finite:
            # What is infinite or NaN in one of them only, and so is its distance, makes the sum infinite.
            finite = np.isfinite(x) & np.isfinite(y)
            x, y = np.where(finite, x, 0), np.where(finite, y, 0)
            first, second = _dot(x, x), _dot(y, y)
        squares, dot = _dot(distance, distance), _dot(x, y)
        return Distances(int(np.count_nonzero(different)), float(distance.max()), squares, first, second, dot)


def _unlike(one: Bytes, other: Bytes, width: int) -> Any:
    """Return which elements differ in a bit."""
    if width == 16:
        return (one.view(np.uint64) != other.view(np.uint64)).reshape(-1, 2).any(axis=1)
    return one.view(f"u{width}") != other.view(f"u{width}")


def _of_long_integers(x: Any, y: Any) -> Any:
    """Return |x - y| as float64. The subtraction is exact: float64 has no integers beyond 2**53."""
    # Modulo 2**64 the difference of the larger and the smaller is exact, whatever the signs.
    return (np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)).astype(np.float64)


def _of_numbers(x: Any, y: Any) -> Any:
    """Return |x - y|, which is 0 for two NaN, and infinite for NaN against a number."""
    distance = np.abs(x - y)
    nan = np.isnan(x) & np.isnan(y)
    distance[np.isnan(distance) & ~nan] = np.inf
    distance[(x == y) | nan] = 0.0
    return distance


def _dot(x: Any, y: Any) -> float:
    """Return the sum of products; of complex numbers, its real part."""
    if np.iscomplexobj(x) or np.iscomplexobj(y):
        return _dot(x.real, y.real) + _dot(x.imag, y.imag)
    # Unlike `np.dot`, without threads of its own beside ours.
    return float(np.einsum("i,i->", x, y))


def _numbers(data: Bytes, dtype: DType) -> Any:
    """Return elements as float64, complex ones as complex128."""
    if dtype.has_numpy:
        return data.view(dtype.numpy).astype(np.complex128 if dtype.kind == "complex" else np.float64)
    if dtype.kind == "complex":
        halves = data.view(np.float16).reshape(-1, 2).astype(np.float64)
        return halves[:, 0] + 1j * halves[:, 1]
    return data.astype(np.float64)
