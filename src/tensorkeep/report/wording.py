"""How figures are written: gains, intervals, percentages, and the states of a cell in words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tensorkeep.bench.analysis.warnings import too_noisy
from tensorkeep.bench.results import Cell, Measure, Recommendation, Results
from tensorkeep.bench.results import printable as clean

NOTHING = "-"

NEAR, FAR = 0.01, 100.0
"""Where the ends of a wide interval, and the axis of gains, stop: beyond, nothing is known but which side it is."""

STATUS = {
    "ok": "ok",
    "planned": "not reached",
    "gate": "wrong result",
    "failed": "failed",
    "timeout": "timed out",
    "memory": "out of memory",
    "disk": "disk full",
    "not-run": "not run",
}


def sentence(text: str) -> str:
    """Return a clean text that begins with a capital letter."""
    text = clean(text)
    return text[:1].upper() + text[1:]


def clipped(text: str, most: int) -> str:
    """Return a text of at most so many characters; what is left out of a longer one stands in its middle."""
    text = clean(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def gain(value: float | None) -> str:
    """Return how many times better, such as ``2.31x``; three digits are more than most runs are worth."""
    if value is None:
        return NOTHING
    if value and (value < 0.0095 or value >= 9995):
        return f"{value:.1e}x"
    digits = 3 if abs(value) < 0.0995 else 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}x"


def interval(low: float | None, high: float | None) -> str:
    """Return a 95% interval, such as ``2.05 to 2.61``; the ends of a wide one stop at `NEAR` and `FAR`."""
    if low is None or high is None:
        return NOTHING
    below, above = (gain(end).removesuffix("x") for end in (low, high))
    if high > low * FAR:
        below = f"<{NEAR:g}" if low < NEAR else below
        above = f">{FAR:g}" if high > FAR else above
    return f"{below} to {above}"


def no_verdict(results: Results, measure: Measure) -> str:
    """Return that a measure is too noisy for any verdict, in words; an empty string if it is not."""
    found = [results.statistics(arm.name, measure.name) for arm in results.arms]
    return too_noisy(results.summary.noise.get(measure.name), found)


def difference(ratio: float) -> str:
    """Return how far a ratio of at least 1 lies from it: ``4.0%``, or ``a factor of 9.50``."""
    return f"a factor of {gain(ratio).removesuffix('x')}" if ratio >= 2 else f"{(ratio - 1) * 100:.1f}%"


def percent(value: float | None) -> str:
    """Return a change in percent with its sign, such as ``+53.6%``."""
    if value is None:
        return NOTHING
    if abs(value) < 0.05:
        return "0.0%"
    return f"{value:+.1f}%" if abs(value) < 999.5 else f"{value:+,.0f}%"


def probability(value: float | None) -> str:
    """Return a probability, such as ``0.032``."""
    if value is None:
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def number(value: float) -> str:
    """Return a number with four significant digits and no exponent where a person can do without."""
    digits = _digits(value)
    return f"{value:.3g}" if digits is None else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Return a number with three significant digits, for a figure."""
    if not value or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def spread(mean: float, std: float | None) -> str:
    """Return mean ± standard deviation, both with as many decimals as the mean deserves; one run has no deviation."""
    if std is None:
        return number(mean)
    digits = _digits(mean)
    if digits is None:
        return f"{mean:.3g} ± {std:.2g}"
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"


def _digits(value: float) -> int | None:
    """Return how many decimals make four significant digits, or None where an exponent reads better."""
    if not value or not 1e-4 <= abs(value) < 1e7:
        return None
    return max(0, 3 - math.floor(math.log10(abs(value))))


def not_run(cells: Iterable[Cell]) -> tuple[str, str]:
    """Return why an arm has no figures, as (status in words, reason); ("", "") if it has some."""
    bad = [cell for cell in cells if cell.status != "ok"]
    if not bad:
        return NOTHING, "no cell was planned"
    # What went wrong says more than what was never reached.
    worst = min(bad, key=lambda cell: (cell.status == "planned", cell.order))
    return STATUS[worst.status], worst.reason or ""


def measured_by(results: Results) -> str:
    """Return one line that says what was measured, and when."""
    design = {"arms": "", "": ""}.get(results.experiment.design, f", design: {results.experiment.design}")
    blocks = len({cell.block for cell in results.cells})
    parts = [f"{len(results.arms)} arms, {blocks} {'block' if blocks == 1 else 'blocks'}{design}"]
    if results.subject and results.subject.description:
        parts.append(results.subject.description)
    if results.started:
        parts.append(results.started)
    return clean("; ".join(parts))


def purpose(recommendation: Recommendation) -> str:
    """Return what a recommendation is for, as a heading."""
    return "All round" if recommendation.purpose == "all" else sentence(recommendation.purpose)
