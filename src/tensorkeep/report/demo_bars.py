"""The bars of the demo, for the terminal and for its page."""

from collections.abc import Iterable
from dataclasses import dataclass

from tensorkeep.bench.checkpoint.measure import FIRST, SAVE, STORED, WARM
from tensorkeep.bench.demo.speed import TOOLS, SmallRun, figures
from tensorkeep.bench.results import Results
from tensorkeep.bench.run.rounds import Rounds
from tensorkeep.units import format_bytes, format_seconds

_TITLES = {SAVE: "durable save", FIRST: "first load in a new process", STORED: "bytes on disk"}
_SIX_WAY = {
    SAVE: "durable save, seconds per GB",
    WARM: "load, seconds per GB",
    STORED: "bytes on disk per byte of state",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its value, which the text shows with a unit; ``scaled`` from a smaller state."""

    label: str
    value: float
    text: str
    scaled: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is a bar of Tensorkeep."""
        return self.label.startswith("tensorkeep")


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one measure; less is better."""

    title: str
    bars: list[Bar]

    @property
    def full(self) -> float:
        """The value of a bar of full length: the largest that was measured at full size; longer ones are cut off."""
        return max((bar.value for bar in self.bars if not bar.scaled), default=1.0)


def speed_bars(rounds: Rounds, t5x: SmallRun, nbytes: int) -> list[Bars]:
    """Return the bars of saves, first loads and bytes; T5X's are scaled to the full state."""
    table = figures(rounds)
    found = []
    for measure, title in _TITLES.items():
        form = format_bytes if measure == STORED else format_seconds
        row = table.get(measure, {})
        bars = [Bar(arm, row[arm].median, form(row[arm].median)) for arm in TOOLS if arm in row]
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
            yield Bar(arm.name, shown, f"{shown:.2f}" if measure == STORED else f"{format_seconds(shown)}")
