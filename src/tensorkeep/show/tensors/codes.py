"""The bit patterns of a dtype as numbers: the value that each stands for, and the interval around it.

A distribution is counted by patterns of 8 or 16 bits, the *codes*. For dtypes of one or two bytes these are the
elements themselves. Wider elements are rounded towards zero to the upper half of a float32: sign, exponent and seven
bits. Counts of codes can be added up from block to block, without the range of all values being known before.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensorkeep.state.dtypes import DType

Floats = npt.NDArray[np.float64]

NAN, INFINITE = -1, -2
"""Places of codes that are not finite."""

_PACKED = "float4_e2m1fn_x2"
_HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64", _PACKED: "uint8"}


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The codes of a dtype.

    Attributes
    ----------
    values, low, high : array of float64
        The distinct finite values, ascending, and the interval around each, which ends halfway to its neighbours.
    place : array of int
        For each code, the place of its value; NAN or INFINITE.
    exact : bool
        Whether a code is an element, rather than a rounded one.
    integers : bool
        Whether all numbers are integers.
    """

    values: Floats
    low: Floats
    high: Floats
    place: npt.NDArray[np.intp]
    exact: bool
    integers: bool


def numbers_of(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype of the numbers that elements consist of: two for each complex element."""
    return np.dtype(_HALVES[dtype.name]) if dtype.name in _HALVES else dtype.numpy


def encoded(numbers: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return the codes of some numbers; those of rounded dtypes must be finite."""
    if dtype.name == _PACKED:
        return np.concatenate((numbers & 15, numbers >> 4))
    if numbers.dtype.itemsize <= 2:
        return numbers.view(np.uint8 if numbers.dtype.itemsize == 1 else np.uint16)
    # Numbers beyond float32 become infinite, and have no place in the distribution.
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).view(np.uint16)[1::2]


@cache
def codes_of(dtype: DType) -> Codes:
    """Return the codes of a dtype."""
    exact = numbers_of(dtype).itemsize <= 2
    integers = dtype.kind in ("int", "uint", "bool") and dtype.name != _PACKED
    with np.errstate(all="ignore"):
        return _table(_values(dtype), exact=exact, integers=integers)


def _values(dtype: DType) -> Floats:
    """Return the number that each code stands for."""
    numbers = numbers_of(dtype)
    if dtype.name == _PACKED:
        return np.asarray(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn), np.float64)
    if dtype.kind == "bool":
        return np.asarray(np.minimum(np.arange(256), 1), np.float64)
    if numbers.itemsize <= 2:
        width = np.uint8 if numbers.itemsize == 1 else np.uint16
        return np.asarray(np.arange(256**numbers.itemsize, dtype=width).view(numbers), np.float64)
    upper = np.arange(65536, dtype=np.uint32) << 16
    # The middle of the numbers that have this upper half; but most of those around zero are zero itself.
    middle = np.where(upper << 1 == 0, upper, upper | 0x8000).astype(np.uint32)
    return np.asarray(middle.view(np.float32), np.float64)


def _table(numbers: Floats, *, exact: bool, integers: bool) -> Codes:
    place = np.full(len(numbers), NAN, np.intp)
    place[np.isinf(numbers)] = INFINITE
    finite = np.isfinite(numbers)
    values, inverse = np.unique(numbers[finite], return_inverse=True)
    place[finite] = inverse
    middles = (values[:-1] + values[1:]) / 2
    first, last = 2 * values[0] - middles[0], 2 * values[-1] - middles[-1]
    return Codes(values, np.append(first, middles), np.append(middles, last), place, exact, integers)
