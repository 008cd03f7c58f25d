"""Heat maps as shapes for a template: labelled rows and columns, and cells of stronger colour for larger values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorkeep.report.charts.scales import amount_opacity

_LABEL, _LETTER = 6.4, 40
"""Width of a letter, and the most letters of a label."""
_ROW = 15
_TOP = 4
_BOTTOM = 22
_WIDTH = 900
_LEAST_GAP, _WIDEST = 56, 80


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell: its place, its opacity, and the text that a pointer shows."""

    x: float
    y: float
    opacity: float
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A heat map: cells of one size between left and right, and labels of rows and columns as (position, text)."""

    width: float
    height: float
    cell: tuple[float, float]
    cells: list[HeatCell]
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    left: float
    right: float


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    text: Callable[[int, int, float], str],
    *,
    log: bool = False,
) -> HeatMap:
    """Return a heat map of values of at least 0; None is left blank.

    With ``log`` the strength of the colour follows the logarithm, between the smallest and the largest positive value.
    """
    left = 12 + _LABEL * min(_LETTER, max(map(len, rows), default=0))
    wide = min(_WIDEST, (_WIDTH - left) / max(len(columns), 1))
    low, high = _limits(values)
    cells = [
        HeatCell(left + j * wide, _TOP + i * _ROW, amount_opacity(value, low, high, log=log), text(i, j, value))
        for i, row in enumerate(values)
        for j, value in enumerate(row)
        if value is not None
    ]
    every = math.ceil(_LEAST_GAP / wide)
    return HeatMap(
        _WIDTH,
        _TOP + _ROW * len(rows) + _BOTTOM,
        (wide, _ROW),
        cells,
        [(_TOP + _ROW * (i + 0.72), _shortened(row)) for i, row in enumerate(rows)],
        [(left + (j + 0.5) * wide, column) for j, column in enumerate(columns) if j % every == 0],
        left,
        left + wide * len(columns),
    )


def _limits(values: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    found = [value for row in values for value in row if value and math.isfinite(value)]
    return (min(found), max(found)) if found else (1.0, 1.0)


def _shortened(label: str) -> str:
    return label if len(label) <= _LETTER else f"{label[: _LETTER // 3]}…{label[-(_LETTER - _LETTER // 3 - 1) :]}"
