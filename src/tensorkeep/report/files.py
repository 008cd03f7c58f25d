"""Writing a report: the page of HTML, the plots as PNG and SVG, and the figures as CSV."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tensorkeep.bench.results import Results, Statistics
from tensorkeep.bench.results_file import read_results
from tensorkeep.report.html import report_page
from tensorkeep.report.plots import draw_plots
from tensorkeep.report.rendering import check_page
from tensorkeep.storage.commit import replace_file

_SAMPLES = ("arm", "role", "block", "order", "status", "reason", "started", "amount_bytes", "measure", "unit", "value")


def write_report(
    results: str | os.PathLike[str] | Results,
    out: str | os.PathLike[str],
    *,
    plots: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write the page, and plots and CSV files where a folder for them is given; return the files, the page first.

    Only an earlier report is replaced at ``out``, a page ``*.html``. The folder ``plots`` gets each plot as PNG and
    SVG, the folder ``csv`` gets ``summary.csv`` and ``samples.csv``; files of these names are replaced.

    Raises UsageError if ``out`` does not end in ``.html``; DestinationExistsError if ``out`` is a file other than a
    report; MissingExtraError if matplotlib or jinja2 is not installed; StoreError if the operating system refuses.
    """
    page = Path(out)
    check_page(page)
    found = results if isinstance(results, Results) else read_results(results)
    drawn = draw_plots(found, for_files=plots is not None)
    files: dict[Path, bytes] = {page: report_page(found, drawn).encode()}
    if plots is not None:
        for plot in drawn:
            files[Path(plots) / f"{plot.name}.png"] = plot.png()
            files[Path(plots) / f"{plot.name}.svg"] = plot.file_svg().encode()
    if csv is not None:
        files[Path(csv) / "summary.csv"] = summary_csv(found).encode()
        files[Path(csv) / "samples.csv"] = samples_csv(found).encode()
    for path, content in files.items():
        replace_file(path, content)
    return list(files)


def samples_csv(results: Results) -> str:
    """Return every raw sample as CSV; a cell without figures has one row, whose measure and value are empty."""
    roles = {arm.name: arm.role for arm in results.arms}
    units = {measure.name: measure.unit for measure in results.measures}
    rows: list[Sequence[object]] = []
    for cell in sorted(results.cells, key=lambda cell: cell.order):
        about = (cell.block, cell.order, cell.status, cell.reason, cell.started, cell.amount)
        figures: dict[str, float | None] = {name: value for name, value in cell.figures.items() if value is not None}
        for name, value in (figures or {"": None}).items():
            rows.append((cell.arm, roles[cell.arm], *about, name, units.get(name, ""), value))
    return _csv(_SAMPLES, rows)


def summary_csv(results: Results) -> str:
    """Return the statistics of every arm and measure as CSV, in the units of the results file."""
    fields = [field.name for field in msgspec.structs.fields(Statistics)]
    rows = [
        (arm.name, arm.role, measure.name, measure.unit, *msgspec.structs.astuple(found))
        for arm in results.arms
        for measure in results.measures
        if (found := results.summary.arms.get(arm.name, {}).get(measure.name))
    ]
    return _csv(("arm", "role", "measure", "unit", *fields), rows)


def _csv(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_harmless(value) for value in row] for row in rows)
    return out.getvalue()


def _harmless(value: object) -> object:
    """Return a value that no spreadsheet evaluates as a formula: texts come from files that may be hostile."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
