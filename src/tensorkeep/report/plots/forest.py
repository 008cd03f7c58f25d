"""The forest plot: every arm's gain with its 95% interval, beside the band that is noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tensorkeep.bench.results import Arm, Measure, Results, Statistics
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.wording import FAR, NEAR, clipped, gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Filled means settled: the shape says it to those who do not see the colour.
_MARKS = {"helps": ("o", d.GOOD, True), "hurts": ("s", d.BAD, True)}
_OTHER = ("D", d.NEUTRAL, False)
_MOST_PANELS = 4
_BETWEEN_TICKS = 6.0


def rows(results: Results) -> list[Arm]:
    """Return the arms that have a gain, or would have one had they run."""
    arms = [arm for arm in d.shown_arms(results) if arm.name != results.baseline]
    found = [results.statistics(arm.name, one.name) for arm in arms for one in results.primary()]
    return arms if any(one and one.gain for one in found) else []


def gains(results: Results) -> Figure:
    """Return one panel per primary measure, the arms as rows."""
    arms, measures = rows(results), results.primary()[:_MOST_PANELS]
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
    _legend(figure, results, arrows=any(_goes_beyond(results, arms, measure) for measure in measures))
    _thin_ticks(figure)
    return figure


def _ends(found: list[Statistics]) -> list[float]:
    return [value for one in found if one for value in (one.gain, one.gain_low, one.gain_high) if value and value > 0]


def _goes_beyond(results: Results, arms: list[Arm], measure: Measure) -> bool:
    ends = _ends([results.statistics(arm.name, measure.name) for arm in arms])
    return any(not NEAR <= end <= FAR for end in ends)


def _within(value: float) -> float:
    return min(max(value, NEAR), FAR)


def _panel(axes: Axes, results: Results, arms: list[Arm], measure: Measure) -> None:
    found = [results.statistics(arm.name, measure.name) for arm in arms]
    noise = results.summary.noise.get(measure.name)
    ends = _ends(found)
    low, high = _within(min([*ends, 0.9])), _within(max([*ends, 1.12]))
    margin = (high / low) ** 0.05
    if noise and noise.floor and noise.floor > 1:
        low, high = min(low, _within(1 / noise.floor)), max(high, _within(noise.floor))
        edges = max(low / margin, 1 / noise.floor), min(high * margin, noise.floor)
        axes.axvspan(*edges, color=d.BAND, zorder=0, linewidth=0)
    d.log_axis(axes, low / margin, high * margin, suffix="x", most=4)
    axes.axvline(1, color=d.BASE, linewidth=1.0, zorder=1)
    axes.grid(axis="x", color=d.GRID, linewidth=0.7)
    axes.set_title(measure.label)
    for row, (arm, one) in enumerate(zip(arms, found, strict=True)):
        if one is None or not one.gain or one.gain <= 0:
            d.missing(axes, row, d.why_missing(results, arm.name))
            continue
        point(axes, row, one.gain, one.gain_low, one.gain_high, *_mark(one))


def point(
    axes: Axes, row: float, value: float, low: float | None, high: float | None, marker: str, colour: str, filled: bool
) -> None:
    """Draw a gain with its interval, and write it at the right edge; what the axis does not reach ends in an arrow."""
    left, right = axes.get_xlim()
    inset = (right / left) ** 0.02
    first, last = left * inset, right / inset

    def mark(at: float, shape: str) -> None:
        fill = colour if filled else d.PAPER
        axes.plot([at], [row], shape, color=colour, markerfacecolor=fill, markersize=5.5, zorder=3)

    if low is not None and high is not None and 0 < low <= high and low < right and high > left:
        axes.plot(
            [max(low, first), min(high, last)],
            [row, row],
            color=colour,
            linewidth=1.8,
            zorder=2,
            solid_capstyle="butt",
        )
        if low < left:
            mark(first, "<")
        if high > right:
            mark(last, ">")
    mark(min(max(value, first), last), "<" if value < left else ">" if value > right else marker)
    d.write(axes, gain(value), 0, row, edge=True)


def _thin_ticks(figure: Figure) -> None:
    """Leave out the labels of each axis that would overlap, from 1x outwards."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        boxes = {float(at): label.get_window_extent() for at, label in labels}
        kept: list[float] = []
        for at in sorted(boxes, key=lambda at: abs(math.log(at))):
            others = (boxes[other] for other in kept)
            if all(
                boxes[at].x0 > other.x1 + _BETWEEN_TICKS or boxes[at].x1 < other.x0 - _BETWEEN_TICKS for other in others
            ):
                kept.append(at)
        axes.set_xticks(sorted(kept))


def _mark(one: Statistics) -> tuple[str, str, bool]:
    return _MARKS.get(one.verdict or "", _OTHER)


def _legend(figure: Figure, results: Results, *, arrows: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = {"better": _MARKS["helps"], "worse": _MARKS["hurts"], "within noise, or too few runs": _OTHER}
    handles: list[Line2D | Patch] = [
        Line2D(
            [], [], marker=mark, color=colour, markerfacecolor=colour if filled else d.PAPER, label=word, markersize=5.5
        )
        for word, (mark, colour, filled) in marks.items()
    ]
    handles.append(Patch(color=d.BAND, label="noise: the baseline against itself"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, columnspacing=1.4)
    text = f"Gain over {clipped(results.baseline or '', 34)}: right of 1x is better. Log scale; line: 95% interval."
    if arrows:
        text += f" Arrow: beyond {NEAR:g}x or {FAR:g}x."
    d.footnote(figure, text + d.left_out(results))
