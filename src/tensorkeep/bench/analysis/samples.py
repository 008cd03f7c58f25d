"""The measured values of a results file by arm, measure and block, and the comparison of two arms.

A figure counts only if its cell is ``ok``. Two figures are compared within one block and per raw byte, so that an arm
that worked on a smaller subject compares fairly. A rate (``better: higher``) is already relative and is not divided.
Where a cell took turns with the baseline, its pairs of turns are compared instead: they are less than a second apart.
"""

import math
from collections.abc import Sequence

from tensorkeep.bench.analysis.statistics import Comparison, Spread, compare
from tensorkeep.bench.results import Arm, Cell, Measure, Results, Statistics


class Samples:
    """The samples of one results file."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.experiment = results.experiment
        self.measures = results.measures
        self.arms = results.arms
        self.baseline = results.baseline
        self._spreads: dict[str, Spread | None] = {}
        self._in_turns = {name for cell in results.cells for name in cell.turns}
        self.primary = [measure for measure in results.measures if measure.primary]

    def cells_of(self, arm: str) -> list[Cell]:
        """Return an arm's cells, by block."""
        return self.results.cells_by_arm.get(arm, [])

    def raw(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the figures of an arm in a measure, by block."""
        return {
            cell.block: value
            for cell in self.cells_of(arm)
            if cell.status == "ok" and (value := cell.figures.get(measure.name)) is not None and 0 <= value < math.inf
        }

    def per_byte(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the figures divided by the raw bytes worked on, by block; rates as they are."""
        figures = self.raw(arm, measure)
        if measure.better == "higher":
            return figures
        amounts = {cell.block: cell.amount for cell in self.cells_of(arm)}
        return {block: value / amount for block, value in figures.items() if (amount := amounts[block])}

    def logs(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the log of each block's figure, with the sign that makes larger better.

        Figures of zero have no logarithm and are left out. An arm that failed its gate even once has none: the speed of
        a wrong result is worthless. If cells take turns with the baseline, the logs are relative to it.
        """
        if self.failed_gate(arm):
            return {}
        logs = self._logs(arm, measure)
        if measure.name not in self._in_turns:
            return logs
        base = self._logs(self.baseline or "", measure)
        relative = {block: log - base[block] for block, log in logs.items() if block in base}
        for cell in self.cells_of(arm):
            if cell.block in logs and (pairs := cell.turns.get(measure.name)):
                relative[cell.block] = _sign(measure) * typical_log_ratio(pairs)
        return relative

    def _logs(self, arm: str, measure: Measure) -> dict[int, float]:
        found = self.per_byte(arm, measure).items()
        return {block: _sign(measure) * math.log(value) for block, value in found if value > 0}

    def log_gains(self, arm: str, over: str, measure: Measure) -> list[float]:
        """Return the log of how many times better an arm is than another, for each block that has both."""
        ours, theirs = self.logs(arm, measure), self.logs(over, measure)
        return [ours[block] - theirs[block] for block in sorted(ours.keys() & theirs.keys())]

    def compare(self, arm: str | None, over: str | None, measure: Measure | None) -> Comparison | None:
        """Return how many times better an arm is than another; None if no block has both, or one does not exist."""
        if arm is None or over is None or measure is None:
            return None
        gains = self.log_gains(arm, over, measure)
        if not gains:
            return None
        # Without turns, an arm shares the errors of the baseline's cells, and they are larger.
        return compare(gains, self._spread(measure) if over == self.baseline and self.in_turns(arm, measure) else None)

    def _spread(self, measure: Measure) -> Spread | None:
        """Return what the arms that took turns with the baseline show of the noise of a measure."""
        if measure.name not in self._spreads:
            others = [arm.name for arm in self.arms if arm.name != self.baseline and self.in_turns(arm.name, measure)]
            gains = [self.log_gains(name, self.baseline or "", measure) for name in others]
            self._spreads[measure.name] = Spread.of(gains)
        return self._spreads[measure.name]

    def arm_at(self, kind: str, change: str = "") -> Arm | None:
        """Return the arm at a place of the design, such as ``("alone", "zstd")``; None if it has none."""
        places = ((arm, place.kind, place.change) for arm in self.arms for place in arm.places)
        return next((arm for arm, *place in places if place == [kind, change]), None)

    def statistics(self, arm: Arm, measure: Measure) -> Statistics:
        """Return the statistics of an arm in a measure, which the summary of the results has."""
        return self.results.statistics(arm.name, measure.name)

    def failures(self, arm: str) -> list[Cell]:
        """Return an arm's cells without figures, except those that are still planned."""
        return [cell for cell in self.cells_of(arm) if cell.status not in ("ok", "planned")]

    def failed_gate(self, arm: str) -> bool:
        """Return whether an arm gave a wrong result in any block."""
        return any(cell.status == "gate" for cell in self.cells_of(arm))

    def in_turns(self, arm: str, measure: Measure) -> bool:
        """Return whether an arm took turns with the baseline in each block that has its figure."""
        figures = self.raw(arm, measure)
        turns = [cell.turns.get(measure.name) for cell in self.cells_of(arm) if cell.block in figures]
        return bool(turns) and all(turns)


def typical_log_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the interquartile mean of the logs of ratios: other work on the machine disturbs single pairs by much."""
    logs = sorted(math.log(ours / theirs) for ours, theirs in pairs)
    middle = logs[len(logs) // 4 : len(logs) - len(logs) // 4]
    return math.fsum(middle) / len(middle)


def _sign(measure: Measure) -> int:
    return 1 if measure.better == "higher" else -1
