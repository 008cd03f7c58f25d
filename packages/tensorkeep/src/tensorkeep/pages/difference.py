"""The page of two checkpoints: how they differ, the largest changes first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorkeep.checkpoint.diff import DiffReport, TensorDiff, most_changed_first, together
from tensorkeep.pages.elements import Bars, ChartBar, ReportTable, TableEntry
from tensorkeep.pages.page import (
    MOST_MODULES,
    Column,
    Findings,
    PageSubject,
    drawn_table,
    shortened,
    show_page,
    title_of,
)
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.units import counted

_MOST_BARS, _MOST_PARTS = 30, 8
_MOST_LISTED = 500
_LONGEST_TEXT = 1000
_BOTH = ("name", "first", "second")

_CHANGED = (
    Column("tensor", "name"),
    Column("rel. L2", "number", "relative L2 difference: ||a - b|| / ||a||"),
    Column("max |a-b|", "number", "the largest absolute difference"),
    Column("different", "percent", "fraction of the elements with other bits"),
    Column("elements", "count"),
    Column("1 - cosine", "number", "0 if a and b have the same direction"),
    Column("||a||", "number", "L2 norm in the first checkpoint"),
    Column("||b||", "number", "L2 norm in the second checkpoint"),
    Column("dtype", "word", "both dtypes, if they differ"),
)


@dataclass(frozen=True)
class Difference(PageSubject):
    report: DiffReport

    @property
    def heading(self) -> str:
        return f"{self.report.a} and {self.report.b}"

    def findings(self) -> Findings:
        report = self.report
        if report.equal:
            return [("good", f"The same: {counted(report.identical, 'tensor')} and all plain values, bit for bit.")]
        found = [("", f"Tensors: {report.summary}.")]
        for part, changed in _by_part(report.changed)[:_MOST_PARTS]:
            total, most = together(part, changed), changed[0]
            differ = f"{part}: {total.different:,} of {total.elements:,} elements differ"
            distance = f", relative L2 {total.relative_l2:.3g}, most in {most.name} ({most.relative_l2:.3g})"
            found.append(("", f"{differ}{distance if total.floating else ''}."))
        if report.values:
            found.append(("", f"{counted(len(report.values), 'plain value')} differ."))
        if report.placeholders:
            found.append(("", f"Not compared, because they cannot be read: {', '.join(report.placeholders)}."))
        return found

    def summary(self) -> ReportTable:
        parts = _by_part([layer for layer in self.report.by_layer() if layer.floating])
        layers = [layer for _, own in parts for layer in own][:MOST_MODULES]
        rows = [
            (layer.name, f"{layer.relative_l2:.3g}", f"{layer.largest:.4g}", f"{layer.share:.2%}") for layer in layers
        ]
        headings = ("layer", ">rel. L2", ">max |a-b|", ">different")
        return ReportTable("Layers", headings, [tuple(map(TableEntry, row)) for row in rows])

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "difference", **self.report.as_dict()}

    def page(self) -> str:
        report = self.report
        layers = report.by_layer()
        types = {each.name: f"{each.a} -> {each.b}" for each in report.retyped}
        # Counters and integers, such as random states, last.
        differing = sorted([*report.changed, *report.converted], key=most_changed_first)
        # The last column is for tensors with two dtypes.
        width = len(_CHANGED) - (not types)
        rows = (_row(each, types.get(each.name))[:width] for each in differing)
        table = drawn_table(_CHANGED[:width], rows, noun="tensor")
        lists = [
            _listed("Only in the second checkpoint", ("tensor",), [(name,) for name in report.added]),
            _listed("Only in the first checkpoint", ("tensor",), [(name,) for name in report.removed]),
            _listed("Other shapes", _BOTH, [(each.name, *each.texts) for each in report.reshaped]),
            _listed("Plain values", _BOTH, [(each.name, *each.texts) for each in report.values]),
        ]
        return show_page(
            "difference.html.j2",
            f"{title_of(report.a)} and {title_of(report.b)}",
            table,
            first=report.a,
            second=report.b,
            findings=self.findings(),
            layers=_bars(layers),
            infinite=[layer.name for layer in layers if layer.floating and math.isinf(layer.relative_l2)],
            any_changed=bool(differing),
            left_out=table.left_out_text("the largest changes"),
            lists=[each for each in lists if each.rows],
        )


def _by_part(found: Sequence[TensorDiff]) -> list[tuple[str, list[TensorDiff]]]:
    parts: dict[str, list[TensorDiff]] = {}
    for each in found:
        parts.setdefault(each.name.partition(".")[0], []).append(each)
    # The model comes first, and the sort keeps the order of the other parts.
    return sorted(parts.items(), key=lambda part: part[0] != DEFAULT_PART)


def _row(found: TensorDiff, types: str | None) -> list[Any]:
    # Integers, such as random states, have no meaningful length or direction.
    if not found.floating:
        return [found.name, None, found.largest, found.share, found.elements, None, None, None, types]
    angle = None if found.cosine is None else 1 - found.cosine
    figures = (found.relative_l2, found.largest, found.share, found.elements, angle, found.norm_a, found.norm_b)
    return [found.name, *figures, types]


def _bars(layers: Sequence[TensorDiff]) -> list[Bars]:
    found = []
    for part, own in _by_part(layers)[:_MOST_PARTS]:
        bars = [
            ChartBar(layer.name, layer.relative_l2, f"{layer.relative_l2:.3g}")
            for layer in own
            # An infinite difference has no bar; the page names these layers.
            if layer.floating and 0 < layer.relative_l2 < math.inf
        ]
        if bars:
            left = f", the {_MOST_BARS} largest of {len(bars):,}" if len(bars) > _MOST_BARS else ""
            found.append(Bars(f"Relative L2 difference of each layer: {part}{left}", bars[:_MOST_BARS]))
    return found


def _listed(title: str, headings: tuple[str, ...], rows: Sequence[Sequence[str]]) -> ReportTable:
    note = f"{len(rows) - _MOST_LISTED:,} more are in --json." if len(rows) > _MOST_LISTED else ""
    shown = [tuple(TableEntry(shortened(text, _LONGEST_TEXT)) for text in row) for row in rows[:_MOST_LISTED]]
    return ReportTable(title, headings, shown, note)
