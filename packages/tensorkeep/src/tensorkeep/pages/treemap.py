"""Treemaps of the modules of a state, by the names of its tensors. Large modules are split into submodules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tensorkeep.checkpoint.info import Total, total_of, totals_by
from tensorkeep.formats.base import Entry

# A module with more than this fraction of the bytes is shown by its submodules.
_SPLIT_ABOVE = 1 / 24
# Submodules with a smaller fraction of the bytes are shown as one cell.
_SHOWN_ABOVE = 1 / 1000
# Top-level modules have frames only if there are at most this many.
_MOST_GROUPS = 12
# The least width and height of a rectangle with a label, in percent of the map.
_LEAST_LABEL = 4.0, 4.5


class Rectangle(NamedTuple):
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class TreemapCell:
    """The tensors of one dtype in a module. ``search`` finds them in the table of the page."""

    # The name of a module with a dot at its end, or of a tensor; None for several small modules.
    path: str | None
    label: str
    dtype: str
    nbytes: int
    tensors: int
    search: str | None


@dataclass(frozen=True, slots=True)
class PlacedCell:
    cell: TreemapCell
    place: Rectangle
    labelled: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A top-level module with its rectangle in percent of the map. Many small modules are one group."""

    label: str
    nbytes: int
    place: Rectangle
    cells: list[PlacedCell]
    labelled: bool


def module_totals(entries: Sequence[Entry], most: int) -> dict[str, Total]:
    """Return the totals of modules, the largest first. With more than ``most`` modules, the last total is the rest."""
    found = sorted(totals_by(entries, _module_of).items(), key=lambda item: -item[1].nbytes)
    if len(found) <= most:
        return dict(found)
    kept = dict(found[: most - 1])
    rest = [entry for entry in entries if _module_of(entry) not in kept]
    return kept | {f"{len(found) - len(kept):,} more": total_of(rest)}


def _module_of(entry: Entry) -> str:
    # All layers of a model are one module: the components of a name before its first number.
    parts = entry.name.split(".")
    # Without a number, the last component is the tensor, and the components before it are the module.
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[:number] or parts)


# The components of a name, dtype and size.
_Tensor = tuple[tuple[str, ...], str, int]


def grouped(entries: Iterable[Entry], size: Callable[[Entry], int]) -> list[Group]:
    """Return the treemap of tensors by size, such as stored bytes; tensors of size 0 are left out."""
    tensors = [(tuple(each.name.split(".")), each.dtype.name, size(each)) for each in entries if size(each) > 0]
    # Sorted, so that submodules are contiguous for `groupby`.
    tensors.sort(key=lambda tensor: [_natural(part) for part in tensor[0]])
    total = sum(nbytes for *_, nbytes in tensors)
    tops = _submodules(tensors, 0)
    framed = len(tops) <= _MOST_GROUPS
    found = [_cells(own, 1, 1, total) for own in tops] if framed else [_cells(tensors, 0, 0, total)]
    labels = [own[0][0][0] for own in tops] if framed else [""]
    groups = sorted(
        ((sum(cell.nbytes for cell in cells), label, cells) for label, cells in zip(labels, found, strict=True)),
        key=lambda group: -group[0],
    )
    # Twice as wide as high, like the map on the page.
    places = squarified([nbytes for nbytes, *_ in groups], Rectangle(0, 0, 200, 100))
    return [
        Group(label, nbytes, _percent(place), list(_placed(cells, place)), _has_space(_percent(place)))
        for (nbytes, label, cells), place in zip(groups, places, strict=True)
    ]


def _natural(part: str) -> tuple[bool, int, str]:
    """Return a key that sorts ``layers.2`` before ``layers.10``."""
    # Python refuses to convert very long digits, which a hostile name may have.
    digits = part.isdecimal() and len(part) < 10
    return not digits, int(part) if digits else 0, part


def _percent(place: Rectangle) -> Rectangle:
    # The map is laid out 200 wide and 100 high.
    return Rectangle(place.left / 2, place.top, place.width / 2, place.height)


def _has_space(place: Rectangle) -> bool:
    return place.width >= _LEAST_LABEL[0] and place.height >= _LEAST_LABEL[1]


def _placed(cells: list[TreemapCell], group: Rectangle) -> Iterator[PlacedCell]:
    cells = sorted(cells, key=lambda cell: -cell.nbytes)
    # The place of a cell is relative to its group, which is its parent element on the page.
    across, down = 100 / group.width, 100 / group.height
    for cell, place in zip(cells, squarified([cell.nbytes for cell in cells], group), strict=True):
        inner = Rectangle(
            (place.left - group.left) * across,
            (place.top - group.top) * down,
            place.width * across,
            place.height * down,
        )
        yield PlacedCell(cell, inner, _has_space(_percent(place)))


def _submodules(tensors: list[_Tensor], depth: int) -> list[list[_Tensor]]:
    return [list(members) for _, members in groupby(tensors, key=lambda tensor: tensor[0][: depth + 1])]


def _cells(tensors: list[_Tensor], depth: int, framed: int, total: int) -> list[TreemapCell]:
    """Return the cells of tensors that share the first ``depth`` components of their names."""
    # Labels leave out the first `framed` components, which are the name of the group.
    nbytes = sum(size for *_, size in tensors)
    # A module that is small, or has no submodules, is one cell per dtype.
    if nbytes <= total * _SPLIT_ABOVE or all(len(parts) <= depth for parts, *_ in tensors):
        return _by_dtype(tensors, depth, framed)
    found: list[TreemapCell] = []
    rest: list[_Tensor] = []
    for own in _submodules(tensors, depth):
        if sum(size for *_, size in own) < total * _SHOWN_ABOVE:
            rest += own
        else:
            found += _cells(own, depth + 1, framed, total)
    return found + _by_dtype(rest, depth, framed, small=True)


def _by_dtype(tensors: list[_Tensor], depth: int, framed: int, *, small: bool = False) -> list[TreemapCell]:
    """Return a cell for each dtype of a module; with ``small``, of its small submodules together."""
    sizes: dict[str, list[int]] = {}
    for _, dtype, size in tensors:
        sizes.setdefault(dtype, []).append(size)
    found = []
    for dtype, each in sizes.items():
        parts = tensors[0][0][:depth]
        label = ".".join(parts[framed:]) or ".".join(parts)
        if small:
            label = f"{label} ({len(each):,} small)" if label else f"{len(each):,} small"
        path = None if small else ".".join(parts) + "." * (len(tensors[0][0]) > depth)
        # The search of the page takes several words: the dtype separates cells of the same module.
        search = f"{path} {dtype}" if path and len(sizes) > 1 else path
        found.append(TreemapCell(path, label, dtype, sum(each), len(each), search))
    return found


def squarified(sizes: Sequence[float], whole: Rectangle) -> list[Rectangle]:
    """Divide a rectangle by sizes, which are positive, the largest first, into nearly square rectangles.

    The algorithm is from Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.
    """
    found: list[Rectangle] = []
    scale = whole.width * whole.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    first, rest = 0, whole
    while first < len(areas):
        # A row takes further rectangles as long as they make its worst one squarer.
        side = min(rest.width, rest.height)
        last = first + 1
        while last < len(areas) and _worst(areas[first : last + 1], side) <= _worst(areas[first:last], side):
            last += 1
        row, rest = _row(areas[first:last], rest)
        found += row
        first = last
    return found


def _worst(areas: Sequence[float], side: float) -> float:
    """Return the largest aspect ratio of the rectangles in a row along a side."""
    depth = sum(areas) / side if side else 0.0
    if not depth:
        return float("inf")
    return max(max(area / depth**2, depth**2 / area) for area in areas)


def _row(areas: Sequence[float], place: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Return the rectangles of a row along the shorter side, and the rest of the place."""
    if place.width < place.height:
        row, rest = _row(areas, _transposed(place))
        return [*map(_transposed, row)], _transposed(rest)
    depth = sum(areas) / place.height if place.height else 0.0
    row, top = [], place.top
    for area in areas:
        length = area / depth if depth else 0.0
        row.append(Rectangle(place.left, top, depth, length))
        top += length
    return row, Rectangle(place.left + depth, place.top, max(0.0, place.width - depth), place.height)


def _transposed(place: Rectangle) -> Rectangle:
    return Rectangle(place.top, place.left, place.height, place.width)
