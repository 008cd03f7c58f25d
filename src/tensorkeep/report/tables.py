"""The tables of a report: verdicts, observations, and why arms did not run."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorkeep.bench.analysis.wording import NOTHING, capitalised, gain, interval, number, percent, probability, spread
from tensorkeep.bench.results import Arm, Cell, Measure, Results
from tensorkeep.report.measures import Scale, compared_arms, scale_of
from tensorkeep.units import format_rate

TONES: dict[str | None, str] = {
    "helps": "good",
    "hurts": "bad",
    "about the same": "faint",
    "within noise": "faint",
    "not run": "faint",
    "too few runs": "faint",
    "too small": "faint",
}

STATUS = {
    "ok": "ok",
    "planned": "not reached",
    "gate": "wrong result",
    "failed": "failed",
    "timeout": "timed out",
    "memory": "out of memory",
    "disk": "disk full",
    "not-run": "not run",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a table."""

    text: str
    order: float | None = None  # what the page sorts by; None sorts by the text, behind all numbers
    tone: str = ""  # classes of the page: ``"good"``, ``"bad"``, ``"faint"``, or the colour of a heat map
    code: bool = False  # whether it is set in a fixed-width font
    about: str = ""  # what a pointer over it shows


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table that the command line prints, the page makes sortable, and a file may hold."""

    title: str
    headings: tuple[str, ...]  # a leading ``>`` aligns the column to the right, ``=`` keeps it unwrapped
    rows: Sequence[tuple[Entry, ...]]
    note: str = ""  # a sentence below the table

    def texts(self) -> list[tuple[str, ...]]:
        """Return the rows as text."""
        return [tuple(entry.text for entry in row) for row in self.rows]


def gain_entries(value: float | None, low: float | None, high: float | None) -> tuple[Entry, Entry]:
    """Return a gain, toned by whether its interval excludes 1, and the interval."""
    tone = ""
    if low is not None and high is not None:
        tone = "good" if low > 1 else "bad" if high < 1 else "faint"
    return Entry(gain(value), value, tone), Entry(interval(low, high), low)


def why_not_run(cells: Sequence[Cell]) -> tuple[str, str]:
    """Return why an arm has no figures, as (status in words, reason)."""
    bad = [cell for cell in cells if cell.status != "ok"]
    if not bad:
        return NOTHING, "no cell was planned"
    # A failure explains more than a cell that was never reached.
    worst = min(bad, key=lambda cell: (cell.status == "planned", cell.order))
    return STATUS[worst.status], worst.reason or ""


def verdict_table(results: Results, measure: Measure) -> ReportTable:
    """Return the verdict on every arm in one measure: the baseline, the others, the A/A control."""
    scale = scale_of(results, measure)
    extra = _per_byte_headings(results).get(measure.unit, ())
    figures = (f">median ({scale.unit})", ">mean ± std", ">gain", ">95% interval", ">change")
    headings = ("=arm", "=verdict", *figures, *extra, ">p (Holm)", ">runs")
    note = f"{capitalised(measure.about).rstrip('.')}. " if measure.about else ""
    note += "Gain: how many times better than the baseline, above 1 is better."
    return ReportTable(measure.label, headings, [_row(results, arm, scale) for arm in _all_arms(results)], note)


def not_run_table(results: Results) -> ReportTable:
    """Return the cells that have no figures, and why."""
    rows = []
    for arm in _all_arms(results):
        cells = results.cells_by_arm[arm.name]
        bad = [cell for cell in cells if cell.status != "ok"]
        if bad or not cells:
            status, reason = why_not_run(bad)
            rows.append((Entry(arm.name), Entry(status), Entry(f"{len(bad)} of {len(cells)}"), Entry(reason)))
    return ReportTable("Not run", ("=arm", "=status", ">cells", "reason"), rows)


def observed_table(results: Results) -> ReportTable:
    """Return the proof of each technique in the first training step, from the first cell of each arm."""
    rows = []
    for arm in _all_arms(results):
        cell = next((cell for cell in results.cells_by_arm[arm.name] if cell.observed), None)
        for technique, text in cell.observed.items() if cell else ():
            rows.append((Entry(arm.name), Entry(technique), Entry(text)))
    return ReportTable("Techniques observed", ("=arm", "=technique", "observed in the first step"), rows)


def _all_arms(results: Results) -> list[Arm]:
    return [*compared_arms(results), *(arm for arm in results.arms if arm.role == "control")]


def _row(results: Results, arm: Arm, scale: Scale) -> tuple[Entry, ...]:
    found = results.statistics(arm.name, scale.measure.name)
    cells = results.cells_by_arm[arm.name]
    described = scale.describe(results, arm.name)
    verdict: str = found.verdict or "no verdict"
    if described is None:
        status = why_not_run(cells)[0]
        verdict = status if status != NOTHING or not cells else "not measured"
        entries = [Entry(arm.name), Entry(verdict, tone="faint"), Entry(NOTHING), Entry(NOTHING)]
    else:
        both = spread(described.mean, described.std)
        entries = [Entry(arm.name), Entry(verdict, tone=TONES.get(verdict, ""))]
        entries += [Entry(number(described.median, 4), described.median), Entry(both, described.mean)]
    entries += [
        Entry(gain(found.gain), found.gain, TONES.get(found.verdict, "")),
        Entry(interval(found.gain_low, found.gain_high), found.gain_low),
        Entry(percent(found.change_percent), found.change_percent),
    ]
    if scale.measure.unit in _per_byte_headings(results):
        entries.append(_per_byte(found.per_byte, scale.measure.unit))
    runs = described.n if described else 0
    return (*entries, Entry(probability(found.p_holm), found.p_holm), Entry(str(runs), runs))


def _per_byte_headings(results: Results) -> dict[str, tuple[str]]:
    """Return the units whose figures also have a column per byte of the saved state."""
    return {} if results.experiment.workload == "training" else {"s": (">throughput",), "B": (">of raw",)}


def _per_byte(middle: float | None, unit: str) -> Entry:
    """Return raw bytes per second, or stored bytes as a fraction of the raw ones, from a median per raw byte."""
    if not middle:
        return Entry(NOTHING)
    if unit == "s":
        return Entry(format_rate(1, middle), 1 / middle)
    return Entry(f"{middle:.3f}", middle)
