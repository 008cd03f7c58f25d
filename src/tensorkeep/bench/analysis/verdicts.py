"""What may be said of an arm: helps, hurts, within noise, too few runs, or not run.

A difference is called one only if three things agree: the test, adjusted for all arms of the measure; the whole 95%
interval, which must lie on one side of 1; and the placebo, the baseline measured once more under another name, whose
own "difference" is noise. Nothing below 0.1% is called a difference: sizes have no noise, and a few bytes of header are
not worth a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tensorkeep.bench.analysis.phrases import counted, difference, interval, number
from tensorkeep.bench.analysis.statistics import LEVEL, Comparison

Word = Literal["baseline", "placebo", "helps", "hurts", "within noise", "too few runs", "not run"]

SMALLEST = 1.001
"""The smallest gain that is called a difference, where the placebo shows no noise at all."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The placebo's 95% interval of gain, and the larger of its distances from 1, as a ratio of at least 1."""

    low: float
    high: float
    floor: float
    n: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be said, and the sentence that says why."""

    word: Word
    reason: str


def noise_of(placebos: Sequence[Comparison]) -> Noise | None:
    """Return the noise floor that the placebos show; None without a placebo that ran in at least two blocks."""
    shown = [(p.low, p.high, p.n) for p in placebos if p.low is not None and p.high is not None]
    if not shown:
        return None
    low, high = min(entry[0] for entry in shown), max(entry[1] for entry in shown)
    return Noise(low, high, max(1 / low, high, 1.0), min(entry[2] for entry in shown))


def judge(comparison: Comparison, p_holm: float | None, noise: Noise | None) -> Verdict:
    """Return what may be said of an arm whose figures were compared with the baseline's.

    Parameters
    ----------
    comparison : Comparison
    p_holm : float or None
        The comparison's p-value, adjusted across the arms of the measure; None below 2 blocks.
    noise : Noise or None
        None: nothing but `SMALLEST` is asked of the size of a gain.
    """
    low, high = comparison.low, comparison.high
    if p_holm is None or low is None or high is None:
        return Verdict("too few runs", f"{counted(comparison.n, 'block')} cannot tell a difference from noise")
    one_sided = low > 1 or high < 1
    size = math.exp(abs(math.log(comparison.gain)))
    floor = max(SMALLEST, noise.floor if noise else 1.0)
    if p_holm >= LEVEL or not one_sided:
        return Verdict("within noise", f"no difference is shown: {interval(low, high)}, adjusted p {_p(p_holm)}")
    if size <= floor:
        return Verdict("within noise", _below_floor(size, noise))
    word: Word = "helps" if comparison.gain > 1 else "hurts"
    beyond = f", beyond the noise of {difference(noise.floor)}" if noise and noise.floor > SMALLEST else ""
    side = "better" if word == "helps" else "worse"
    bounds = (low, high) if word == "helps" else (1 / high, 1 / low)
    return Verdict(word, f"{number(size)} times {side} ({interval(*bounds)}, adjusted p {_p(p_holm)}){beyond}")


def _below_floor(size: float, noise: Noise | None) -> str:
    if noise is None or noise.floor <= SMALLEST:
        return f"the difference, {difference(size)}, is below 0.1%, which nobody would notice"
    return f"the difference, {difference(size)}, is no larger than the placebo's: {difference(noise.floor)}"


def _p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "below 0.0001"
