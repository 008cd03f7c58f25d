"""The samples of a measure, in the unit in which they are shown.

Arms that worked on a smaller subject have smaller figures for no merit of theirs. Where amounts differ, every figure is
divided by the raw bytes that its cell worked on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tensorkeep.bench.results import Cell, Measure, Results

_SECONDS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_BYTES = (("TB", 1e-12), ("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3), ("B", 1.0))
GIB = 1024.0**3


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one arm and measure, in block order; ``std`` divides by n - 1, and one sample has none."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True)
class Scale:
    """How the figures of a measure are shown.

    Attributes
    ----------
    measure : Measure
    unit : str
        What stands behind a figure and in an axis label, such as ``s``, ``GB`` or ``s per GB``.
    factor : float
        From the figure's own unit.
    per_byte : bool
        Whether figures are divided by the raw bytes that their cell worked on.
    """

    measure: Measure
    unit: str
    factor: float
    per_byte: bool = False

    @property
    def label(self) -> str:
        """The measure and its unit, such as ``durable save (s)``."""
        return f"{self.measure.label} ({self.unit})"

    def shown(self, cell: Cell) -> float | None:
        """Return a cell's figure in this unit, or None if it has none or failed."""
        value = cell.figures.get(self.measure.name)
        if value is None or cell.status != "ok" or (self.per_byte and not cell.amount):
            return None
        return value * self.factor / (cell.amount or 1) if self.per_byte else value * self.factor

    def samples(self, results: Results, arm: str) -> Samples | None:
        """Return the samples of an arm, or None if there is none."""
        cells = sorted(results.cells_by_arm[arm], key=lambda cell: cell.block)
        values = tuple(value for cell in cells if (value := self.shown(cell)) is not None)
        return Samples(values) if values else None


def amounts_differ(results: Results) -> bool:
    """Return whether some arms worked on a smaller subject than others."""
    return len({cell.amount for cell in results.cells if cell.status == "ok" and cell.figures}) > 1


def scale_of(results: Results, measure: Measure) -> Scale:
    """Return the scale that suits all samples of a measure; the largest of them is at least 1 in its unit."""
    per_byte = amounts_differ(results) and measure.unit in ("s", "B")
    if per_byte and measure.unit == "B":
        return Scale(measure, "stored bytes per raw byte" if measure.name == "stored" else "B per raw byte", 1.0, True)
    plain = Scale(measure, measure.unit, 1e9 if per_byte else 1.0, per_byte)
    largest = max((abs(v) for cell in results.cells if (v := plain.shown(cell)) is not None), default=0.0)
    unit, factor = _unit(measure.unit, largest)
    return Scale(measure, f"{unit} per GB of state" if per_byte else unit, factor * plain.factor, per_byte)


def gibibytes(results: Results, measure: Measure) -> Scale:
    """Return the scale of the documents' tables, whose GB are GiB."""
    if amounts_differ(results):
        return scale_of(results, measure)
    return Scale(measure, "GiB", 1 / GIB)


def _unit(unit: str, largest: float) -> tuple[str, float]:
    if unit == "s":
        return next((choice for choice in _SECONDS if largest * choice[1] >= 0.5), _SECONDS[0])
    if unit == "B":
        return next((choice for choice in _BYTES if largest * choice[1] >= 1), _BYTES[-1])
    return unit, 1.0
