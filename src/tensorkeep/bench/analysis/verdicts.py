"""The verdict on an arm: helps, hurts, within noise, or too few runs.

A difference counts only if three things agree: the test, adjusted for all arms of the measure; the 95% interval, which
must lie on one side of 1; and the A/A control, the baseline measured again under another name, whose own difference is
noise. Differences below 0.1% never count: sizes have no noise, and a few bytes of header are not worth a verdict.
"""

import math
from collections.abc import Sequence

from tensorkeep.bench.analysis.statistics import LEVEL, Comparison
from tensorkeep.bench.analysis.wording import difference, interval_95, number
from tensorkeep.bench.results import Noise, Verdict
from tensorkeep.units import counted

SMALLEST = 1.001
"""The smallest gain that counts as a difference, where the A/A control shows no noise at all."""


def noise_of(controls: Sequence[Comparison]) -> Noise | None:
    """Return the noise floor that A/A controls show; None without one that ran in at least two blocks."""
    shown = [(one.low, one.high, one.n) for one in controls if one.low is not None and one.high is not None]
    if not shown:
        return None
    lows, highs, blocks = zip(*shown, strict=True)
    return Noise(min(lows), max(highs), max(1 / min(lows), max(highs), 1.0), min(blocks))


def judge(comparison: Comparison, p_holm: float | None, noise: Noise | None) -> tuple[Verdict, str]:
    """Return the verdict on an arm that was compared with the baseline, and a sentence that explains it.

    ``p_holm`` is the comparison's p-value, adjusted across the arms of the measure. Without noise, a gain needs only to
    exceed `SMALLEST`.
    """
    low, high = comparison.low, comparison.high
    if p_holm is None or low is None or high is None:
        return "too few runs", f"{counted(comparison.n, 'block')} cannot separate a difference from noise"
    p = f"adjusted p {p_holm:.2g}" if p_holm >= 0.0001 else "adjusted p below 0.0001"
    if p_holm >= LEVEL or low <= 1 <= high:
        return "within noise", f"no difference is shown: {interval_95(low, high)}, {p}"
    size = math.exp(abs(math.log(comparison.gain)))
    noisy = noise if noise is not None and noise.floor > SMALLEST else None
    if noisy is not None and size <= noisy.floor:
        return "within noise", (
            f"the difference, {difference(size)}, does not exceed the A/A control's: {difference(noisy.floor)}"
        )
    if size <= SMALLEST:
        return "within noise", f"the difference, {difference(size)}, is negligible: below 0.1%"
    beyond = f", beyond the noise of {difference(noisy.floor)}" if noisy else ""
    if comparison.gain > 1:
        return "helps", f"{number(size)} times better ({interval_95(low, high)}, {p}){beyond}"
    return "hurts", f"{number(size)} times worse ({interval_95(1 / high, 1 / low)}, {p}){beyond}"
