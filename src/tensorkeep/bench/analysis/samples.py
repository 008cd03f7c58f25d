"""The measured values of a results file by arm, measure and block, and the comparison of two arms.

A figure counts only if its cell is ``ok``. Two figures are compared within one block and per raw byte, so that an arm
that worked on a smaller subject compares fairly. A rate (``better: higher``) is already relative and is not divided.
"""

import math

from tensorkeep.bench.analysis.statistics import Comparison, compare
from tensorkeep.bench.results import Arm, Cell, Measure, Results, Statistics


class Samples:
    """The samples of one results file."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.experiment = results.experiment
        self.measures = results.measures
        self.arms = results.arms
        self.baseline = results.baseline
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
        a wrong result is worthless.
        """
        if self.failed_gate(arm):
            return {}
        sign = 1 if measure.better == "higher" else -1
        return {block: sign * math.log(x) for block, x in self.per_byte(arm, measure).items() if x > 0}

    def log_gains(self, arm: str, over: str, measure: Measure) -> list[float]:
        """Return the log of how many times better an arm is than another, for each block that has both."""
        ours, theirs = self.logs(arm, measure), self.logs(over, measure)
        return [ours[block] - theirs[block] for block in sorted(ours.keys() & theirs.keys())]

    def compare(self, arm: str | None, over: str | None, measure: Measure | None) -> Comparison | None:
        """Return how many times better an arm is than another; None if no block has both, or one does not exist."""
        gains = [] if arm is None or over is None or measure is None else self.log_gains(arm, over, measure)
        return compare(gains) if gains else None

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
