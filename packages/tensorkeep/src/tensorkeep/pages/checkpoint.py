"""The page of a checkpoint: a treemap of its modules, totals, and the statistics of every tensor."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

from tensorkeep.checkpoint.info import (
    InfoReport,
    Total,
    describe,
    outermost_first,
    report_of,
    total_of,
    totals_by,
    value_text,
)
from tensorkeep.checkpoint.options import AllowOption, MemorySize, open_settings, thread_count
from tensorkeep.errors import PathLike
from tensorkeep.formats.base import Entry
from tensorkeep.formats.finding import open_reader
from tensorkeep.pages.elements import ReportTable, TableEntry, facts_of
from tensorkeep.pages.page import MOST_MODULES, Column, Findings, PageSubject, drawn_table, show_page, title_of
from tensorkeep.pages.statistics import DEFAULT_SAMPLE, Sample, TensorStatistics, choose_sample, measure
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import Progress
from tensorkeep.units import counted, format_bytes, format_moment

# Colours of dtypes; further dtypes share the last colour.
_COLOURS = 6
_NAMED, _MOST_SUMS = 3, 40
# Details with an entry for each file, tensor or rank.
_OWN_LISTS = ("files", "layouts", "ranks")
_MOST_FACTS, _LONGEST_FACT = 200, 1000

_COLUMNS = (
    Column("tensor", "name"),
    Column("dtype", "word"),
    Column("shape", "text"),
    Column("raw", "bytes", "bytes of its elements"),
    Column("stored", "bytes", "bytes in the checkpoint"),
    Column("ratio", "ratio", "raw bytes for each stored byte"),
    Column("codec", "word"),
    Column("values", "histogram"),
    Column("min", "number", "the smallest finite number"),
    Column("max", "number", "the largest finite number"),
    Column("mean", "number"),
    Column("std", "number", "standard deviation"),
    Column("zeros", "percent", "fraction of the numbers that are 0"),
    Column("NaN", "count"),
    Column("Inf", "count"),
    Column("view of", "text", "the tensor that it shares storage with"),
)


@dataclass(frozen=True, slots=True)
class CheckpointContents(PageSubject):
    """The contents of a checkpoint. ``statistics`` has every stored tensor; a view of another tensor has none."""

    info: InfoReport
    sample: Sample
    statistics: dict[str, TensorStatistics]

    @property
    def stored(self) -> list[Entry]:
        # A view is counted with the tensor that it shares storage with.
        return [entry for entry in self.info.entries if entry.alias_of is None]

    @property
    def not_finite(self) -> list[Entry]:
        """The stored tensors with NaN or infinities, the largest count first."""
        counts = {name: found.nan + found.infinite for name, found in self.statistics.items()}
        return sorted((entry for entry in self.stored if counts[entry.name]), key=lambda entry: -counts[entry.name])

    @property
    def zero(self) -> list[Entry]:
        """The stored tensors with only zeros in the elements that were read."""
        found = ((entry, self.statistics[entry.name]) for entry in self.stored)
        return [entry for entry, statistics in found if 0 < statistics.numbers == statistics.zeros]

    @property
    def heading(self) -> str:
        return f"{self.info.path}: {self.info.format}"

    @property
    def note(self) -> str:
        return self.sample.text

    def findings(self) -> Findings:
        total = self.info.total
        summary = f"{counted(total.tensors, 'tensor')} with {counted(total.elements, 'element')}: "
        stored = format_bytes(total.stored_bytes)
        ratio = f" ({total.nbytes / total.stored_bytes:.2f}x smaller)" if total.nbytes > total.stored_bytes > 0 else ""
        found = [("", f"{summary}{format_bytes(total.nbytes)}, stored in {stored}{ratio}.")]
        sampled = " in what was read" if self.sample.every > 1 else ""
        if bad := self.not_finite:
            texts = [f"{entry.name} ({self.statistics[entry.name].not_finite_text})" for entry in bad]
            holds = "tensor holds" if len(bad) == 1 else "tensors hold"
            found.append(("bad", f"{len(bad):,} {holds} values that are not finite{sampled}: {_first(texts)}."))
        else:
            found.append(("good", f"All values are finite: neither NaN nor infinity was found{sampled}."))
        if zero := self.zero:
            names = _first([entry.name for entry in zero])
            found.append(("", f"{counted(len(zero), 'tensor')} of zeros only{sampled}: {names}."))
        return found

    def summary(self) -> ReportTable:
        return _table("Modules", "module", module_totals(self.stored, MOST_MODULES), without=(">elements",))

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "checkpoint",
            **{key: value for key, value in self.info.as_dict(largest=0).items() if key != "largest"},
            "sample": {"every": self.sample.every, "nbytes": self.sample.nbytes, "total": self.sample.total},
            "not_finite": [entry.name for entry in self.not_finite],
            "zero": [entry.name for entry in self.zero],
            "tensors": [
                # A view may be only a part of the tensor that was measured.
                {**describe(e), "statistics": None if e.alias_of else asdict(self.statistics[e.name])}
                for e in self.info.entries
            ],
        }

    def page(self) -> str:
        info = self.info
        # The dtype with most bytes has the first colour; rare dtypes share the last one.
        dtypes = _largest_first(info.by_dtype)
        colours = {name: min(place, _COLOURS - 1) for place, (name, _) in enumerate(dtypes)}
        # What a bounded table should have: tensors that are not finite, then the largest.
        bad = {entry.name: place for place, entry in enumerate(self.not_finite)}
        ordered = sorted(info.entries, key=lambda entry: (bad.get(entry.name, len(bad)), -entry.nbytes))
        table = drawn_table(_COLUMNS, map(self._row, ordered), noun="tensor")
        # What the table leaves out is at least summed up.
        left_out = ordered[len(ordered) - table.left_out :]
        # Two maps only if compression makes them different.
        maps = [("stored bytes", _map(info.entries, lambda entry: entry.stored_bytes, colours))]
        if info.total.nbytes != info.total.stored_bytes:
            maps.append(("raw bytes", _map(self.stored, lambda entry: entry.nbytes, colours)))
        totals = {"dtype": info.by_dtype, "codec": info.by_codec, "part": info.by_part}
        return show_page(
            "checkpoint.html.j2",
            title_of(info.path),
            table,
            path=info.path,
            about=_about(info),
            findings=self.findings(),
            sample=self.sample.text,
            maps=maps,
            legend=[
                (name, colours[name], f"{format_bytes(total.stored_bytes)} in {counted(total.tensors, 'tensor')}")
                for name, total in dtypes
            ],
            totals=[
                _modules("By module", self.stored),
                *(_table(f"By {what}", f"={what}", dict(_largest_first(each))) for what, each in totals.items()),
            ],
            left_out=table.left_out_text(
                "those that are not finite, then the largest", sum(entry.stored_bytes for entry in left_out)
            ),
            left_out_table=_modules("Tensors that are not listed, by module", left_out),
            values=_values(info.values),
            metadata=_facts(info.metadata),
            details=_facts(_details(info.details)),
            files=[(name, format_bytes(size)) for name, size in _files(info.details)],
        )

    def _row(self, entry: Entry) -> list[Any]:
        shape = "x".join(map(str, entry.shape)) or "scalar"
        described = [entry.name, entry.dtype.name, shape, entry.nbytes]
        # A view has no bytes of its own.
        if entry.alias_of is not None:
            return [*described, 0, None, entry.codec, *[None] * 8, entry.alias_of]
        found = self.statistics[entry.name]
        ratio = entry.nbytes / entry.stored_bytes if entry.stored_bytes else None
        zeros = found.zeros / found.numbers if found.numbers else None
        extent = (found.histogram, found.least, found.largest, found.mean, found.std)
        return [*described, entry.stored_bytes, ratio, entry.codec, *extent, zeros, found.nan, found.infinite, None]


def read_contents(
    path: PathLike,
    *,
    sample: int = DEFAULT_SAMPLE,
    format: str | None = None,
    allow: AllowOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> CheckpointContents:
    """Read about ``sample`` raw bytes of a checkpoint, and at least one block of every tensor.

    Raises the errors of `tensorkeep.open` and of reading.
    """
    settings = open_settings(memory_budget, allow=allow)
    with settings.pool as pool, open_reader(path, settings, format) as reader:
        chosen = choose_sample(reader, sample)
        statistics = measure(reader, chosen, threads=thread_count(threads), pool=pool, progress=progress)
        return CheckpointContents(report_of(path, reader), chosen, statistics)


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - _NAMED:,} more" if texts[_NAMED:] else ""
    return f"{', '.join(texts[:_NAMED])}{more}"


def _largest_first(totals: dict[str, Total]) -> list[tuple[str, Total]]:
    return sorted(totals.items(), key=lambda item: -item[1].nbytes)


def _map(entries: Iterable[Entry], size: Callable[[Entry], int], colours: dict[str, int]) -> list[dict[str, Any]]:
    listed = list(entries)
    # Titles divide by the total, which is 0 without elements.
    total = sum(map(size, listed)) or 1
    return [
        {
            "label": group.label,
            "labelled": group.labelled,
            "title": f"{group.label}: {format_bytes(group.nbytes)}, {group.nbytes / total:.1%}",
            "style": _style(*group.place),
            "cells": [
                {
                    "label": each.cell.label if each.labelled else "",
                    "size": format_bytes(each.cell.nbytes) if each.labelled else "",
                    "title": f"{(each.cell.path or each.cell.label).removesuffix('.')}: {each.cell.dtype}, "
                    f"{counted(each.cell.tensors, 'tensor')}, {format_bytes(each.cell.nbytes)}, "
                    f"{each.cell.nbytes / total:.1%}",
                    "search": each.cell.search,
                    "colour": colours[each.cell.dtype],
                    "style": _style(*each.place),
                }
                for each in group.cells
            ],
        }
        for group in grouped(listed, size)
    ]


def _style(left: float, top: float, width: float, height: float) -> str:
    return f"left:{left:.3f}%;top:{top:.3f}%;width:{width:.3f}%;height:{height:.3f}%"


_AMOUNTS: dict[str, Callable[[Total], TableEntry]] = {
    ">tensors": lambda total: TableEntry(f"{total.tensors:,}", total.tensors),
    ">elements": lambda total: TableEntry(f"{total.elements:,}", total.elements),
    ">raw": lambda total: TableEntry(format_bytes(total.nbytes), total.nbytes),
    ">stored": lambda total: TableEntry(format_bytes(total.stored_bytes), total.stored_bytes),
    ">ratio": lambda total: TableEntry(f"{total.nbytes / total.stored_bytes:.2f}x" if total.stored_bytes else "-"),
}


def _table(title: str, first: str, totals: dict[str, Total], *, without: tuple[str, ...] = ()) -> ReportTable:
    shown = {heading: amount for heading, amount in _AMOUNTS.items() if heading not in without}
    rows = [(TableEntry(name), *(amount(total) for amount in shown.values())) for name, total in totals.items()]
    return ReportTable(title, (first, *shown), rows)


def _modules(title: str, entries: Sequence[Entry]) -> ReportTable:
    return _table(title, "module", module_totals(entries, _MOST_SUMS), without=(">elements", ">ratio"))


def _about(info: InfoReport) -> str:
    version = info.details.get("version")
    words = [f"A checkpoint of format {info.format}{'' if version is None else f' {version}'}"]
    if files := info.details.get("files"):
        words.append(counted(len(files), "file"))
    if (step := info.details.get("step")) is not None:
        words.append(f"step {step['number']}")
    if info.coder:
        words.append(f"decoded by the {info.coder} coder")
    return ", ".join(words) + "."


def _details(details: dict[str, Any]) -> dict[str, Any]:
    # Long lists have tables of their own, or would fill the page.
    found = {key: value for key, value in details.items() if key not in _OWN_LISTS}
    if step := found.get("step"):
        found["step"] = {**step, "saved_at": format_moment(step["saved_at"])}
    if history := found.get("history"):
        linked = {origin: format_bytes(count) for origin, count in history["linked_bytes"].items()}
        found["history"] = {**history, "linked_bytes": linked}
    return found


def _facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    # Bounded, because metadata of a file may be large or hostile.
    return _bounded(facts_of(values))


def _bounded(facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    shown = [(name[:_LONGEST_FACT], text[:_LONGEST_FACT]) for name, text in facts[:_MOST_FACTS]]
    return shown + ([("more", f"{len(facts) - _MOST_FACTS:,} values")] if len(facts) > _MOST_FACTS else [])


def _values(values: dict[str, Any]) -> list[tuple[str, str]]:
    return _bounded([(name, value_text(values[name])) for name in outermost_first(values)])


def _files(details: dict[str, Any]) -> Iterator[tuple[str, int]]:
    files = details.get("files")
    if isinstance(files, dict):
        yield from sorted(files.items(), key=lambda item: -item[1])[:_MOST_FACTS]


# Treemaps of the modules of a state, by the names of its tensors. Large modules are split into submodules.

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
