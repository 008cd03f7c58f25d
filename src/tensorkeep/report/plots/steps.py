"""The waterfall: how far each change carries on the way from the baseline to the full stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorkeep.bench.results import Results, Step
from tensorkeep.report.plots import drawing as d
from tensorkeep.report.wording import gain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 4


def waterfall(results: Results) -> Figure:
    """Return one panel per measure; each bar starts where the change before it ended."""
    steps = results.summary.steps
    used = {step.measure for step in steps}
    measures = [measure for measure in results.measures if measure.name in used][:_MOST_PANELS]
    changes = list(dict.fromkeys(step.change for step in steps))[: d.MOST_ARMS]
    columns = min(2, len(measures)) or 1
    lines = -(-len(measures) // columns) or 1
    figure = d.new_figure(lines * (0.32 * len(changes) + 1.0) + 0.4)
    for place, measure in enumerate(measures):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(measure.label)
        _panel(axes, changes, {step.change: step for step in steps if step.measure == measure.name})
        d.label_rows(axes, changes, bold=None)
        if place % columns:
            axes.tick_params(labelleft=False)
    d.footnote(figure, "Total gain over the baseline after each change, log scale; in brackets: the change's own gain.")
    return figure


def _panel(axes: Axes, changes: list[str], steps: dict[str, Step]) -> None:
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
        axes.barh(row, after - before, left=before, height=0.6, color=_colour(step, after / before), zorder=2)
        axes.plot(
            [after, after],
            [row + 0.3, row + (0.7 if row + 1 < len(changes) else 0.3)],
            color=d.FAINT,
            linewidth=0.7,
            zorder=1,
        )
        # A change that changes nothing is a line, not a gap.
        axes.plot([after, after], [row - 0.3, row + 0.3], color=_colour(step, after / before), linewidth=1.5, zorder=2)
        text = f"{gain(after)} ({gain(step.gain_from_previous or after / before)})"
        d.write(axes, text, max(after, before), row)
        before = after


def _colour(step: Step, own: float) -> str:
    low, high = step.gain_from_previous_low, step.gain_from_previous_high
    if low is not None and high is not None and low <= 1 <= high:
        return d.NEUTRAL
    return d.GOOD if own > 1 else d.BAD
