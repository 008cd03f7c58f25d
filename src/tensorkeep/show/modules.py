"""The modules of a state, from the names of its tensors: the cells of a treemap, split where they are large."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from tensorkeep.formats.base import Entry
from tensorkeep.show.treemap import Rectangle, squarified

_SPLIT_ABOVE = 1 / 24
"""A module with more than this fraction of the bytes is shown by its submodules."""

_SHOWN_ABOVE = 1 / 1000
"""Of a module that is split, submodules with a smaller fraction are shown as one."""

_MOST_GROUPS = 12
"""More top-level modules are not framed."""

_LEAST_LABEL = 4.0, 4.5
"""Width and height, in percent of the map, from which on a rectangle has a label."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The tensors of one dtype in a module, and its label.

    The path is that of the module, with a dot at its end, or the name of a tensor; None for several small modules.
    ``search`` finds the tensors in a table of all.
    """

    path: str | None
    label: str
    dtype: str
    nbytes: int
    tensors: int
    search: str | None


@dataclass(frozen=True, slots=True)
class PlacedCell:
    """A cell, its rectangle in percent of its group, and whether there is space for its label."""

    cell: Cell
    place: Rectangle
    labelled: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A top-level module, or all of them, with its rectangle in percent of the map, and its cells."""

    label: str
    nbytes: int
    place: Rectangle
    cells: list[PlacedCell]
    labelled: bool


@dataclass(frozen=True, slots=True)
class ModuleSum:
    """The sums of the tensors of a module."""

    name: str
    tensors: int = 0
    nbytes: int = 0
    stored_bytes: int = 0

    def __add__(self, other: "ModuleSum") -> "ModuleSum":
        return ModuleSum(
            self.name,
            self.tensors + other.tensors,
            self.nbytes + other.nbytes,
            self.stored_bytes + other.stored_bytes,
        )


def module_sums(entries: Iterable[Entry], most: int) -> list[ModuleSum]:
    """Return the sums of modules, the largest first, at most so many: the last one is then of all others.

    The layers of a model are together: a module is named by the components before the first number.
    """
    sums: dict[str, ModuleSum] = {}
    for entry in entries:
        parts = entry.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        name = ".".join(parts[:number] or parts)
        own = ModuleSum(name, 1, entry.nbytes, entry.stored_bytes)
        sums[name] = sums[name] + own if name in sums else own
    largest = sorted(sums.values(), key=lambda each: -each.nbytes)
    rest = largest[most - 1 :]
    if len(rest) <= 1:
        return largest
    return [*largest[: most - 1], sum(rest, ModuleSum(f"{len(rest):,} more"))]


_Tensor = tuple[tuple[str, ...], str, int]
"""The components of a name, dtype and size."""


def grouped(entries: Iterable[Entry], size: Callable[[Entry], int]) -> list[Group]:
    """Return the treemap of tensors by a size of them, such as their stored bytes; those of size 0 are left out."""
    tensors = [(tuple(each.name.split(".")), each.dtype.name, size(each)) for each in entries if size(each) > 0]
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
    places = squarified([nbytes for nbytes, *_ in groups], Rectangle(0, 0, 200, 100))
    return [
        Group(label, nbytes, _percent(place), list(_placed(cells, place)), _has_space(_percent(place)))
        for (nbytes, label, cells), place in zip(groups, places, strict=True)
    ]


def _natural(part: str) -> tuple[bool, int, str]:
    """Return a key that sorts ``layers.2`` before ``layers.10``."""
    # Longer digits than an index has may not be converted.
    digits = part.isdecimal() and len(part) < 10
    return not digits, int(part) if digits else 0, part


def _percent(place: Rectangle) -> Rectangle:
    """Return a rectangle of the map, which is laid out twice as wide as high, in percent."""
    return Rectangle(place.left / 2, place.top, place.width / 2, place.height)


def _has_space(place: Rectangle) -> bool:
    return place.width >= _LEAST_LABEL[0] and place.height >= _LEAST_LABEL[1]


def _placed(cells: list[Cell], group: Rectangle) -> Iterator[PlacedCell]:
    cells = sorted(cells, key=lambda cell: -cell.nbytes)
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


def _cells(tensors: list[_Tensor], depth: int, framed: int, total: int) -> list[Cell]:
    """Return the cells of tensors whose names begin with the same ``depth`` components.

    The labels are without the first ``framed`` components, those of the group.
    """
    nbytes = sum(size for *_, size in tensors)
    if nbytes <= total * _SPLIT_ABOVE or all(len(parts) <= depth for parts, *_ in tensors):
        return _by_dtype(tensors, depth, framed)
    found: list[Cell] = []
    rest: list[_Tensor] = []
    for own in _submodules(tensors, depth):
        if sum(size for *_, size in own) < total * _SHOWN_ABOVE:
            rest += own
        else:
            found += _cells(own, depth + 1, framed, total)
    return found + _by_dtype(rest, depth, framed, small=True)


def _by_dtype(tensors: list[_Tensor], depth: int, framed: int, *, small: bool = False) -> list[Cell]:
    """Return a cell for each dtype of a module, or of its small submodules together."""
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
        search = f"{path} {dtype}" if path and len(sizes) > 1 else path
        found.append(Cell(path, label, dtype, sum(each), len(each), search))
    return found
