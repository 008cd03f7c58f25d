"""Charts of curves, which the page draws in its own colours; a pointer over a chart reads its curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorkeep.pages.canvas import Canvas, Line, Point, Text, round_ticks, text_width
from tensorkeep.units import number

WIDTH, HEIGHT = 440, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
# Longer curves are drawn by the smallest and the largest value of so many parts, so that no peak is lost.
_BUCKETS = 400
_DASH = 7


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    colour: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    by: str
    curves: list[Curve]
    # Left and right of the area of the curves.
    box: tuple[float, float]
    canvas: Canvas

    @property
    def svg(self) -> str:
        ends = (f"{one.name}: {_value(one.points[0][1])} to {_value(one.points[-1][1])}" for one in self.curves)
        # The script moves this line to the pointer.
        pointer = '<path class="pointer" d=""/></svg>'
        return self.canvas.page_svg(f"{self.title}. {'; '.join(ends)}").removesuffix("</svg>") + pointer

    @property
    def data(self) -> dict[str, Any]:
        steps = [step for curve in self.curves for step, _ in curve.points]
        return {
            "by": self.by,
            "range": [min(steps), max(steps)],
            # As fractions, because the page scales the figure.
            "box": [side / WIDTH for side in self.box],
            "curves": [
                [curve.name, [[float(f"{x:.9g}"), float(f"{y:.6g}")] for x, y in _thinned(curve.points)]]
                for curve in self.curves
            ],
        }


def chart(title: str, curves: Sequence[Curve], *, by: str = "step") -> Chart | None:
    """Return a chart of curves by step or by ``"second"``; None without a finite point."""
    # A diverged run has infinite losses, which no axis can show.
    finite = [Curve(c.name, c.colour, [point for point in c.points if math.isfinite(point[1])]) for c in curves]
    drawn = [curve for curve in finite if curve.points]
    if not drawn:
        return None
    every = [point for curve in drawn for point in curve.points]
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    low, high = _limits([value for _, value in every])
    values = _labels(round_ticks(low, high))
    steps = _labels([tick for tick in round_ticks(first, last) if by != "step" or tick == round(tick)])
    # Values that hardly differ have long labels; half of the label of the last step is beside the area.
    left = max(_LEFT, math.ceil(max(text_width(text, 11) for _, text in values)) + 8)
    right = WIDTH - max(_RIGHT, math.ceil(max((text_width(text, 11) for _, text in steps), default=0) / 2))

    def x(step: float) -> float:
        return left + (step - first) / (last - first or 1) * (right - left)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP)

    canvas = Canvas(WIDTH, HEIGHT)
    for value, text in values:
        canvas.add(Line([(left, y(value)), (right, y(value))], "grid"))
        canvas.add(Text(left - 6, y(value) + 3.5, text, 11, "faint", "end"))
    for step, text in steps:
        canvas.add(Text(x(step), HEIGHT - _BOTTOM + 16, text, 11, "faint", "middle"))
    lines = [[(x(step), y(value)) for step, value in _thinned(curve.points)] for curve in drawn]
    for curve, points in zip(drawn, lines, strict=True):
        hidden = [other is points for other in lines if _coincide(points, other)]
        # Curves that would hide each other take turns: all their colours are seen.
        turn = _DASH, _DASH * (len(hidden) - 1), _DASH * hidden.index(True)
        canvas.add(Line(points, curve.colour, 1.6, name="curve", dashes=turn if len(hidden) > 1 else None))
        if len(points) == 1:  # which a line does not show
            canvas.mark("circle", *points[0], curve.colour, size=2.5)
    return Chart(title, by, drawn, (left, right), canvas)


def _coincide(one: Sequence[Point], other: Sequence[Point]) -> bool:
    near = all(math.dist(a, b) < 1 for a, b in zip(one, other, strict=False))
    return one is other or (len(one) == len(other) > 1 and near)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # A flat curve has a range of 0, so its margin follows from its value.
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    # A quantity that is never negative is not drawn with negative ticks.
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
    texts: list[str] = []
    for digits in range(3, 18):
        # All digits of a tick: rounded, neighbours could have the same label.
        texts = [_value(tick, digits) for tick in ticks]
        if all(float(text.replace(",", "")) == tick for text, tick in zip(texts, ticks, strict=True)):
            break
    return list(zip(ticks, texts, strict=True))


def _value(value: float, digits: int = 3) -> str:
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    kept: list[Point] = [points[0]]
    for place in range(_BUCKETS):
        part = points[place * len(points) // _BUCKETS : (place + 1) * len(points) // _BUCKETS]
        # The smallest and the largest value of a part, in their order, so that no peak is lost.
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]
