"""The page of ``tensorkeep demo``: fills ``report/page/demo.html.j2``."""

from pathlib import Path

from tensorkeep.bench.analysis.wording import number
from tensorkeep.bench.checkpoint.measure import FIRST, SAVE, STORED
from tensorkeep.bench.demo.results import DemoResults, facts
from tensorkeep.bench.demo.speed import notes
from tensorkeep.report.charts.curves import Chart, Curve, Point, chart
from tensorkeep.report.comparison import improvements_table, isolated_table
from tensorkeep.report.demo_bars import six_way_bars, speed_bars
from tensorkeep.report.html import arms_table, facts_of
from tensorkeep.report.rendering import check_page, render_page
from tensorkeep.report.tables import Entry, ReportTable
from tensorkeep.storage.commit import replace_file
from tensorkeep.units import counted, format_bytes, format_seconds
from tensorkeep.version import __version__


def write_demo_page(results: DemoResults, page: Path) -> None:
    """Write the page, which opens offline in any browser; only an earlier report is replaced.

    Raises UsageError if the name does not end in ``.html``; DestinationExistsError if it is a file other than a report.
    """
    check_page(page)
    replace_file(page, demo_page(results).encode())


def demo_page(results: DemoResults) -> str:
    """Return the page."""
    six_way = results.six_way
    return render_page(
        "demo.html.j2",
        title="Tensorkeep on this machine",
        description=results.description,
        lines=facts(results),
        rounds=counted(results.rounds.count, "round"),
        speed=speed_bars(results.rounds, results.t5x, results.state_bytes),
        notes=notes(results.rounds, results.t5x),
        samples=_samples(results),
        flip=results.damage.flip,
        bit=_bit_table(results),
        kills=_kill_table(results),
        training=results.training.text(),
        curves=_curves(results),
        six_about=six_way.experiment.about,
        six=six_way_bars(six_way),
        six_tables=[isolated_table(six_way), improvements_table(six_way)],
        six_arms=arms_table(six_way),
        environment=facts_of(six_way.environment),
        version=__version__,
    )


def _samples(results: DemoResults) -> ReportTable:
    rows = [
        (
            Entry(cell.arm),
            Entry(str(cell.block + 1), cell.block),
            *(_seconds(cell.figures.get(measure)) for measure in (SAVE, FIRST)),
            Entry(f"{cell.figures.get(STORED) or 0:,.0f}", cell.figures.get(STORED)),
        )
        for cell in results.rounds.cells
        if cell.status == "ok"
    ]
    headings = ("=tool", ">round", ">durable save (s)", ">first load (s)", ">bytes on disk")
    return ReportTable("Every run", headings, rows, "In the order in which they ran.")


def _seconds(value: float | None) -> Entry:
    return Entry("-") if value is None else Entry(f"{value:.3f}", value)


def _bit_table(results: DemoResults) -> ReportTable:
    rows = []
    for each in results.peers:
        outcome = f"loads {number(each.after or 0.0)} instead of {number(each.before)}, without an error"
        entry = Entry(outcome, tone="bad") if each.silent else Entry(f"raises: {each.error}", tone="good")
        rows.append((Entry(each.tool), Entry(each.file), Entry(f"{each.offset:,}", each.offset), entry))
    flip, damage = results.damage.flip, results.damage
    outcome = f"names tensor {flip.name}, block {flip.block}, and refuses to load it: {damage.refusal}"
    if damage.report.ok:
        outcome = "did not notice"
    tone = "bad" if damage.report.ok else "good"
    rows.append(
        (Entry("tensorkeep"), Entry(flip.file), Entry(f"{flip.offset:,}", flip.offset), Entry(outcome, tone=tone))
    )
    return ReportTable("What each tool makes of it", ("=tool", "=file", ">byte", "outcome"), rows)


def _kill_table(results: DemoResults) -> ReportTable:
    rows = []
    for kill in results.kills:
        left = Entry("whole: it loads, with every bit that it had", tone="good")
        if not kill.intact:
            left = Entry(f"broken: {kill.error}", tone="bad")
        written = f"{format_bytes(kill.written)} of {format_bytes(kill.nbytes)}"
        times = Entry(format_seconds(kill.seconds), kill.seconds), Entry(written, kill.written)
        rows.append((Entry(kill.tool), *times, left))
    return ReportTable("What is left", ("=tool", ">killed after", ">written by then", "the old checkpoint"), rows)


def _curves(results: DemoResults) -> list[Chart]:
    runs = results.training
    resumed = f"Loss of the run killed at step {runs.killed_at}, resumed from step {runs.resumed_from}"
    curves = (
        ("Loss of the run without a kill", Curve("loss", "neutral", _points(runs.unbroken))),
        (resumed, Curve("loss", "good", _points(runs.resumed))),
    )
    return [drawn for title, curve in curves if (drawn := chart(title, [curve])) is not None]


def _points(losses: list[float]) -> list[Point]:
    return [(float(step), loss) for step, loss in enumerate(losses, 1)]
