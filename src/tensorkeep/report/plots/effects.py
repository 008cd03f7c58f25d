"""Factorial designs drawn: each factor's effect with its interval, and a heat map of which factors work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorkeep.bench.results import Effect, Results
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots import heat
from tensorkeep.report.plots.forest import point
from tensorkeep.report.wording import clipped, gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4
_MOST_FACTORS = 15
_Row = tuple[str, float | None, float | None, float | None]


def effects(results: Results) -> Figure:
    """Return, per measure, the effects with intervals at the left and factor against factor at the right."""
    found = [effect for effect in results.summary.effects if effect.factors]
    used = {effect.measure for effect in found}
    measures = [measure for measure in results.measures if measure.name in used][:_MOST_PANELS]
    by_measure = [[effect for effect in found if effect.measure == measure.name][: d.MOST_ARMS] for measure in measures]
    factors = list(dict.fromkeys(name for effect in found for name in effect.factors))[:_MOST_FACTORS]
    heights = [max(0.27 * len(rows), 0.36 * len(factors), 1.2) + 1.0 for rows in by_measure]
    figure = d.new_figure(sum(heights) + 0.4)
    grid = figure.add_gridspec(len(measures) or 1, 2, height_ratios=heights or [1], width_ratios=[1.25, 1])
    for line, (measure, rows) in enumerate(zip(measures, by_measure, strict=True)):
        left, right = figure.add_subplot(grid[line, 0]), figure.add_subplot(grid[line, 1])
        label = measure.label
        left.set_title(f"{label}: effects")
        right.set_title(f"{label}: factor with factor")
        _intervals(left, [(" x ".join(one.factors), one.gain, one.low, one.high) for one in rows])
        _together(right, rows, factors)
    text = "Gain from a factor's first level to its last; pairs: measured over the product of both. Line: 95% interval."
    d.footnote(figure, text)
    return figure


def interactions(results: Results) -> Figure:
    """Return, per measure, what combinations gain over the product of their single changes."""
    found = results.summary.interactions
    used = {one.measure for one in found}
    measures = [measure for measure in results.measures if measure.name in used][:_MOST_PANELS]
    by_measure = [[one for one in found if one.measure == measure.name][: d.MOST_ARMS] for measure in measures]
    heights = [max(0.3 * len(rows), 0.8) + 0.8 for rows in by_measure]
    figure = d.new_figure(sum(heights) + 0.4)
    grid = figure.add_gridspec(len(measures) or 1, 1, height_ratios=heights or [1])
    for line, (measure, rows) in enumerate(zip(measures, by_measure, strict=True)):
        axes = figure.add_subplot(grid[line, 0])
        axes.set_title(measure.label)
        _intervals(axes, [(" + ".join(one.changes), one.ratio, one.low, one.high) for one in rows])
    d.footnote(
        figure, "Right of 1x: the changes help each other. Left: they get in each other's way. Line: 95% interval."
    )
    return figure


def _intervals(axes: Axes, rows: list[_Row]) -> None:
    ends = [value for row in rows for value in row[1:] if value is not None and value > 0]
    low, high = min([*ends, 0.9]), max([*ends, 1.12])
    margin = (high / low) ** 0.06
    d.log_axis(axes, low / margin, high * margin, suffix="x")
    axes.axvline(1, color=d.BASE, linewidth=1.0, zorder=1)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    for place, (_, value, below, above) in enumerate(rows):
        if value is None or value <= 0:
            d.missing(axes, place, "not known")
            continue
        settled = below is not None and above is not None and not below <= 1 <= above
        colour = d.NEUTRAL if not settled else d.GOOD if value > 1 else d.BAD
        marker = "D" if not settled else "o" if value > 1 else "s"
        point(axes, place, value, below, above, marker, colour, settled)
    d.label_rows(axes, [row[0] for row in rows], bold=None)


def _together(axes: Axes, rows: list[Effect], factors: list[str]) -> None:
    """Draw main effects on the diagonal and interactions beside it; what is not known stays empty."""
    for effect in rows:
        if not set(effect.factors) <= set(factors):
            continue
        places = [factors.index(name) for name in (*effect.factors, *effect.factors)[:2]]
        settled = effect.low is not None and effect.high is not None and not effect.low <= 1 <= effect.high
        if effect.gain is None:
            continue
        for column, line in {(places[0], places[1]), (places[1], places[0])}:
            heat.field(axes, column, line, effect.gain if settled else None, gain(effect.gain))
    names = [clipped(name, 14) for name in factors]
    axes.set_xticks(
        range(len(factors)), names, rotation=30 if len(factors) > 3 else 0, ha="right" if len(factors) > 3 else "center"
    )
    axes.set_xlim(-0.5, len(factors) - 0.5)
    axes.tick_params(length=0, labelcolor=d.INK)
    d.label_rows(axes, factors, bold=None)
    axes.spines["bottom"].set_visible(False)
