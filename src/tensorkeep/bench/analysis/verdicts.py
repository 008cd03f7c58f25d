"""The verdict on an arm: helps, hurts, about the same, within noise, too few runs, or a state too small to time.

A difference counts only if three things agree: the test, adjusted for all arms of the measure; the 95% interval, which
must lie on one side of 1; and the A/A control, the baseline measured again under another name, whose own difference is
noise. A difference of less than 5% does not matter: if the whole interval lies within 5% of 1, or a smaller difference
is shown, the arms are about the same. Losses are the exception: 0.1% of them counts. No arm is judged on a checkpoint
below 256 MB: opening files dominates so short a time.
"""

import math
from collections.abc import Sequence

from tensorkeep.bench.analysis.statistics import LEVEL, Comparison
from tensorkeep.bench.analysis.wording import difference, interval_95, number
from tensorkeep.bench.results import Measure, Noise, Results, Verdict
from tensorkeep.units import counted

SMALLEST = 1.001
"""The smallest gain that counts as a difference of losses."""

PRACTICAL = 1.05
"""The smallest gain in time, rate or bytes that is worth a verdict."""

SMALLEST_STATE = 256_000_000
"""Bytes of the smallest checkpoint whose times are judged."""


TOO_SMALL = (
    "a state of {} is too small to time: opening files, caches and the first use of memory dominate, so no tool is "
    "called better or worse, and none is recommended; 256 MB is enough: --model openllama-3b:scale=0.1 has 700 MB"
)


def threshold(measure: Measure) -> float:
    """Return the smallest gain in a measure that is worth a verdict."""
    return SMALLEST if measure.unit == "nats" else PRACTICAL


def too_small(results: Results) -> bool:
    """Return whether checkpoints were measured on a state that is too small for verdicts and recommendations."""
    nbytes = results.subject.bytes
    return results.experiment.workload == "checkpoint" and nbytes is not None and nbytes < SMALLEST_STATE


def noise_of(controls: Sequence[Comparison]) -> Noise | None:
    """Return the noise floor that A/A controls show; None without one that ran in at least two blocks."""
    shown = [(one.low, one.high, one.n) for one in controls if one.low is not None and one.high is not None]
    if not shown:
        return None
    lows, highs, blocks = zip(*shown, strict=True)
    return Noise(min(lows), max(highs), max(1 / min(lows), max(highs), 1.0), min(blocks))


def judge(
    comparison: Comparison, p_holm: float | None, noise: Noise | None, least: float = PRACTICAL
) -> tuple[Verdict, str]:
    """Return the verdict on an arm that was compared with the baseline, and a sentence that explains it.

    ``p_holm`` is the comparison's p-value, adjusted across the arms of the measure. A gain must exceed the noise and
    ``least``.
    """
    low, high = comparison.low, comparison.high
    if p_holm is None or low is None or high is None:
        return "too few runs", f"{counted(comparison.n, 'block')} cannot separate a difference from noise"
    p = f"adjusted p {p_holm:.2g}" if p_holm >= 0.0001 else "adjusted p below 0.0001"
    if (noise is None or noise.floor <= least) and 1 / least < low and high < least:
        return "about the same", f"any difference is below {difference(max(high, 1 / low))}: {interval_95(low, high)}"
    if p_holm >= LEVEL or low <= 1 <= high:
        return "within noise", f"no difference is shown: {interval_95(low, high)}, {p}"
    size = math.exp(abs(math.log(comparison.gain)))
    noisy = noise if noise is not None and noise.floor > SMALLEST else None
    if noisy is not None and size <= noisy.floor:
        return "within noise", (
            f"the difference, {difference(size)}, does not exceed the A/A control's: {difference(noisy.floor)}"
        )
    if size <= least:
        return (
            "about the same",
            f"the difference, {difference(size)}, is too small to matter: below {difference(least)}",
        )
    beyond = f", beyond the noise of {difference(noisy.floor)}" if noisy else ""
    if comparison.gain > 1:
        return "helps", f"{number(size)} times better ({interval_95(low, high)}, {p}){beyond}"
    return "hurts", f"{number(size)} times worse ({interval_95(1 / high, 1 / low)}, {p}){beyond}"
