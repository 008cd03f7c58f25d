"""The forest plot: the gain of every arm with its 95% interval, over the band of noise."""

import math
from typing import TYPE_CHECKING

from tensorkeep.bench.analysis.wording import FAR, NEAR, clipped, gain
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.plots import drawing as d

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = {"helps": d.BETTER, "hurts": d.WORSE}
_MOST_PANELS = 4
_BETWEEN_TICKS = 6.0


def arms_with_gains(results: Results) -> list[Arm]:
    """Return all arms but the baseline, if any of them has a gain."""
    arms = [arm for arm in d.shown_arms(results) if arm.name != results.baseline]
    measures = results.primary()
    return arms if any(results.statistics(arm.name, one.name).gain for arm in arms for one in measures) else []


def gains(results: Results) -> "Figure":
    """Return one panel per primary measure, the arms as rows."""
    arms, measures = arms_with_gains(results), results.primary()[:_MOST_PANELS]
    figure = d.new_figure(max(1.3, 0.27 * len(arms)) + 1.45)
    first: Axes | None = None
    for place, measure in enumerate(measures):
        axes = figure.add_subplot(1, len(measures), place + 1, sharey=first)
        first = first or axes
        if axes is not first:
            axes.tick_params(labelleft=False)
            axes.spines["left"].set_visible(False)
        _panel(axes, results, arms, measure)
    if first is not None:
        d.label_rows(first, [arm.name for arm in arms], bold=None)
    _legend(figure, results, arrows=any(end != _within(end) for one in measures for end in _ends(results, arms, one)))
    _thin_ticks(figure)
    return figure


def _ends(results: Results, arms: list[Arm], measure: Measure) -> list[float]:
    found = [results.statistics(arm.name, measure.name) for arm in arms]
    return [value for one in found for value in (one.gain, one.gain_low, one.gain_high) if value and value > 0]


def _within(value: float) -> float:
    return min(max(value, NEAR), FAR)


def _panel(axes: "Axes", results: Results, arms: list[Arm], measure: Measure) -> None:
    noise = results.summary.noise.get(measure.name)
    ends = _ends(results, arms, measure)
    low, high = _within(min([*ends, 0.9])), _within(max([*ends, 1.12]))
    margin = (high / low) ** 0.05
    if noise and noise.floor > 1:
        low, high = min(low, _within(1 / noise.floor)), max(high, _within(noise.floor))
        edges = max(low / margin, 1 / noise.floor), min(high * margin, noise.floor)
        axes.axvspan(*edges, color=d.BAND, zorder=0, linewidth=0)
    d.log_axis(axes, low / margin, high * margin, suffix="x", most=4)
    axes.axvline(1, color=d.BASE, linewidth=1.0, zorder=1)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.set_title(measure.label)
    for row, arm in enumerate(arms):
        one = results.statistics(arm.name, measure.name)
        if not one.gain or one.gain <= 0:
            d.missing(axes, row, d.why_missing(results, arm.name))
        else:
            draw_gain(axes, row, one.gain, one.gain_low, one.gain_high, _MARKS.get(one.verdict or "", d.UNSETTLED))


def draw_gain(axes: "Axes", row: float, value: float, low: float | None, high: float | None, mark: d.Mark) -> None:
    """Draw a gain with its interval and write it at the right edge; an arrow replaces what lies beyond the axis."""
    left, right = axes.get_xlim()
    inset = (right / left) ** 0.02
    first, last = left * inset, right / inset

    def draw(at: float, shape: str) -> None:
        axes.plot([at], [row], shape, color=mark.colour, markerfacecolor=mark.fill, markersize=5.5, zorder=3)

    if low is not None and high is not None and 0 < low <= high and low < right and high > left:
        ends = [max(low, first), min(high, last)]
        axes.plot(ends, [row, row], color=mark.colour, linewidth=1.8, zorder=2, solid_capstyle="butt")
        if low < left:
            draw(first, "<")
        if high > right:
            draw(last, ">")
    draw(min(max(value, first), last), "<" if value < left else ">" if value > right else mark.shape)
    d.write(axes, gain(value), None, row)


def _thin_ticks(figure: "Figure") -> None:
    """Drop the tick labels that would overlap, from 1x outwards."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        boxes = {float(at): label.get_window_extent() for at, label in labels}
        kept: list[float] = []
        for at in sorted(boxes, key=lambda at: abs(math.log(at))):
            wide = boxes[at].padded(_BETWEEN_TICKS)
            if not any(wide.overlaps(boxes[other]) for other in kept):
                kept.append(at)
        axes.set_xticks(sorted(kept))


def _legend(figure: "Figure", results: Results, *, arrows: bool) -> None:
    from matplotlib.lines import Line2D

    words = {"better": d.BETTER, "worse": d.WORSE, "about the same, within noise, or no verdict": d.UNSETTLED}
    lines = [
        Line2D([], [], marker=m.shape, color=m.colour, markerfacecolor=m.fill, label=word, markersize=5.5)
        for word, m in words.items()
    ]
    handles = [*lines, *d.patches({d.BAND: "noise: the baseline against itself"})]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, columnspacing=1.4)
    baseline = clipped(results.baseline or "", d.NAME_LENGTH)
    text = f"Gain over {baseline}: right of 1x is better. Log scale; line: 95% interval."
    if arrows:
        text += f" Arrow: beyond {NEAR:g}x or {FAR:g}x."
    d.footnote(figure, text + d.left_out(results))
