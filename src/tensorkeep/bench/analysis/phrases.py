"""How ratios, intervals and lists are put into the sentences that the bench writes."""

from __future__ import annotations

from collections.abc import Sequence

NEAR, FAR = 0.01, 100.0
"""Where the ends of a very wide interval are cut off."""


def gate_words(workload: str) -> str:
    """Return what the failed gate of a workload means."""
    if workload == "training":
        return "the technique was not active, or changed what is computed"
    return "the loaded state differs from the saved one"


def number(value: float) -> str:
    """Return a ratio with three significant digits: ``0.663``, ``2.91``, ``20.2``, ``134``."""
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def interval(low: float | None, high: float | None) -> str:
    """Return ``95% 2.31-3.52``, or that one block gives none."""
    return "one block, no interval" if low is None or high is None else f"95% {number(low)}-{number(high)}"


def wide_interval(low: float, high: float) -> str:
    """Return ``2.31 to 3.52``; the ends of an interval that spans more than a factor of 100 are cut off."""
    wide = high > low * FAR
    below = f"<{NEAR:g}" if wide and low < NEAR else number(low)
    above = f">{FAR:g}" if wide and high > FAR else number(high)
    return f"{below} to {above}"


def difference(ratio: float) -> str:
    """Return how far a ratio lies from 1: ``4%`` for 1.04, ``0.5%`` for 1.005, ``a factor of 3.00`` for 3."""
    if ratio >= 2:
        return f"a factor of {number(ratio)}"
    value = abs(ratio - 1) * 100
    return f"{value:.0f}%" if value >= 2 else f"{value:.2g}%"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``, or the first few and how many more."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, such as ``1 run`` or ``12 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
