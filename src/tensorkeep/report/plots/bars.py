"""Bars of means with their spread and every run: the three-way, four-panel and six-panel plots of the guides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorkeep.bench.analysis.statistics import describe
from tensorkeep.bench.analysis.wording import number, percent
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.measures import compared_measures, scale_of
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots.heat import impact_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_ROW = 0.27
_COLOURS = {"helps": d.GOOD, "hurts": d.BAD}
_LOWEST = -150.0
_NOTE = "Bar or dot: mean; whisker: ± 1 standard deviation; circle: one run."


def three_way(results: Results) -> Figure:
    """Return one row of panels: saving, loading, size."""
    measures, arms = compared_measures(results).all(), d.shown_arms(results)
    figure = d.new_figure(_height(len(arms)) + 0.75)
    panels = _panels(figure, 1, 3, len(measures))[0]
    for axes, measure in zip(panels, measures, strict=True):
        _amounts(axes, results, arms, measure)
    d.label_rows(panels[0], [arm.name for arm in arms], bold=_bold(results))
    _legend(figure, results)
    return figure


def four_panels(results: Results) -> Figure:
    """Return two by two panels: saving, loading, size, and the improvement over the baseline in percent."""
    chosen, arms = compared_measures(results), d.shown_arms(results)
    measures = chosen.all()
    figure = d.new_figure(2 * _height(len(arms), 0.34) + 0.75)
    panels = [axes for row in _panels(figure, 2, 2, 4) for axes in row]
    for axes, measure in zip(panels, measures, strict=False):
        _amounts(axes, results, arms, measure)
    _improvements(panels[3], results, arms, [one for one in (chosen.save, chosen.load) if one])
    for axes in panels[len(measures) : 3]:
        axes.set_axis_off()
    for axes in (panels[0], panels[2]):
        d.label_rows(axes, [arm.name for arm in arms], bold=_bold(results))
    _legend(figure, results)
    return figure


def six_panels(results: Results) -> Figure:
    """Return three by two panels: saving, loading, size; both improvements in percent, and a heat map of all."""
    chosen, arms = compared_measures(results), d.shown_arms(results)
    figure = d.new_figure(2 * _height(len(arms)) + 1.0)
    above, below = _panels(figure, 2, 3, 6)
    for axes, measure in zip(above, (chosen.save, chosen.load, chosen.size), strict=True):
        if measure is None:
            axes.set_axis_off()
        else:
            _amounts(axes, results, arms, measure)
    for axes, one in zip(below[:2], (chosen.save, chosen.load), strict=True):
        if one is None:
            axes.set_axis_off()
        else:
            _improvements(axes, results, arms, [one])
    impact_panel(below[2], results, arms)
    for axes in (above[0], below[0]):
        d.label_rows(axes, [arm.name for arm in arms], bold=_bold(results))
    _legend(figure, results)
    return figure


def _height(rows: int, row: float = _ROW) -> float:
    return max(1.1, row * rows) + 0.75


def _bold(results: Results) -> int | None:
    return None if results.baseline is None else 0


def _panels(figure: Figure, rows: int, columns: int, count: int) -> list[list[Axes]]:
    """Return rows of panels that share their arms; only the left ones have names."""
    found = []
    for row in range(rows):
        line: list[Axes] = []
        for column in range(min(columns, count - row * columns)):
            axes = figure.add_subplot(
                rows, min(columns, count), row * columns + column + 1, sharey=line[0] if line else None
            )
            if line:
                axes.tick_params(labelleft=False)
                axes.spines["left"].set_visible(False)
            line.append(axes)
        found.append(line)
    return found


def _amounts(axes: Axes, results: Results, arms: list[Arm], measure: Measure) -> None:
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
        axes.set_xlim(0, highest * 1.24)
        axes.xaxis.set_major_locator(_few_ticks())
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


def _amount(axes: Axes, row: int, runs: list[float], colour: str, *, log: bool) -> None:
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


def _improvements(axes: Axes, results: Results, arms: list[Arm], measures: list[Measure]) -> None:
    """Draw the change in percent; a bar far below zero is cut off, and its label gives the value."""
    changes = {
        (row, i): change
        for row, arm in enumerate(arms)
        for i, measure in enumerate(measures)
        if (change := results.statistics(arm.name, measure.name).change_percent) is not None
    }
    low = max(_LOWEST, min([-10.0, *changes.values()]) * 1.1)
    high = max([40.0, *(100.0 if value > 60 else value * 1.2 for value in changes.values())])
    axes.set_xlim(low, high + (high - low) * 0.24)
    axes.xaxis.set_major_locator(_few_ticks())
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
        from matplotlib.patches import Patch

        handles = [Patch(color=colour, label=name) for colour, name in zip((d.FIRST, d.SECOND), names, strict=True)]
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, handlelength=1.0
        )


def _colour(results: Results, arm: Arm, measure: Measure) -> str:
    if arm.name == results.baseline:
        return d.BASE
    return _COLOURS.get(results.statistics(arm.name, measure.name).verdict or "", d.NEUTRAL)


def _few_ticks() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])


def _legend(figure: Figure, results: Results) -> None:
    from matplotlib.patches import Patch

    words = {d.BASE: "baseline", d.GOOD: "better", d.BAD: "worse", d.NEUTRAL: "within noise, or no verdict"}
    handles = [Patch(color=colour, label=word) for colour, word in words.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, handlelength=1.0, columnspacing=1.4)
    d.footnote(figure, _NOTE + d.left_out(results))
