"""Line charts as shapes for a template: the paths of the curves, and ticks at round numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorkeep.bench.analysis.wording import number

WIDTH, HEIGHT = 440, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_TICKS = 5
_LETTER = 6.2
"""Width of a digit of a label."""
_BUCKETS = 400
"""Longer curves are drawn by the smallest and the largest value of so many parts, so that no peak is lost."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart: its name, the name of its colour, its points, and the data of its path."""

    name: str
    colour: str
    points: list[Point]
    path: str = ""
    single: Point | None = None  # where the only point is, which a path does not show


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its title, its curves, what they go by, and its ticks as (position, text).

    The box is the left, top, right and bottom of the area of the curves.
    """

    title: str
    by: str
    curves: list[Curve]
    across: list[tuple[float, str]]
    down: list[tuple[float, str]]
    box: tuple[int, int, int, int]
    about: str

    @property
    def data(self) -> dict[str, Any]:
        """What a pointer over the chart reads: the range of steps or seconds, and the points of each curve."""
        steps = [step for curve in self.curves for step, _ in curve.points]
        return {
            "by": self.by,
            "range": [min(steps), max(steps)],
            "box": [self.box[0] / WIDTH, self.box[2] / WIDTH],
            "curves": [
                [curve.name, [[float(f"{x:.9g}"), float(f"{y:.6g}")] for x, y in _thinned(curve.points)]]
                for curve in self.curves
            ],
        }


def chart(title: str, curves: Sequence[Curve], *, by: str = "step") -> Chart | None:
    """Return a chart of curves by step or by ``"second"``, None without a finite point."""
    drawn = [(curve, [point for point in curve.points if math.isfinite(point[1])]) for curve in curves]
    drawn = [(curve, points) for curve, points in drawn if points]
    if not drawn:
        return None
    every = [point for _, points in drawn for point in points]
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    low, high = _limits([y for _, y in every])
    values = _labels(list(_ticks(low, high)))
    steps = _labels([tick for tick in _ticks(first, last) if by != "step" or tick == round(tick)])
    # Values that hardly differ have long labels; half of the label of the last step is beside the area.
    left = max(_LEFT, math.ceil(_LETTER * max(len(text) for _, text in values)) + 8)
    right = WIDTH - max(_RIGHT, math.ceil(_LETTER / 2 * max((len(text) for _, text in steps), default=0)))
    across = (right - left) / ((last - first) or 1)
    down = (HEIGHT - _TOP - _BOTTOM) / (high - low)

    def placed(point: Point) -> Point:
        return left + (point[0] - first) * across, _TOP + (high - point[1]) * down

    shapes = [
        Curve(
            curve.name,
            curve.colour,
            points,
            _path([placed(point) for point in _thinned(points)]),
            placed(points[0]) if len(points) == 1 else None,
        )
        for curve, points in drawn
    ]
    return Chart(
        title,
        by,
        shapes,
        [(left + (x - first) * across, text) for x, text in steps],
        [(_TOP + (high - y) * down, text) for y, text in values],
        (left, _TOP, right, HEIGHT - _BOTTOM),
        "; ".join(f"{curve.name}: {_text(points[0][1])} to {_text(points[-1][1])}" for curve, points in drawn),
    )


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    # A quantity that is never negative is not drawn with negative ticks.
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _ticks(low: float, high: float) -> Iterator[float]:
    """Yield round numbers between two limits."""
    span = high - low
    if not span:
        yield low
        return
    exponent = math.floor(math.log10(span / _TICKS))
    unit = 10.0**exponent
    step = unit * next(factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= _TICKS)
    place = math.ceil(low / step - 1e-9)
    while place * step <= high + step * 1e-9:
        yield round(place * step, -exponent)
        place += 1


def _labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return each tick with its label, which has all of its digits: rounded, neighbours could have the same label."""
    for digits in range(3, 18):
        texts = [_text(tick, digits) for tick in ticks]
        if all(float(text.replace(",", "")) == tick for text, tick in zip(texts, ticks, strict=True)):
            break
    return list(zip(ticks, texts, strict=True))


def _text(value: float, digits: int = 3) -> str:
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return fewer points: of each part of a long curve, those of its smallest and its largest value."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    kept: list[Point] = [points[0]]
    for place in range(_BUCKETS):
        part = points[place * len(points) // _BUCKETS : (place + 1) * len(points) // _BUCKETS]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
