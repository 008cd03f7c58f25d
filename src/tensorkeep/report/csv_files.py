"""The results as CSV files: one row per cell and measure, and one per arm and measure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

import msgspec

from tensorkeep.bench.results import Results, Statistics

_SAMPLES = ("arm", "role", "block", "order", "status", "reason", "started", "amount_bytes", "measure", "unit", "value")


def samples_csv(results: Results) -> str:
    """Return every raw sample; a cell without figures has one row, whose measure and value are empty."""
    roles = {arm.name: arm.role for arm in results.arms}
    units = {measure.name: measure.unit for measure in results.measures}
    rows: list[Sequence[object]] = []
    for cell in sorted(results.cells, key=lambda cell: cell.order):
        shared = (
            cell.arm,
            roles[cell.arm],
            cell.block,
            cell.order,
            cell.status,
            cell.reason,
            cell.started,
            cell.amount,
        )
        figures: list[tuple[str, float | None]] = [one for one in cell.figures.items() if one[1] is not None]
        for name, value in figures or [("", None)]:
            rows.append((*shared, name, units.get(name, ""), value))
    return _text(_SAMPLES, rows)


def summary_csv(results: Results) -> str:
    """Return the statistics of every arm and measure, in the units of the results file."""
    fields = [field.name for field in msgspec.structs.fields(Statistics)]
    rows = []
    for arm in results.arms:
        for measure in results.measures:
            found = results.statistics(arm.name, measure.name)
            if found is not None:
                figures = (getattr(found, field) for field in fields)
                rows.append((arm.name, arm.role, measure.name, measure.unit, *figures))
    return _text(("arm", "role", "measure", "unit", *fields), rows)


def _text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_safe(value) for value in row] for row in rows)
    return out.getvalue()


def _safe(value: object) -> object:
    """Return a value that no spreadsheet takes for a formula: texts come from files, and files may be hostile."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
