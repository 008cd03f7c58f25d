"""The figures of a results file by arm, measure and block; comparisons of two arms, and the verdict on each."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tensorkeep.ext import counted, number
from tensorkeep_bench.results import Arm, ArmStatistics, CellRecord, Measure, Noise, Results, Verdict
from tensorkeep_bench.statistics import LEVEL, Comparison, SharedVariance, compare
from tensorkeep_bench.wording import difference, interval_95

STORED = "stored"  # the measure of the bytes on disk

SMALLEST = 1.001  # the smallest gain that counts as a difference of losses

PRACTICAL = 1.05  # the smallest gain in time, rate or bytes that is worth a verdict

# Bytes of the smallest checkpoint that gets verdicts: opening files dominates the time of smaller ones.
SMALLEST_STATE = 256_000_000

_SHORTEST = 0.1  # seconds that are not too short for a small state

TOO_SMALL = (
    "a state of {} is too small to time: opening files, caches and the first use of memory dominate, so no tool is "
    "called faster or slower, and none is recommended; 256 MB is enough: --model openllama-3b:scale=0.1 has 700 MB"
)


class Samples:
    def __init__(self, results: Results) -> None:
        self.results = results
        self.experiment = results.experiment
        self.measures = results.measures
        self.arms = results.arms
        self.baseline = results.baseline
        self.primary = [measure for measure in results.measures if measure.primary]
        self._shared: dict[str, SharedVariance | None] = {}
        self._in_turns = {name for cell in results.cells for name in cell.turns}

    def cells_of(self, arm: str) -> list[CellRecord]:
        return self.results.cells_by_arm.get(arm, [])

    def raw(self, arm: str, measure: Measure) -> dict[int, float]:
        return comparable_figures(self.results, arm, measure.name)

    def per_byte(self, arm: str, measure: Measure) -> dict[int, float]:
        figures = self.raw(arm, measure)
        if measure.better == "higher":
            return figures
        # Per raw byte, so that an arm with a smaller subject compares fairly; a rate is relative already.
        amounts = {cell.block: cell.amount for cell in self.cells_of(arm)}
        return {block: value / amount for block, value in figures.items() if (amount := amounts[block])}

    def logs(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the logs of the figures by block, with the sign that makes larger better."""
        # The speed of a wrong result is worthless: an arm that failed its gate even once has no logs.
        if self.failed_gate(arm):
            return {}
        logs = self._logs(arm, measure)
        if measure.name not in self._in_turns:
            return logs
        # Relative to the baseline of the block, like the pairs of turns that replace it where a cell has them.
        base = self._logs(self.baseline or "", measure)
        relative = {block: log - base[block] for block, log in logs.items() if block in base}
        for cell in self.cells_of(arm):
            if cell.block in logs and (pairs := cell.turns.get(measure.name)):
                # Turns are less than a second apart, so their ratio is less noisy than the ratio of two cells.
                relative[cell.block] = _sign(measure) * typical_log_ratio(pairs)
        return relative

    def _logs(self, arm: str, measure: Measure) -> dict[int, float]:
        found = self.per_byte(arm, measure).items()
        return {block: _sign(measure) * math.log(value) for block, value in found if value > 0}

    def log_gains(self, arm: str, over: str, measure: Measure) -> list[float]:
        ours, theirs = self.logs(arm, measure), self.logs(over, measure)
        # Within one block only: what slows a block down cancels.
        return [ours[block] - theirs[block] for block in sorted(ours.keys() & theirs.keys())]

    def compare(self, arm: str | None, over: str | None, measure: Measure | None) -> Comparison | None:
        """Return how many times better an arm is than another; None if no block has both, or one does not exist."""
        if arm is None or over is None or measure is None:
            return None
        gains = self.log_gains(arm, over, measure)
        if not gains:
            return None
        if len(gains) == 1 and measure.name == STORED:
            # Files have the same size in every run: another block would repeat the ratio.
            return replace(compare(gains * 2), n=1)
        # Without turns, all arms share the errors of the baseline's cells: the arms are not independent evidence.
        return compare(
            gains, self._shared_of(measure) if over == self.baseline and self.in_turns(arm, measure) else None
        )

    def _shared_of(self, measure: Measure) -> SharedVariance | None:
        # Kept, because every comparison of the measure needs it.
        if measure.name not in self._shared:
            others = [arm.name for arm in self.arms if arm.name != self.baseline and self.in_turns(arm.name, measure)]
            gains = [self.log_gains(name, self.baseline or "", measure) for name in others]
            self._shared[measure.name] = SharedVariance.of(gains)
        return self._shared[measure.name]

    def arm_at(self, kind: str, change: str = "") -> Arm | None:
        places = ((arm, place.kind, place.change) for arm in self.arms for place in arm.places)
        return next((arm for arm, *place in places if place == [kind, change]), None)

    def statistics(self, arm: Arm, measure: Measure) -> ArmStatistics:
        return self.results.statistics(arm.name, measure.name)

    def failures(self, arm: str) -> list[CellRecord]:
        return [cell for cell in self.cells_of(arm) if cell.status not in ("ok", "planned")]

    def failed_gate(self, arm: str) -> bool:
        return any(cell.status == "gate" for cell in self.cells_of(arm))

    def in_turns(self, arm: str, measure: Measure) -> bool:
        figures = self.raw(arm, measure)
        turns = [cell.turns.get(measure.name) for cell in self.cells_of(arm) if cell.block in figures]
        # One block without turns is enough to share the errors of the baseline's cells.
        return bool(turns) and all(turns)


def comparable_figures(results: Results, arm: str, measure: str) -> dict[int, float]:
    """Return the figures of an arm by block, in the unit of the measure.

    A cell that took turns with the baseline has the figure of the baseline's cell, times their ratio in turns.
    """
    found, base = results.figures(arm, measure), results.figures(results.baseline or "", measure)
    for cell in results.cells_by_arm.get(arm, ()):
        # The cells of a block ran at other times, so that their own figures may differ the other way than their turns.
        if cell.block in found and cell.block in base and (pairs := cell.turns.get(measure)):
            found[cell.block] = base[cell.block] * math.exp(typical_log_ratio(pairs))
    return found


def typical_log_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    logs = sorted(math.log(ours / theirs) for ours, theirs in pairs)
    # The interquartile mean: other work on the machine disturbs single pairs by much.
    middle = logs[len(logs) // 4 : len(logs) - len(logs) // 4]
    return math.fsum(middle) / len(middle)


def _sign(measure: Measure) -> int:
    return 1 if measure.better == "higher" else -1


def threshold(measure: Measure) -> float:
    return SMALLEST if measure.unit == "nats" else PRACTICAL


def too_small(results: Results) -> bool:
    nbytes = results.subject.bytes
    return results.experiment.workload == "checkpoint" and nbytes is not None and nbytes < SMALLEST_STATE


def too_short(results: Results, arm: str, measure: Measure) -> bool:
    """Return whether the times of an arm show nothing, because the state is small and they are short."""
    if measure.unit != "s" or not too_small(results):
        return False
    # Writing thousands of files takes seconds even of a small state, and is what some experiments are about.
    return (results.statistics(arm, measure.name).median or 0.0) < _SHORTEST


def unreached(results: Results) -> str:
    """Return how many cells of an interrupted run were not reached, as ``2 of 9 cells were not reached``, else ""."""
    waiting = sum(cell.status == "planned" for cell in results.cells)
    return f"{waiting} of {counted(len(results.cells), 'cell')} were not reached" if waiting else ""


def more_blocks(results: Results, runs: int = 5) -> str:
    """Return how to measure more blocks: ``--runs 5``, or a larger budget where the budget ended the run."""
    budget, blocks = results.experiment.budget, results.blocks
    if budget is None or blocks >= (results.experiment.runs or 0) or unreached(results):
        return f"--runs {runs}"
    seconds = [(cell.block, cell.seconds or 0.0) for cell in results.cells]
    another = sum(each for block, each in seconds if block == blocks - 1)
    # A run whose arms were precise enough ends early, too.
    if sum(each for _, each in seconds) + another <= budget:
        return f"--runs {runs}"
    return f"a --budget of more than {budget:g} s"


def noise_of(controls: Sequence[Comparison]) -> Noise | None:
    """Return the noise floor that A/A controls show; None without a control that ran in at least two blocks."""
    shown = [(one.low, one.high, one.n) for one in controls if one.low is not None and one.high is not None]
    if not shown:
        return None
    lows, highs, blocks = zip(*shown, strict=True)
    # The distance from 1 in either direction, because a gain of 1/2 is as large as a gain of 2.
    return Noise(min(lows), max(highs), max(1 / min(lows), max(highs), 1.0), min(blocks))


# The verdicts that `judge` gives, and their rules; {least} is the smallest difference that is worth a verdict.
RULES: dict[Verdict, str] = {
    "helps": "the interval is above 1, adjusted p is below 0.05, and the gain exceeds {least} and the control (A/A)",
    "hurts": "the interval is below 1, adjusted p is below 0.05, and it is worse by more than {least} and the control",
    "about the same": "the whole interval, like the control's (A/A), lies within {least} of 1",
    "within noise": "the interval includes 1 and lies within the differences that the control (A/A) shows",
    "undecided": "no other rule holds after so many blocks; more blocks may decide",
    "too few runs": "one block has no interval",
}


def judge(
    comparison: Comparison, p_holm: float | None, noise: Noise | None, least: float = PRACTICAL
) -> tuple[Verdict, str]:
    """Return the verdict on an arm that was compared with the baseline, by `RULES`, and the figures that decided."""
    low, high = comparison.low, comparison.high
    if p_holm is None or low is None or high is None:
        return "too few runs", f"{counted(comparison.n, 'block')} cannot separate a difference from noise"
    floor = noise.floor if noise is not None else 1.0
    shown = interval_95(low, high)
    if floor <= least and 1 / least < low and high < least:
        return "about the same", f"any difference is below {difference(max(high, 1 / low))}: {shown}"
    size = math.exp(abs(math.log(comparison.gain)))
    control = f"the A/A control's: {difference(floor)}"
    if low <= 1 <= high:
        if noise is not None and 1 / floor <= low and high <= floor:
            return "within noise", f"{shown} includes 1, and any difference is below {control}"
        return "undecided", f"{shown} includes 1 and a difference of {difference(max(high, 1 / low))}"
    # From here on, the interval shows a difference; the test and the control must agree.
    p = f"adjusted p {p_holm:.2g}" if p_holm >= 0.0001 else "adjusted p below 0.0001"
    if p_holm >= LEVEL:
        return "undecided", f"{shown} excludes 1, but {p} is not below {LEVEL:g}: one of many arms may differ by chance"
    if floor > SMALLEST and size <= floor:
        return "undecided", f"{shown} excludes 1, but the gain, {difference(size)}, does not exceed {control}"
    if size <= least:
        return "undecided", f"{shown} excludes 1, but not that the difference is below {difference(least)}"
    # A control that is the same in every run has no noise to mention.
    beyond = f", more than {control}" if floor > SMALLEST else ""
    if comparison.gain > 1:
        return "helps", f"{number(size)} times better ({shown}, {p}){beyond}"
    return "hurts", f"{number(size)} times worse ({interval_95(1 / high, 1 / low)}, {p}){beyond}"
