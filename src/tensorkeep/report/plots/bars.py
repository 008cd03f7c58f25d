"""Bar plots of means with their spread and every run: three-way, four-panel, six-panel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorkeep.bench.analysis.statistics import describe
from tensorkeep.bench.analysis.wording import number, percent
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.measures import compared_measures, scale_of
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots.heat import impact_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"helps": d.GOOD, "hurts": d.BAD}
_LOWEST = -150.0
_NOTE = "Bar or dot: mean; whisker: ± 1 standard deviation; circle: one run."


Panel = Callable[["Axes", Results, list[Arm]], None]
"""Draws one panel, whose rows are the arms."""


def three_way(results: Results) -> "Figure":
    """Return one row of panels: saving, loading, size."""
    return _figure(results, [list(map(_amounts, compared_measures(results).named().values()))])


def four_panels(results: Results) -> "Figure":
    """Return two by two panels: saving, loading, size, and the improvement over the baseline in percent."""
    chosen = compared_measures(results)
    first, second, third = [*map(_amounts, chosen.named().values()), None, None][:3]
    improvements = _improvements(*(measure for measure in (chosen.save, chosen.load) if measure))
    return _figure(results, [[first, second], [third, improvements]], 0.34)


def six_panels(results: Results) -> "Figure":
    """Return three by two panels: saving, loading, size; both improvements in percent, and a heat map of all."""
    chosen = compared_measures(results)
    above = [_amounts(measure) if measure else None for measure in (chosen.save, chosen.load, chosen.size)]
    below = [_improvements(measure) if measure else None for measure in (chosen.save, chosen.load)]
    return _figure(results, [above, [*below, impact_panel]])


def _figure(results: Results, rows: Sequence[Sequence[Panel | None]], row_height: float = 0.27) -> "Figure":
    """Return rows of panels that share their arms; the left ones and heat maps have names, None is an empty panel."""
    arms = d.shown_arms(results)
    figure = d.new_figure(len(rows) * (max(1.1, row_height * len(arms)) + 0.75) + 0.85)
    for line, panels in enumerate(rows):
        left: Axes | None = None
        for column, panel in enumerate(panels):
            axes = figure.add_subplot(len(rows), len(panels), line * len(panels) + column + 1, sharey=left)
            if left is not None:
                axes.tick_params(labelleft=panel is impact_panel)
                axes.spines["left"].set_visible(False)
            left = left or axes
            if panel is None:
                axes.set_axis_off()
            else:
                panel(axes, results, arms)
        if left is not None:
            d.label_rows(left, [arm.name for arm in arms], bold=None if results.baseline is None else 0)
    _legend(figure, results)
    return figure


def _amounts(measure: Measure) -> Panel:
    return partial(_draw_amounts, measure=measure)


def _improvements(*measures: Measure) -> Panel:
    return partial(_draw_improvements, measures=measures)


def _draw_amounts(axes: "Axes", results: Results, arms: list[Arm], measure: Measure) -> None:
    """Draw the mean, the spread and the runs of every arm."""
    scale = scale_of(results, measure)
    values = [scale.values(results, arm.name) for arm in arms]
    every = [value for runs in values for value in runs]
    log = d.needs_log(every)
    highest = max((_end(runs) for runs in values if runs), default=1.0) or 1.0
    lowest = min(every, default=1.0)
    if log:
        d.log_axis(axes, lowest / 1.6, highest * (highest / lowest) ** 0.28)
    else:
        d.linear_axis(axes, 0, highest * 1.24)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.set_title(measure.label)
    axes.set_xlabel({"s": "seconds", "ms": "milliseconds"}.get(scale.unit, scale.unit) + d.log_words(every))
    for row, (arm, runs) in enumerate(zip(arms, values, strict=True)):
        if not runs:
            why = "not measured" if results.ran(arm.name) else d.why_missing(results, arm.name)
            d.missing(axes, row, why)
        else:
            _amount(axes, row, runs, _colour(results, arm, measure), log=log)


def _end(runs: list[float]) -> float:
    """Return where the bar, its whisker and its runs end."""
    found = describe(runs)
    return max(found.mean + (found.std or 0.0), found.high)


def _amount(axes: "Axes", row: int, runs: list[float], colour: str, *, log: bool) -> None:
    found, count = describe(runs), len(runs)
    mean, std = found.mean, found.std or 0.0
    if log:
        # The length of a bar means nothing on a log axis, so the mean is a dot; the runs lie below it.
        axes.plot([mean], [row - 0.1], "o", color=colour, markersize=7, zorder=3)
        places = [row + 0.27] * count
    else:
        axes.barh(row, mean, height=0.64, color=colour, zorder=2)
        places = [row + 0.2 * (2 * i / (count - 1) - 1) if count > 1 else row for i in range(count)]
    if found.high > found.low:
        ends = [[min(std, mean * 0.999)], [std]]
        axes.errorbar(mean, row - 0.1 * log, xerr=ends, fmt="none", ecolor=d.INK, elinewidth=1.0, capsize=2.5, zorder=4)
        rings = axes.plot(runs, places, "o", markersize=2.6, markeredgecolor=d.INK, markeredgewidth=0.6, zorder=5)
        rings[0].set_markerfacecolor(d.PAPER)
    d.write(axes, number(mean), _end(runs), row)


def _draw_improvements(axes: "Axes", results: Results, arms: list[Arm], measures: Sequence[Measure]) -> None:
    """Draw the change in percent; a bar far below zero is cut off, and its label gives the value."""
    changes = {
        (row, i): change
        for row, arm in enumerate(arms)
        for i, measure in enumerate(measures)
        if (change := results.statistics(arm.name, measure.name).change_percent) is not None
    }
    low = max(_LOWEST, min([-10.0, *changes.values()]) * 1.1)
    high = max([40.0, *(100.0 if value > 60 else value * 1.2 for value in changes.values())])
    d.linear_axis(axes, low, high + (high - low) * 0.24)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.axvline(0, color=d.BASE, linewidth=1.0, zorder=3)
    names = [measure.label for measure in measures]
    axes.set_title("improvement" if len(measures) > 1 else f"{names[0]}: improvement")
    axes.set_xlabel("% of the baseline's mean, above 0 is better")
    height = (0.64 if len(measures) == 1 else 0.84) / len(measures)
    for row, arm in enumerate(arms):
        if not any((row, i) in changes for i in range(len(measures))):
            text = "baseline" if arm.name == results.baseline else d.why_missing(results, arm.name)
            d.missing(axes, row, text, at=0)
    for (row, i), value in changes.items():
        place = row + (i - (len(measures) - 1) / 2) * height
        single = _colour(results, arms[row], measures[i])
        colour = (d.FIRST, d.SECOND)[i] if len(measures) > 1 else single
        axes.barh(place, max(value, low), height=height * 0.92, color=colour, zorder=2)
        cut = " (cut off)" if value < low else ""
        d.write(axes, percent(value) + cut, max(value, 0), place, size=8.5 if len(measures) == 1 else 7.5)
    if len(measures) > 1:
        handles = d.patches(dict(zip((d.FIRST, d.SECOND), names, strict=True)))
        at: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(handles=handles, ncols=2, borderaxespad=0.2, handlelength=1.0, **at)


def _colour(results: Results, arm: Arm, measure: Measure) -> str:
    if arm.name == results.baseline:
        return d.BASE
    return _COLOURS.get(results.statistics(arm.name, measure.name).verdict or "", d.NEUTRAL)


def _legend(figure: "Figure", results: Results) -> None:
    words = {
        d.BASE: "baseline",
        d.GOOD: "better",
        d.BAD: "worse",
        d.NEUTRAL: "about the same, within noise, or no verdict",
    }
    figure.legend(handles=d.patches(words), loc="outside upper left", ncols=4, handlelength=1.0, columnspacing=1.4)
    d.footnote(figure, _NOTE + d.left_out(results))
