"""The report of a results file: one offline page of HTML, the plots as PNG and SVG, and the figures as CSV."""

import csv
import io
import json
import math
import os
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tensorkeep.ext import format_bytes, number
from tensorkeep.ext.pages import (
    Bars,
    Chart,
    ChartBar,
    Curve,
    PageKind,
    Point,
    ReportTable,
    TableEntry,
    chart,
    check_page,
    facts_of,
    render_page,
)
from tensorkeep.ext.storage import replace_file
from tensorkeep_bench.report import measures, sentences, tables
from tensorkeep_bench.report.drawing import GAIN_LEGEND, png_file, svg_file
from tensorkeep_bench.report.plots import FILES_ONLY, NAME_LENGTH, Plot, draw_plots, wanted
from tensorkeep_bench.results import ArmStatistics, CellRecord, Measure, Results, Subject, read_results
from tensorkeep_bench.wording import capitalised, clipped

REPORT = PageKind("report", "report", "tensorkeep-bench", "tensorkeep_bench.report")

_MOST_CELLS = 3000


def report_page(results: Results, plots: list[Plot]) -> str:
    """Return the page with the plots of `draw_plots`; MissingExtraError if jinja2 is not installed."""
    shown = {plot.name: (plot.title, plot.canvas.page_svg(plot.title)) for plot in plots if plot.name not in FILES_ONLY}
    # A design has a plot of its own. Bars begin at 0, where no loss is, so that training has a map of gains.
    usual = "gains" if results.experiment.workload == "training" else "bars"
    recommended = results.summary.recommendations
    heading, subject = results.experiment.title or results.experiment.name, measures.subject_and_machine(results)
    return render_page(
        "template.html.j2",
        REPORT,
        results=results,
        plots=shown,
        picture=next((name for name in ("steps", "effects") if name in shown), usual),
        title=f"{heading}: {subject}",
        heading=heading,
        measured=subject,
        verdict=sentences.verdict_sentence(results),
        bars=amount_bars(results),
        bars_note=bars_note(results),
        bar_legend=BAR_LEGEND,
        gains=tables.gain_map(results),
        gain_legend=GAIN_LEGEND,
        losses=loss_charts(results),
        losses_note=losses_note(results),
        measured_by=sentences.measured_by(results),
        incomplete=sentences.completeness(results),
        headlines=sentences.headlines(results),
        recommendations=[(sentences.purpose(one), capitalised(one.text), one) for one in recommended],
        as_json=_json,
        noise=sentences.noise_lines(results),
        comparison=tables.isolated_table(results),
        verdicts=[tables.verdict_table(results, measure) for measure in results.primary()],
        **tables.design_tables(results),
        aliases=tables.aliases_lines(results),
        claims=tables.claims_table(results),
        not_run=tables.not_run_table(results),
        observed=tables.observed_table(results),
        environment=facts_of(results.environment),
        subject=_subject(results.subject),
        arms=arms_table(results),
        cells=_cells(results),
        left_out=max(0, len(results.cells) - _MOST_CELLS),
        experiment=_json(msgspec.to_builtins(results.experiment)),
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value else ""


def _subject(subject: Subject) -> list[tuple[str, str]]:
    if subject == Subject():
        return []
    facts = [("state", subject.description)]
    if subject.tensors is not None:
        facts.append(("tensors", f"{subject.tensors:,}"))
    if subject.bytes is not None:
        # GiB as well, because the published comparison uses GiB.
        binary = f" ({subject.bytes / measures.GIB:.2f} GiB)" if subject.bytes >= measures.GIB / 100 else ""
        facts.append(("raw bytes", f"{format_bytes(subject.bytes)}{binary}"))
    return facts + [(name, format_bytes(count)) for name, count in subject.dtypes.items()]


def arms_table(results: Results) -> ReportTable:
    rows = []
    for arm in results.arms:
        settings = TableEntry(json.dumps(arm.settings, ensure_ascii=False), code=True)
        rows.append((*tables.entries(arm.name, arm.role, arm.about), settings))
    return ReportTable("Arms", ("=arm", "=role", "about", "settings"), rows)


def _cells(results: Results) -> ReportTable:
    rows: list[tuple[TableEntry, ...]] = []
    # A page with all cells of a large experiment would be slow to open.
    for cell in sorted(results.cells, key=lambda cell: cell.order)[:_MOST_CELLS]:
        figures = [_raw(cell.figures.get(measure.name)) for measure in results.measures]
        rows.append(
            (
                TableEntry(cell.arm),
                TableEntry(str(cell.block + 1), cell.block),
                TableEntry(str(cell.order + 1), cell.order),
                TableEntry(tables.STATUS[cell.status], tone="" if cell.status == "ok" else "bad"),
                *figures,
                _raw(cell.seconds),
                TableEntry(shlex.join(cell.command), code=True),
            )
        )
    taken = [f">{one.label} ({one.unit})" for one in results.measures]
    headings = ("=arm", ">block", ">order", "=status", *taken, ">process (s)", "=command")
    return ReportTable("Every cell", headings, rows, "Raw samples in the order of the runs.")


def _raw(value: float | None) -> TableEntry:
    if value is None:
        return TableEntry("-")
    return TableEntry(f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else number(value, 4), value)


# Writing the files

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
    SVG, the folder ``csv`` gets ``summary.csv`` and ``samples.csv``; existing files are replaced.

    Raises UsageError if ``out`` does not end in ``.html``; DestinationExistsError if ``out`` is a file other than a
    report; MissingExtraError if jinja2, or Pillow for PNG, is not installed; StoreError if a file cannot be written.
    """
    page = Path(out)
    check_page(page, REPORT)
    # Everything is drawn before the first file is written: an error leaves no half of a report.
    found = results if isinstance(results, Results) else read_results(results)
    drawn = draw_plots(found, for_files=plots is not None)
    files: dict[Path, bytes] = {page: report_page(found, drawn).encode()}
    if plots is not None:
        for plot in drawn:
            files[Path(plots) / f"{plot.name}.png"] = png_file(plot.canvas, plot.title)
            files[Path(plots) / f"{plot.name}.svg"] = svg_file(plot.canvas, plot.title).encode()
            if plot.name in found.experiment.figure_names:
                also = page.with_name(f"{found.experiment.figure_names[plot.name]}.png")
                files[also] = files[Path(plots) / f"{plot.name}.png"]
    if csv is not None:
        files[Path(csv) / "summary.csv"] = summary_csv(found).encode()
        files[Path(csv) / "samples.csv"] = samples_csv(found).encode()
    for path, content in files.items():
        replace_file(path, content)
    return list(files)


def report_files(results: Results, page: Path, plots: Path, csv: Path) -> list[Path]:
    """Return the files that `write_report` writes for these results."""
    names = [name for name, *_ in wanted(results)]
    others = {results.experiment.figure_names[name] for name in names if name in results.experiment.figure_names}
    return [
        page,
        *(plots / f"{name}{suffix}" for name in names for suffix in (".png", ".svg")),
        *(page.with_name(f"{name}.png") for name in others),
        csv / "summary.csv",
        csv / "samples.csv",
    ]


def samples_csv(results: Results) -> str:
    """Return every raw sample as CSV; a cell without figures has one row, with empty measure and value."""
    roles = {arm.name: arm.role for arm in results.arms}
    units = {measure.name: measure.unit for measure in results.measures}
    rows: list[Sequence[object]] = []
    for cell in sorted(results.cells, key=lambda cell: cell.order):
        about = (cell.block, cell.order, cell.status, cell.reason, cell.started, cell.amount)
        figures: dict[str, float | None] = {name: value for name, value in cell.figures.items() if value is not None}
        # A cell without figures has one row, so that its reason is in the file.
        for name, value in (figures or {"": None}).items():
            rows.append((cell.arm, roles[cell.arm], *about, name, units.get(name, ""), value))
    return _csv(_SAMPLES, rows)


def summary_csv(results: Results) -> str:
    fields = [field.name for field in msgspec.structs.fields(ArmStatistics)]
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
    # A spreadsheet would evaluate such a text as a formula, and texts come from files that may be hostile.
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


# Bars, which the terminal prints, too: saving, loading and size by arm

_MOST_BARS = 14
_TONES = {"helps": "good", "hurts": "bad"}

# Tones of bars, and their meaning.
BAR_LEGEND = (("base", "baseline"), ("good", "better"), ("bad", "worse"), ("", "not decided, or about the same"))


def amount_bars(results: Results) -> list[Bars]:
    return [_bars(results, measure) for measure in measures.compared_measures(results).named().values()]


def bars_note(results: Results) -> str:
    count = sum(results.ran(arm.name) for arm in measures.compared_arms(results))
    left_out = f" The baseline and the best {_MOST_BARS - 1} of {count} arms." if count > _MOST_BARS else ""
    return f"Medians, the best first: shorter is better. Line: range of the runs.{left_out}"


def _bars(results: Results, measure: Measure) -> Bars:
    scale, bars = measures.scale_of(results, measure), []
    for arm in measures.compared_arms(results):
        found = scale.describe(results, arm.name)
        if found is not None:
            verdict = results.statistics(arm.name, measure.name).verdict
            tone = "base" if arm.name == results.baseline else _TONES.get(verdict or "", "")
            text = number(found.median) if scale.per_byte else f"{number(found.median)} {scale.unit}"
            bars.append(ChartBar(arm.name, found.median, text, tone=tone, low=found.low, high=found.high))
    bars.sort(key=lambda bar: bar.value)
    # The baseline is always kept; the sort is stable, so the best of the others follow.
    kept = sorted(bars, key=lambda bar: bar.tone != "base")[:_MOST_BARS]
    return Bars(capitalised(scale.label), [bar for bar in bars if bar in kept])


# Loss curves

# The names of the measures are not imported from the workload, which needs torch.
_LOSS, _STEP = "loss", "step"
_COLOURS = ("base", "first", "second", "third", "fourth")


def loss_charts(results: Results) -> list[Chart]:
    cells = {
        arm.name: [cell for cell in results.cells_by_arm[arm.name] if cell.status == "ok" and cell.losses]
        for arm in measures.compared_arms(results)
    }
    arms = [name for name, own in cells.items() if own]
    # The baseline, then the arms with the most different losses: equal curves hide each other.
    arms.sort(key=lambda name: (name != results.baseline, -_distance(results, name)))
    # The colour of the baseline is only its own.
    colours = _COLOURS if results.baseline in arms else _COLOURS[1:]
    drawn = {name: cells[name] for name in arms[: len(colours)]}
    name = measures.subject_name(results)
    found = [_chart(f"Training loss (nats) by step: {name}", "step", drawn, colours, lambda cell: 1.0)]
    # Without the time of a step, a curve has no seconds.
    if all(cell.figures.get(_STEP) for own in drawn.values() for cell in own):
        title = f"Training loss (nats) by second: {name}"
        found.append(_chart(title, "second", drawn, colours, lambda cell: cell.figures[_STEP] or 0.0))
    return [each for each in found if each is not None]


def losses_note(results: Results) -> str:
    count = sum(any(cell.losses for cell in results.cells_by_arm[arm.name]) for arm in measures.compared_arms(results))
    text = "Mean of the blocks. Seconds: of training alone, at the median step."
    if count > len(_COLOURS):
        text += (
            f" The baseline and the {len(_COLOURS) - 1} of {count - 1} arms with the most different validation loss."
        )
    return text


def _distance(results: Results, arm: str) -> float:
    gain = results.statistics(arm, _LOSS).gain
    return abs(math.log(gain)) if gain and gain > 0 else 0.0


def _chart(
    title: str,
    by: str,
    cells: dict[str, list[CellRecord]],
    colours: Sequence[str],
    scale: Callable[[CellRecord], float],
) -> Chart | None:
    curves = [
        Curve(clipped(name, NAME_LENGTH), colour, _mean(own, statistics.fmean(map(scale, own))))
        for (name, own), colour in zip(cells.items(), colours, strict=False)
    ]
    return chart(title, curves, by=by)


def _mean(cells: list[CellRecord], scale: float) -> list[Point]:
    found: dict[int, list[float]] = defaultdict(list)
    for cell in cells:
        for step, loss in cell.losses:
            found[step].append(loss)
    # Only steps that all cells have: a mean of fewer cells would jump where a run ended.
    return [(step * scale, statistics.fmean(own)) for step, own in sorted(found.items()) if len(own) == len(cells)]
