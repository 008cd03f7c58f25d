"""A histogram of a distribution of codes, on a range and a scale that suit it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorkeep.show.tensors.codes import Floats

BINS = 48

_TAIL = 0.001
"""The fraction of elements at each end that may lie beyond the range, if they would make it much wider."""

_WIDER = 1.5
"""The tails are within the range if that is at most so many times as wide with them."""

_STEPS = np.linspace(0.0, 1.0, BINS + 1)

_ROUNDING = 1e-6

_DECADES = 1000.0
"""Positive numbers that span more than this factor are shown on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Elements by value, in bins of equal width.

    Attributes
    ----------
    low, high : float
        The range of the bins.
    counts : list of int
        The elements in each bin.
    log : bool
        Whether the bins have equal widths on a logarithmic scale.
    beyond : int
        The elements outside of the range; with a logarithmic scale also the zeros.
    """

    low: float
    high: float
    counts: list[int]
    log: bool = False
    beyond: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


class Distribution:
    """Distinct values, ascending, the interval around each, and how many elements have it."""

    def __init__(self, values: Floats, low: Floats, high: Floats, counts: Floats) -> None:
        self.values, self.low, self.high, self.counts = values, low, high, counts
        self.up_to = np.cumsum(counts)

    @property
    def total(self) -> float:
        """The number of elements."""
        return float(self.up_to[-1]) if len(self.up_to) else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the value that this fraction of the elements does not exceed."""
        return float(self.values[min(int(self.up_to.searchsorted(fraction * self.total)), len(self.values) - 1)])

    def counts_between(self, edges: Floats, least: float, largest: float) -> Floats:
        """Return the elements between edges; those of a value are spread over its interval, cut at the extremes."""
        ends, counts = (np.empty(2 * len(self.values)) for _ in range(2))
        ends[::2], ends[1::2] = self.low, self.high
        counts[::2], counts[1::2] = self.up_to - self.counts, self.up_to
        np.minimum(np.maximum(ends, least, out=ends), largest, out=ends)
        # Intervals that end at the first edge count from there on.
        edges = edges.copy()
        edges[0] = math.nextafter(edges[0], -math.inf)
        found = np.interp(edges, ends, counts)
        return found[1:] - found[:-1]


def histogram_of(found: Distribution, least: float, largest: float, *, integers: bool) -> Histogram | None:
    """Return the histogram of elements between ``least`` and ``largest``; None if these are equal."""
    # Numbers beyond float32 have no code.
    if not (least < largest and math.isfinite(largest - least) and found.total):
        return None
    if integers:
        # A bin for each number, if there are few.
        least, largest = least - 0.5, largest + 0.5
        if largest - least <= BINS:
            edges = np.arange(least, largest + 0.5)
            return _binned(found, edges, least, largest)
    elif least >= 0 and (positive := _positive(found)) is not None:
        first, last = positive.quantile(_TAIL), positive.quantile(1 - _TAIL)
        if last > first * _DECADES:
            edges = np.geomspace(first, largest, BINS + 1)
            return _binned(positive, edges, 0.0, largest, total=found.total, log=True)
    low, high = _range(found, least, largest)
    edges = low + (high - low) * _STEPS
    edges[-1] = high
    return _binned(found, edges, least, largest)


def _positive(found: Distribution) -> Distribution | None:
    """Return the distribution of positive numbers, if most are positive."""
    kept = found.values > 0
    if 2 * found.counts[kept].sum() < found.total:
        return None
    return Distribution(found.values[kept], found.low[kept], found.high[kept], found.counts[kept])


def _range(found: Distribution, least: float, largest: float) -> tuple[float, float]:
    """Return the range of all elements, or without the tails if these would make it much wider."""
    low, high = found.quantile(_TAIL), found.quantile(1 - _TAIL)
    margin = (high - low) * (_WIDER - 1) / 2
    if not margin:
        return least, largest
    return (
        least if least >= low - margin else low - margin / 4,
        largest if largest <= high + margin else high + margin / 4,
    )


def _binned(
    found: Distribution, edges: Floats, least: float, largest: float, *, total: float | None = None, log: bool = False
) -> Histogram:
    counts = found.counts_between(edges, least, largest)
    beyond = max(0, round((found.total if total is None else total) - float(counts.sum())))
    return Histogram(float(edges[0]), float(edges[-1]), np.ceil(counts - _ROUNDING).astype(int).tolist(), log, beyond)
