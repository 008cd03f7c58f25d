"""A treemap: rectangles whose areas are the sizes, as square as possible (Bruls, Huizing and van Wijk, 2000)."""

from collections.abc import Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A rectangle by its upper left corner, in the units of the whole."""

    left: float
    top: float
    width: float
    height: float


def squarified(sizes: Sequence[float], whole: Rectangle) -> list[Rectangle]:
    """Return a rectangle for each size, which fill the whole; sizes are positive, the largest first.

    Examples
    --------
    >>> squarified([2, 1, 1], Rectangle(0, 0, 4, 2))
    [Rectangle(left=0, top=0, width=2.0, height=2.0), Rectangle(left=2.0, top=0, width=2.0, height=1.0), \
Rectangle(left=2.0, top=1.0, width=2.0, height=1.0)]
    """
    found: list[Rectangle] = []
    scale = whole.width * whole.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    first, rest = 0, whole
    while first < len(areas):
        side = min(rest.width, rest.height)
        last = first + 1
        while last < len(areas) and _worst(areas[first : last + 1], side) <= _worst(areas[first:last], side):
            last += 1
        row, rest = _row(areas[first:last], rest)
        found += row
        first = last
    return found


def _worst(areas: Sequence[float], side: float) -> float:
    """Return the largest ratio of the sides of the rectangles in a row along a side."""
    depth = sum(areas) / side if side else 0.0
    if not depth:
        return float("inf")
    return max(max(area / depth**2, depth**2 / area) for area in areas)


def _row(areas: Sequence[float], place: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Return the rectangles of a row along the shorter side, and what is left of the place."""
    left, top, width, height = place
    total = sum(areas)
    row = []
    if width >= height:
        depth = total / height if height else 0.0
        for area in areas:
            length = area / depth if depth else 0.0
            row.append(Rectangle(left, top, depth, length))
            top += length
        return row, Rectangle(left + depth, place.top, max(0.0, width - depth), height)
    depth = total / width
    for area in areas:
        length = area / depth if depth else 0.0
        row.append(Rectangle(left, top, length, depth))
        left += length
    return row, Rectangle(place.left, top + depth, width, max(0.0, height - depth))
