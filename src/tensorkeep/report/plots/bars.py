"""Bars of means with their spread and every single run: the documents' three-way, four-panel and six-panel plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.panels import trio
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.plots.heat import impact_panel
from tensorkeep.report.samples import Samples, scale_of
from tensorkeep.report.wording import percent, short

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
    measures, arms = trio(results).all(), d.shown_arms(results)
    figure = d.new_figure(_height(len(arms)) + 0.75)
    panels = _row_of(figure, 1, 3, len(measures))[0]
    for axes, measure in zip(panels, measures, strict=True):
        _amounts(axes, results, arms, measure)
    d.label_rows(panels[0], [arm.name for arm in arms], bold=_bold(results))
    _legend(figure, results)
    return figure


def four_panels(results: Results) -> Figure:
    """Return two by two panels: saving, loading, size, and the improvement over the baseline in percent."""
    measures, arms = trio(results).all(), d.shown_arms(results)
    figure = d.new_figure(2 * _height(len(arms), 0.34) + 0.75)
    panels = [axes for row in _row_of(figure, 2, 2, 4) for axes in row]
    for axes, measure in zip(panels, measures, strict=False):
        _amounts(axes, results, arms, measure)
    _improvements(panels[3], results, arms, [one for one in (trio(results).save, trio(results).load) if one])
    for axes in panels[len(measures) : 3]:
        axes.set_axis_off()
    for axes in (panels[0], panels[2]):
        d.label_rows(axes, [arm.name for arm in arms], bold=_bold(results))
    _legend(figure, results)
    return figure


def six_panels(results: Results) -> Figure:
    """Return three by two panels: saving, loading, size; both improvements in percent, and a heat map of all."""
    chosen, arms = trio(results), d.shown_arms(results)
    figure = d.new_figure(2 * _height(len(arms)) + 1.0)
    above, below = _row_of(figure, 2, 3, 6)
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


def _row_of(figure: Figure, rows: int, columns: int, count: int) -> list[list[Axes]]:
    """Return panels row by row that share their arms; names stand at the left ones only."""
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
    samples = [scale.samples(results, arm.name) for arm in arms]
    log = d.wants_log([value for one in samples if one for value in one.values])
    highest = max((max(one.mean + (one.std or 0.0), *one.values) for one in samples if one), default=1.0) or 1.0
    lowest = min((min(one.values) for one in samples if one), default=1.0)
    if log:
        d.log_axis(axes, lowest / 1.6, highest * (highest / lowest) ** 0.28)
    else:
        axes.set_xlim(0, highest * 1.24)
        axes.xaxis.set_major_locator(_few_ticks())
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.set_title(measure.label)
    unit = {"s": "seconds", "ms": "milliseconds"}.get(scale.unit, scale.unit)
    axes.set_xlabel(unit + (", log scale" if log else ""))
    for row, (arm, one) in enumerate(zip(arms, samples, strict=True)):
        if one is None:
            why = "not measured" if _ran(results, arm) else d.why_missing(results, arm.name)
            d.missing(axes, row, why)
        else:
            _amount(axes, row, one, _colour(results, arm, measure), log=log)


def _ran(results: Results, arm: Arm) -> bool:
    return any(cell.status == "ok" for cell in results.cells_by_arm[arm.name])


def _amount(axes: Axes, row: int, one: Samples, colour: str, *, log: bool) -> None:
    count = len(one.values)
    if log:
        # A bar on a log axis has no honest length, so the mean is a dot; the runs lie below it.
        axes.plot([one.mean], [row - 0.1], "o", color=colour, markersize=7, zorder=3)
        places = [row + 0.27] * count
    else:
        axes.barh(row, one.mean, height=0.64, color=colour, zorder=2)
        places = [row + 0.2 * (2 * i / (count - 1) - 1) if count > 1 else row for i in range(count)]
    if max(one.values) > min(one.values):
        std = one.std or 0.0
        ends = [[min(std, one.mean * 0.999)], [std]]
        axes.errorbar(
            one.mean, row - 0.1 * log, xerr=ends, fmt="none", ecolor=d.INK, elinewidth=1.0, capsize=2.5, zorder=4
        )
        axes.plot(
            one.values,
            places,
            "o",
            markersize=2.6,
            markerfacecolor=d.PAPER,
            markeredgecolor=d.INK,
            markeredgewidth=0.6,
            zorder=5,
        )
    d.write(axes, short(one.mean), max(one.mean + (one.std or 0.0), *one.values, one.mean), row)


def _improvements(axes: Axes, results: Results, arms: list[Arm], measures: list[Measure]) -> None:
    """Draw the change in percent; what lies far below zero is cut off, and its label says how far it goes."""
    changes = {
        (row, i): found.change_percent
        for row, arm in enumerate(arms)
        for i, measure in enumerate(measures)
        if (found := results.statistics(arm.name, measure.name)) and found.change_percent is not None
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
    found = results.statistics(arm.name, measure.name)
    return _COLOURS.get(found.verdict or "", d.NEUTRAL)


def _few_ticks() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])


def _legend(figure: Figure, results: Results) -> None:
    from matplotlib.patches import Patch

    words = {d.BASE: "baseline", d.GOOD: "better", d.BAD: "worse", d.NEUTRAL: "within noise, or no verdict"}
    handles = [Patch(color=colour, label=word) for colour, word in words.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, handlelength=1.0, columnspacing=1.4)
    d.footnote(figure, _NOTE + d.left_out(results))
