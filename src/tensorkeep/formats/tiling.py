"""Whether boxes tile an array exactly: no gap, no overlap, nothing outside.

The number of boxes over each element is constant except at borders. So it is determined by what each box adds at its
corners: +1 or -1, by how many of the corner's coordinates are at the box's end. Boxes tile an array if and only if
their corners add up to those of the array. This takes time proportional to the number of boxes, however they are cut.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

Corner = tuple[int, ...]

MAX_CUT_DIMENSIONS = 8
"""Dimensions along which one tensor may be cut: a box has two to that power corners."""


class Flaw(NamedTuple):
    """Where boxes do not tile an array: the first element, in C order, that none has, or that more than one has."""

    offsets: Corner
    is_gap: bool


def find_flaw(shape: Sequence[int], boxes: Iterable[tuple[Corner, Corner]]) -> Flaw | None:
    """Return the first flaw of boxes, given by offsets and sizes; None if they tile an array of this shape.

    All sizes are positive, and all boxes within the array. An empty array is tiled by no box.

    Raises ValueError if it is cut along more than `MAX_CUT_DIMENSIONS` dimensions.

    Examples
    --------
    >>> find_flaw((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))])
    >>> find_flaw((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3))])
    Flaw(offsets=(2, 3), is_gap=True)
    """
    found = list(boxes)
    whole = tuple(shape)
    # Along a dimension that no box cuts, all boxes have the same two coordinates.
    cut = [axis for axis in range(len(whole)) if any(sizes[axis] != whole[axis] for _, sizes in found)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        raise ValueError(f"is cut along {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}")
    counts: dict[Corner, int] = defaultdict(int)
    if 0 not in whole:
        _add(counts, [(0, whole[axis]) for axis in cut], -1)
    for offsets, sizes in found:
        _add(counts, [(offsets[axis], offsets[axis] + sizes[axis]) for axis in cut], 1)
    # Before the first corner that is left over, in C order, every element is in exactly one box.
    corner = min((corner for corner, count in counts.items() if count), default=None)
    if corner is None:
        return None
    at = [0] * len(whole)
    for axis, value in zip(cut, corner, strict=True):
        at[axis] = value
    return Flaw(tuple(at), counts[corner] < 0)


def _add(counts: dict[Corner, int], sides: list[tuple[int, int]], sign: int) -> None:
    """Add the signed corners of a box."""
    if len(sides) == 1:  # by far the most frequent case
        start, stop = sides[0]
        counts[(start,)] += sign
        counts[(stop,)] -= sign
        return
    for choice in product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, choice, strict=True))
        counts[corner] += -sign if sum(choice) % 2 else sign
