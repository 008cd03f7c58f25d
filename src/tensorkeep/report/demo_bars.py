"""The bars of the demo, for the terminal and for its page."""

from collections.abc import Iterable

from tensorkeep.bench.checkpoint.measure import FIRST, SAVE, STORED, WARM
from tensorkeep.bench.demo.speed import TOOLS, SmallRun, figures
from tensorkeep.bench.results import Results
from tensorkeep.bench.run.rounds import Rounds
from tensorkeep.report.charts.bars import Bar, Bars
from tensorkeep.units import format_bytes, format_seconds

_TITLES = {SAVE: "durable save", FIRST: "first load in a new process", STORED: "bytes on disk"}
_SIX_WAY = {
    SAVE: "durable save, seconds per GB",
    WARM: "load, seconds per GB",
    STORED: "bytes on disk per byte of state",
}


def speed_bars(rounds: Rounds, t5x: SmallRun, nbytes: int) -> list[Bars]:
    """Return the bars of saves, first loads and bytes; T5X's are scaled to the full state."""
    table = figures(rounds)
    found = []
    for measure, title in _TITLES.items():
        form = format_bytes if measure == STORED else format_seconds
        row = table.get(measure, {})
        bars = [Bar(arm, row[arm].median, form(row[arm].median), tone=_tone(arm)) for arm in TOOLS if arm in row]
        scaled = t5x.scaled(measure, nbytes)
        if scaled is not None:
            bars.append(Bar("t5x", scaled, f"{form(scaled)} *", scaled=True))
        found.append(Bars(title, bars))
    return found


def six_way_bars(results: Results) -> list[Bars]:
    """Return the bars of a comparison whose arms worked on states of different sizes: each figure per byte."""
    return [Bars(title, list(_per_byte(results, measure))) for measure, title in _SIX_WAY.items()]


def _per_byte(results: Results, measure: str) -> Iterable[Bar]:
    for arm in results.arms:
        value = results.statistics(arm.name, measure).per_byte
        if value is not None:
            shown = value if measure == STORED else value * 1e9
            text = f"{shown:.2f}" if measure == STORED else format_seconds(shown)
            yield Bar(arm.name, shown, text, tone=_tone(arm.name))


def _tone(arm: str) -> str:
    return "good" if arm.startswith("tensorkeep") else ""
