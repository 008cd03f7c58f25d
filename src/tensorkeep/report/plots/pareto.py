"""Scatter plots of trade-offs, with the Pareto front."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from tensorkeep.bench.analysis.wording import clipped
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.measures import compared_measures, scale_of
from tensorkeep.report.plots import drawing as d

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

# More names than this would cover the points; then each point has a number, and a list gives its name.
_MOST_NAMES = 12
_NEGLIGIBLE = 0.01
_LEAST_SPAN = 0.01
_HIGHEST_LOSS = 1.1
"""Higher losses than so many times the lowest are drawn there: a range test ends far above all others."""
_SIZE = 8.0
_DIRECTIONS = (
    *((1, 0), (1, 0.8), (1, -0.8), (-1, 0), (-1, 0.8), (-1, -0.8)),
    *((0, 1), (0, -1), (1, 1.8), (1, -1.8), (-1, 1.8), (-1, -1.8)),
)
_DISTANCES = (8, 16, 26, 40, 58, 80, 105, 135)
Spot = tuple[float, float]
"""A point in data coordinates."""


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    x: float
    y: float
    best: bool = False
    beyond: bool = False  # whether its loss is so high that it is drawn at the upper edge


def trade_offs(results: Results) -> "Figure":
    """Return a panel of saving against size and one of saving against loading."""
    chosen, arms = compared_measures(results), drawn_arms(results)
    others = [measure for measure in (chosen.size, chosen.load) if measure is not None]
    many = len(arms) > _MOST_NAMES
    figure = d.new_figure(max(5.2, 0.17 * len(arms) + 0.6) if many else 5.2)
    widths = [1.0] * len(others) + ([0.55] if many else [])
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    labels = {arm.name: str(place + 1) if many else arm.name for place, arm in enumerate(arms)}
    panels = []
    for place, measure in enumerate(others):
        if chosen.save is not None:
            axes = figure.add_subplot(grid[0, place])
            panels.append((axes, _panel(axes, results, chosen.save, measure)))
    if many:
        _key(figure.add_subplot(grid[0, len(others)]), arms)
    better = ""
    if {one.better for one in others} == {"lower"} and chosen.save is not None:
        better = f" Better: down and {'left' if chosen.save.better == 'lower' else 'right'}."
    note = "Medians; the square is the baseline. Blue: no other arm is better, by 1% or more."
    beyond = any(point.beyond for _, points in panels for point in points)
    above = f" Triangle: a loss above {_HIGHEST_LOSS:g} times the lowest." if beyond else ""
    d.footnote(figure, note + better + above + d.left_out(results))
    for axes, points in panels:
        _place_labels(figure, axes, labels, points)
    return figure


def drawn_arms(results: Results) -> list[Arm]:
    """Return the arms that have points, as many as a figure shows."""
    return [arm for arm in d.shown_arms(results) if results.ran(arm.name)]


def _key(axes: "Axes", arms: list[Arm]) -> None:
    """List the numbers and the names that they stand for."""
    axes.set_axis_off()
    axes.set_title("arms")
    for place, arm in enumerate(arms):
        y = 1 - (place + 0.5) / len(arms)
        axes.text(0.08, y, str(place + 1), transform=axes.transAxes, ha="right", va="center", fontsize=8, color=d.FAINT)
        axes.text(0.12, y, clipped(arm.name, d.NAME_LENGTH), transform=axes.transAxes, va="center", fontsize=8)


def _panel(axes: "Axes", results: Results, across: Measure, up: Measure) -> list[_Point]:
    """Draw the points of two measures and return them, the best first."""
    points = _points(results, across, up)
    xs, ys = [point.x for point in points], [point.y for point in points]
    _set_limits(axes, xs, "x", across)
    _set_limits(axes, ys, "y", up)
    axes.grid(color=d.GRID, linewidth=0.7)
    axes.set_xlabel(scale_of(results, across).label + d.log_words(xs))
    axes.set_ylabel(scale_of(results, up).label + d.log_words(ys))
    axes.set_title(f"{across.label} and {up.label}")
    for (x, y), (next_x, next_y) in _front_lines(points):
        axes.plot([x, next_x], [y, next_y], color=d.GOOD, linewidth=1.2)
    for point in points:
        marker = "s" if point.name == results.baseline else "^" if point.beyond else "o"
        colour = d.GOOD if point.best else d.BASE if point.name == results.baseline else d.NEUTRAL
        axes.plot([point.x], [point.y], marker, color=colour, markersize=6.5, zorder=3)
    return sorted(points, key=lambda point: not point.best)


def _front_lines(points: Sequence[_Point]) -> list[tuple[Spot, Spot]]:
    """Return the horizontal and vertical lines from each of the best points to the next."""
    front = sorted((point.x, point.y) for point in points if point.best)
    lines: list[tuple[Spot, Spot]] = []
    for (x, y), (next_x, next_y) in pairwise(front):
        lines += [((x, y), (next_x, y)), ((next_x, y), (next_x, next_y))]
    return lines


def _points(results: Results, across: Measure, up: Measure) -> list[_Point]:
    found = []
    for arm in drawn_arms(results):
        x, y = (scale_of(results, measure).describe(results, arm.name) for measure in (across, up))
        if x and y:
            found.append(_Point(arm.name, x.median, y.median))

    def beats(one: _Point, other: _Point) -> bool:
        pairs = ((one.x, other.x, across.better), (one.y, other.y, up.better))
        return any(_better(a, b, way) for a, b, way in pairs) and not any(_better(b, a, way) for a, b, way in pairs)

    highest = min((one.y for one in found), default=0.0) * _HIGHEST_LOSS if up.unit == "nats" else math.inf
    return [
        _Point(one.name, one.x, min(one.y, highest), not any(beats(other, one) for other in found), one.y > highest)
        for one in found
    ]


def _better(one: float, other: float, direction: str) -> bool:
    """Return whether a figure is better by more than 1%: sizes differ by a few bytes of headers."""
    lower = one < other if direction == "lower" else one > other
    return lower and abs(one - other) > _NEGLIGIBLE * max(abs(one), abs(other))


def _set_limits(axes: "Axes", values: list[float], which: Literal["x", "y"], measure: Measure) -> None:
    """Leave space for labels, most on the right. An axis of losses does not start at 0: no loss is near it.

    It spans at least 1% of the loss, so that differences without a meaning look small.
    """
    right = which == "x"
    if d.needs_log(values):
        margin = (max(values) / min(values)) ** 0.1
        d.log_axis(axes, min(values) / margin, max(values) * margin ** (2.2 if right else 1.0), which=which)
        return
    high = max(values, default=1.0) or 1.0
    low = min(values, default=0.0) if measure.unit == "nats" else 0.0
    span = max(high - low, _LEAST_SPAN * high)
    d.linear_axis(axes, low - span * 0.12 * bool(low), low + span * (1.3 if right else 1.12), which=which)


def _place_labels(figure: "Figure", axes: "Axes", labels: dict[str, str], points: Sequence[_Point]) -> None:
    """Write a label beside each point, the best first, with a line to a point that is far; omit what fits nowhere.

    No label covers a point, another label, or a line of the front.
    """
    from matplotlib.transforms import Bbox

    # Positions are known only after the layout.
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    spots = axes.transData.transform([[point.x, point.y] for point in points] or [[0.0, 0.0]])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in spots]
    taken += [Bbox(axes.transData.transform(line)).padded(1) for line in map(sorted, _front_lines(points))]
    for point in points:
        box = _place_label(axes, clipped(labels[point.name], d.NAME_LENGTH), (point.x, point.y), frame, taken)
        if box is not None:
            taken.append(box)


def _place_label(axes: "Axes", name: str, spot: Spot, frame: "Bbox", taken: "list[Bbox]") -> "Bbox | None":
    """Write one label at the nearest free place; return the place, or None."""
    from matplotlib.transforms import Bbox

    probe = axes.text(*spot, name, fontsize=_SIZE)
    size = probe.get_window_extent()
    probe.remove()
    x, y = axes.transData.transform(spot)
    pixels = axes.figure.dpi / 72
    for distance in _DISTANCES:
        for across, up in _DIRECTIONS:
            left = x + across * distance * pixels - (size.width if across < 0 else size.width / 2 if across == 0 else 0)
            bottom = y + up * distance * pixels - size.height / 2
            box = Bbox.from_bounds(left, bottom, size.width, size.height).padded(1)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if not inside or any(box.overlaps(other) for other in taken):
                continue
            line = {"arrowstyle": "-", "color": d.NEUTRAL, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            label = axes.annotate(
                name,
                spot,
                (across * distance, up * distance),
                textcoords="offset points",
                fontsize=_SIZE,
                ha="left" if across > 0 else "right" if across < 0 else "center",
                va="center",
                zorder=4,
                arrowprops=line if distance > _DISTANCES[0] else None,
            )
            label.set_in_layout(False)
            return box
    return None
