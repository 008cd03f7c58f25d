"""Plots of designs: a waterfall of steps, effects of factors, a heat map of interactions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from tensorkeep.bench.analysis.wording import capitalised, clipped, gain
from tensorkeep.bench.results import Effect, Interaction, Measure, Results, Step
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots import heat
from tensorkeep.report.plots.forest import draw_gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_T = TypeVar("_T", Step, Effect, Interaction)

_MOST_PANELS = 4
_MOST_FACTORS = 15
_Row = tuple[str, float | None, float | None, float | None]
"""Name, gain, and the ends of its interval."""


def waterfall(results: Results) -> "Figure":
    """Return one panel per measure; each bar starts where the previous change ended."""
    steps = results.summary.steps
    panels = _by_measure(results, steps)
    changes = list(dict.fromkeys(step.change for step in steps))[: d.MOST_ARMS]
    columns = min(2, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    figure = d.new_figure(lines * (0.32 * len(changes) + 1.0) + 0.4)
    for place, (measure, rows) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(measure.label)
        _waterfall_panel(axes, changes, {step.change: step for step in rows})
        d.label_rows(axes, changes, bold=None)
        if place % columns:
            axes.tick_params(labelleft=False)
    d.footnote(figure, "Total gain over the base after each change, log scale; in brackets: the change's own gain.")
    return figure


def effects(results: Results) -> "Figure":
    """Return, per measure, the effects with intervals on the left and factor against factor on the right."""
    found = results.summary.effects
    panels = _by_measure(results, found)
    factors = list(dict.fromkeys(name for effect in found for name in effect.factors))[:_MOST_FACTORS]
    heights = [max(0.27 * len(rows), 0.36 * len(factors), 1.2) + 1.0 for _, rows in panels]
    figure = d.new_figure(sum(heights) + 0.4)
    grid = figure.add_gridspec(len(panels) or 1, 2, height_ratios=heights or [1], width_ratios=[1.25, 1])
    for line, (measure, rows) in enumerate(panels):
        left, right = figure.add_subplot(grid[line, 0]), figure.add_subplot(grid[line, 1])
        left.set_title(f"{measure.label}: effects")
        right.set_title(f"{measure.label}: factor with factor")
        _intervals(left, [(" x ".join(one.factors), one.gain, one.low, one.high) for one in rows])
        _factor_map(right, rows, factors)
    text = "Gain from a factor's first level to its last; pairs: measured over the product of both. Line: 95% interval."
    d.footnote(figure, f"{text}\n{capitalised('; '.join(heat.SCALE))}.")
    return figure


def interactions(results: Results) -> "Figure":
    """Return, per measure, the gain of combinations over the product of their single changes."""
    panels = _by_measure(results, results.summary.interactions)
    heights = [max(0.3 * len(rows), 0.8) + 0.8 for _, rows in panels]
    figure = d.new_figure(sum(heights) + 0.4)
    grid = figure.add_gridspec(len(panels) or 1, 1, height_ratios=heights or [1])
    for line, (measure, rows) in enumerate(panels):
        axes = figure.add_subplot(grid[line, 0])
        axes.set_title(measure.label)
        _intervals(axes, [(" + ".join(one.changes), one.ratio, one.low, one.high) for one in rows])
    text = "Right of 1x: the changes strengthen each other. Left: they weaken each other. Line: 95% interval."
    d.footnote(figure, text)
    return figure


def _by_measure(results: Results, found: Sequence[_T]) -> list[tuple[Measure, list[_T]]]:
    """Return the first measures that occur, in the order of the results file, each with what belongs to it."""
    rows = [(one, [each for each in found if each.measure == one.name][: d.MOST_ARMS]) for one in results.measures]
    return [(measure, each) for measure, each in rows if each][:_MOST_PANELS]


def _waterfall_panel(axes: "Axes", changes: list[str], steps: dict[str, Step]) -> None:
    totals = [step.gain_from_base for step in steps.values() if step.gain_from_base and step.gain_from_base > 0]
    low, high = min([*totals, 1.0]), max([*totals, 1.1])
    d.log_axis(axes, low / (high / low) ** 0.04, high * (high / low) ** 0.42, suffix="x")
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.axvline(1, color=d.BASE, linewidth=1.0)
    before = 1.0
    for row, change in enumerate(changes):
        step = steps.get(change)
        if step is None or not step.gain_from_base or step.gain_from_base <= 0:
            d.missing(axes, row, "not run")
            continue
        after = step.gain_from_base
        settled = _settled(step.gain_from_previous_low, step.gain_from_previous_high)
        colour = d.NEUTRAL if settled is False else d.GOOD if after > before else d.BAD
        axes.barh(row, after - before, left=before, height=0.6, color=colour, zorder=2)
        # A line to the next bar.
        end = row + (0.7 if row + 1 < len(changes) else 0.3)
        axes.plot([after, after], [row + 0.3, end], color=d.FAINT, linewidth=0.7, zorder=1)
        # The end of the bar is also a line, so that a change without effect remains visible.
        axes.plot([after, after], [row - 0.3, row + 0.3], color=colour, linewidth=1.5, zorder=2)
        text = f"{gain(after)} ({gain(step.gain_from_previous or after / before)})"
        d.write(axes, text, max(after, before), row)
        before = after


def _settled(low: float | None, high: float | None) -> bool | None:
    """Return whether an interval excludes 1; None without an interval."""
    return None if low is None or high is None else not low <= 1 <= high


def _intervals(axes: "Axes", rows: Sequence[_Row]) -> None:
    ends = [value for row in rows for value in row[1:] if value is not None and value > 0]
    low, high = min([*ends, 0.9]), max([*ends, 1.12])
    margin = (high / low) ** 0.06
    d.log_axis(axes, low / margin, high * margin, suffix="x")
    axes.axvline(1, color=d.BASE, linewidth=1.0, zorder=1)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    for place, (_, value, below, above) in enumerate(rows):
        if value is None or value <= 0:
            d.missing(axes, place, "unknown")
            continue
        mark = d.UNSETTLED if not _settled(below, above) else d.BETTER if value > 1 else d.WORSE
        draw_gain(axes, place, value, below, above, mark)
    d.label_rows(axes, [row[0] for row in rows], bold=None)


def _factor_map(axes: "Axes", rows: list[Effect], factors: list[str]) -> None:
    """Draw main effects on the diagonal and interactions beside it; unknown ones stay empty."""
    for effect in rows:
        if effect.gain is None or not set(effect.factors) <= set(factors):
            continue
        one, other = [factors.index(name) for name in (*effect.factors, *effect.factors)[:2]]
        for column, line in {(one, other), (other, one)}:
            shown = effect.gain if _settled(effect.low, effect.high) else None
            heat.draw_field(axes, column, line, shown, gain(effect.gain))
    names = [clipped(name, 14) for name in factors]
    many = len(factors) > 3
    axes.set_xticks(range(len(factors)), names, rotation=30 if many else 0, ha="right" if many else "center")
    axes.set_xlim(-0.5, len(factors) - 0.5)
    axes.tick_params(length=0, labelcolor=d.INK)
    d.label_rows(axes, factors, bold=None)
    axes.spines["bottom"].set_visible(False)
