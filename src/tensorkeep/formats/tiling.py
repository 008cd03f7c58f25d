"""Whether boxes tile an array exactly: no gap, no overlap, nothing outside.

The number of boxes over each element is constant except at borders. So it is determined by what each box adds at its
corners: +1 or -1, by how many of the corner's coordinates are at the box's end. Boxes tile an array if and only if
their corners add up to those of the array. This takes time proportional to the number of boxes, however they are cut.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

Corner = tuple[int, ...]

MAX_CUT_DIMENSIONS = 8
"""Dimensions along which one tensor may be cut: a box has two to that power corners."""

MAX_COORDINATES = 2**25
"""Coordinates of all corners of one tensor's boxes: 256 MiB."""


class Flaw(NamedTuple):
    """Where boxes do not tile an array: the first element, in C order, that none has, or that more than one has."""

    offsets: Corner
    is_gap: bool


def find_flaw(shape: Sequence[int], boxes: Iterable[tuple[Corner, Corner]]) -> Flaw | None:
    """Return the first flaw of boxes, given by offsets and sizes; None if they tile an array of this shape.

    All sizes are positive, and all boxes within the array. An empty array is tiled by no box.

    Raises OverflowError if a length exceeds 64 bits; ValueError if the array is cut along more than
    `MAX_CUT_DIMENSIONS` dimensions, or into boxes whose corners have more than `MAX_COORDINATES` coordinates.

    Examples
    --------
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
    """Return the corners of boxes, of shape (corners, dimensions), and the sign of each."""
    dimensions = starts.shape[1]
    corners, signs = [], []
    for choice in product((False, True), repeat=dimensions):
        corners.append(np.where(np.array(choice, bool), stops, starts))
        signs.append(np.full(len(starts), -1 if sum(choice) % 2 else 1, np.int64))
    return np.concatenate(corners), np.concatenate(signs)


def _first_left_over(corners: Integers, signs: Integers) -> tuple[Integers, int]:
    """Return the first corner, in C order, at which the signs do not add up to 0, and their sum; (anything, 0)."""
    if not corners.shape[1]:
        return corners[:0].reshape(-1), int(signs.sum())
    order = np.lexsort(corners.T[::-1])
    corners, signs = corners[order], signs[order]
    is_first = (
        np.concatenate([[True], (corners[1:] != corners[:-1]).any(axis=1)]) if len(corners) else np.zeros(0, bool)
    )
    firsts = np.flatnonzero(is_first)
    sums = np.add.reduceat(signs, firsts) if len(firsts) else signs
    left = np.flatnonzero(sums)
    # Before the first corner that is left over, in C order, every element is in exactly one box.
    return (corners[firsts[left[0]]], int(sums[left[0]])) if len(left) else (corners[:0].reshape(-1), 0)
