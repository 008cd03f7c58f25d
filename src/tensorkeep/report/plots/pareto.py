"""Compromises: what saves fast against what is small and what loads fast, and which arms nothing else beats."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.panels import trio
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots.labels import Spot, place_labels
from tensorkeep.report.samples import scale_of
from tensorkeep.report.wording import clipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More names than this cover the points; then each point has a number, and a list says whose it is.
_MOST_NAMES = 12

_NOTHING = 0.01
_NATS = "nats"


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    x: float
    y: float
    best: bool = False


def compromises(results: Results) -> Figure:
    """Return a panel of saving against size and one of saving against loading."""
    chosen, arms = trio(results), _drawn_arms(results)
    others = [measure for measure in (chosen.size, chosen.load) if measure is not None]
    many = len(arms) > _MOST_NAMES
    figure = d.new_figure(max(5.2, 0.17 * len(arms) + 0.6) if many else 5.2)
    widths = [1.0] * len(others) + ([0.55] if many else [])
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    marks = {arm.name: str(place + 1) if many else arm.name for place, arm in enumerate(arms)}
    panels = []
    for place, measure in enumerate(others):
        if chosen.save is not None:
            axes = figure.add_subplot(grid[0, place])
            panels.append((axes, _panel(axes, results, chosen.save, measure)))
    if many:
        _key(figure.add_subplot(grid[0, len(others)]), results)
    better = ""
    if {one.better for one in others} == {"lower"} and chosen.save is not None:
        better = f" Better: down and {'left' if chosen.save.better == 'lower' else 'right'}."
    note = "Medians; the square is the baseline. Blue: nothing else is better, by 1% or more."
    d.footnote(figure, note + better + d.left_out(results))
    for axes, points in panels:
        spots = [(point.x, point.y) for point in points]
        named = [(marks[point.name], point.x, point.y) for point in points]
        place_labels(figure, axes, named, spots, _front_lines(points))
    return figure


def _drawn_arms(results: Results) -> list[Arm]:
    """Return the arms that a figure has room for, and that have points."""
    return [arm for arm in d.shown_arms(results) if any(cell.status == "ok" for cell in results.cells_by_arm[arm.name])]


def _key(axes: Axes, results: Results) -> None:
    """List the numbers and the names that they stand for."""
    axes.set_axis_off()
    axes.set_title("arms")
    arms = _drawn_arms(results)
    for place, arm in enumerate(arms):
        y = 1 - (place + 0.5) / len(arms)
        axes.text(0.08, y, str(place + 1), transform=axes.transAxes, ha="right", va="center", fontsize=8, color=d.FAINT)
        axes.text(0.12, y, clipped(arm.name, 34), transform=axes.transAxes, va="center", fontsize=8)


def _panel(axes: Axes, results: Results, across: Measure, up: Measure) -> list[_Point]:
    """Draw the points of two measures and return them, those that nothing beats first."""
    points = _points(results, across, up)
    xs, ys = [point.x for point in points], [point.y for point in points]
    _limits(axes, xs, "x", across)
    _limits(axes, ys, "y", up)
    axes.grid(color=d.GRID, linewidth=0.7)
    axes.set_xlabel(scale_of(results, across).label + _log_words(xs))
    axes.set_ylabel(scale_of(results, up).label + _log_words(ys))

    axes.set_title(f"{across.label} and {up.label}")
    for (x, y), (next_x, next_y) in _front_lines(points):
        axes.plot([x, next_x], [y, next_y], color=d.GOOD, linewidth=1.2)
    for point in points:
        marker = "s" if point.name == results.baseline else "o"
        colour = d.GOOD if point.best else d.BASE if point.name == results.baseline else d.NEUTRAL
        axes.plot([point.x], [point.y], marker, color=colour, markersize=6.5, zorder=3)
    return sorted(points, key=lambda point: not point.best)


def _front_lines(points: list[_Point]) -> list[tuple[Spot, Spot]]:
    """Return the steps from each of the best points to the next."""
    front = sorted((point.x, point.y) for point in points if point.best)
    lines: list[tuple[Spot, Spot]] = []
    for (x, y), (next_x, next_y) in pairwise(front):
        lines += [((x, y), (next_x, y)), ((next_x, y), (next_x, next_y))]
    return lines


def _points(results: Results, across: Measure, up: Measure) -> list[_Point]:
    found = []
    for arm in _drawn_arms(results):
        x = scale_of(results, across).samples(results, arm.name)
        y = scale_of(results, up).samples(results, arm.name)
        if x and y:
            found.append(_Point(arm.name, x.median, y.median))
    signs = (1 if across.better == "lower" else -1, 1 if up.better == "lower" else -1)

    def beaten(one: _Point) -> bool:
        return any(
            not _better(one.x, other.x, signs[0])
            and not _better(one.y, other.y, signs[1])
            and (_better(other.x, one.x, signs[0]) or _better(other.y, one.y, signs[1]))
            for other in found
        )

    return [_Point(point.name, point.x, point.y, best=not beaten(point)) for point in found]


def _better(one: float, other: float, sign: int) -> bool:
    """Say whether a figure is better than another by more than nothing: sizes differ by a few bytes of headers."""
    return sign * one < sign * other and abs(one - other) > _NOTHING * max(abs(one), abs(other))


def _log_words(values: list[float]) -> str:
    return ", log scale" if d.wants_log(values) else ""


def _limits(axes: Axes, values: list[float], which: str, measure: Measure) -> None:
    """Leave room for labels: more at the right than elsewhere. Losses begin where they are: none is near 0."""
    if d.wants_log(values):
        room = (max(values) / min(values)) ** 0.1
        d.log_axis(axes, min(values) / room, max(values) * room ** (2.2 if which == "x" else 1.0), which=which)
        return
    high = max(values, default=1.0) or 1.0
    low = min(values, default=0.0) if measure.unit == _NATS else 0.0
    room = (high - low) or high
    limits = low - room * 0.12 * bool(low), low + room * (1.3 if which == "x" else 1.12)
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
