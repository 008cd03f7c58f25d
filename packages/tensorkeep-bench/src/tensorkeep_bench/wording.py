"""Formatting of numbers, gains, intervals, percentages and lists in texts, tables and plots."""

from collections.abc import Sequence

from tensorkeep.ext import counted, number
from tensorkeep_bench.results import ArmStatistics, Claim

NOTHING = "-"

TOO_SHORT = " is too short to time with "  # in the reason of a claim that the state is too small for

NEAR, FAR = 0.01, 100.0  # where the ends of a very wide interval, and the axis of gains, are cut off


def gate_words(workload: str) -> str:
    if workload == "training":
        return "the technique was not active, or changed what is computed"
    return "the loaded state differs from the saved one"


def spread(mean: float, std: float | None) -> str:
    # One run has no deviation.
    if std is None or not 1e-4 <= abs(mean) < 1e7:
        return number(mean, 4) if std is None else f"{mean:.3g} ± {std:.2g}"
    decimals = len(number(mean, 4).partition(".")[2])
    return f"{mean:,.{decimals}f} ± {std:,.{decimals}f}"


def gain(value: float | None) -> str:
    return NOTHING if value is None else f"{number(value)}x"


def interval(low: float | None, high: float | None) -> str:
    """Return ``2.05 to 2.61``; the ends of an interval that spans more than a factor of 100 are cut off."""
    if low is None or high is None:
        return NOTHING
    # Two very different blocks give ends of many digits that mean nothing.
    wide = high > low * FAR
    below = f"<{NEAR:g}" if wide and low < NEAR else number(low)
    above = f">{FAR:g}" if wide and high > FAR else number(high)
    return f"{below} to {above}"


def interval_95(low: float | None, high: float | None) -> str:
    return "one block, no interval" if low is None or high is None else f"95% {interval(low, high)}"


def verdict_words(found: ArmStatistics) -> str:
    """Return ``helps``, ``undecided after 5 blocks`` or another verdict; ``no verdict`` without one."""
    after = f" after {counted(found.blocks, 'block')}" if found.verdict == "undecided" else ""
    return f"{found.verdict or 'no verdict'}{after}"


def claim_words(claim: Claim) -> str:
    """Return the verdict on a claim in words: ``not run`` beside measured figures would read as a contradiction."""
    reasons = claim.reason.split("; ")
    too_small = claim.verdict == "not run" and all(TOO_SHORT in reason for reason in reasons)
    return "too small to decide" if too_small else claim.verdict


def difference(ratio: float) -> str:
    """Return how far a ratio lies from 1: ``4%`` for 1.04, ``0.5%`` for 1.005, ``a factor of 3.00`` for 3."""
    if ratio >= 2:
        return f"a factor of {number(ratio)}"
    value = abs(ratio - 1) * 100
    return f"{value:.0f}%" if value >= 2 else f"{value:.2g}%"


def percent(value: float | None) -> str:
    if value is None:
        return NOTHING
    # Otherwise a small decrease would be shown as -0.0%.
    if abs(value) < 0.05:
        return "0.0%"
    return f"{value:+.1f}%" if abs(value) < 999.5 else f"{value:+,.0f}%"


def probability(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``, or the first few and how many more."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def clipped(text: str, most: int) -> str:
    """Return a text of at most so many characters; a longer one loses its middle."""
    if len(text) <= most:
        return text
    # The middle is cut, because names often differ at the end only.
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"
