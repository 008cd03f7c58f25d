"""Comparing the elements of two buffers: how many differ, and by how much at most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorkeep.errors import UsageError
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import DType

_PIECE = 2**18
"""Elements that are compared at once, so that intermediate results stay in the cache of the core."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements are the same when ``|a - b| <= atol + rtol * |b|``; with both 0 their bits are compared.

    Raises
    ------
    UsageError
        If a number is negative or not finite.
    """

    atol: float
    rtol: float
    exact: bool = field(init=False)

    def __post_init__(self) -> None:
        for value in (self.atol, self.rtol):
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"a tolerance of {value} is not allowed", remedy="give a finite number of 0 or more")
        object.__setattr__(self, "exact", self.atol == 0 and self.rtol == 0)


def differences(one: Bytes, other: Bytes, dtype: DType, tolerance: Tolerance) -> tuple[int, float]:
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
    if tolerance.exact:
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
