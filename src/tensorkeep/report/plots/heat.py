"""Heat maps: each cell shows the effect as a colour and a number."""

from typing import TYPE_CHECKING

from tensorkeep.bench.analysis.wording import clipped, percent
from tensorkeep.bench.results import Arm, Results
from tensorkeep.report.charts.scales import gain_colour
from tensorkeep.report.plots import drawing as d

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALE = ("grey: no difference shown", "blue: better, orange: worse", "stronger from 1.25x, 2x and 4x")
"""What the colours mean."""


def impact_panel(axes: "Axes", results: Results, arms: list[Arm]) -> None:
    """Draw the change of every arm in every primary measure, in percent of the baseline."""
    measures = results.primary()
    axes.set_title("impact, % of the baseline")
    for row, arm in enumerate(arms):
        for column, measure in enumerate(measures):
            found = results.statistics(arm.name, measure.name)
            if found.gain is None or found.change_percent is None:
                text = "baseline" if arm.name == results.baseline else "-" if results.ran(arm.name) else "not run"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=d.FAINT, style="italic")
                continue
            settled = found.verdict in ("helps", "hurts")
            draw_field(axes, column, row, found.gain if settled else None, percent(found.change_percent))
    # One word below the other: fields are narrow.
    names = ["\n".join(clipped(word, 12) for word in one.label.split()[:2]) for one in measures]
    axes.set_xticks(range(len(measures)), names, fontsize=8)
    axes.set_xlim(-0.5, max(len(measures), 1) - 0.5)
    axes.tick_params(axis="x", length=0, labelcolor=d.INK)
    axes.set_xlabel("\n".join(SCALE))
    axes.spines["bottom"].set_visible(False)


def draw_field(axes: "Axes", column: float, row: float, gain: float | None, text: str) -> None:
    """Draw one field of a heat map; it is grey without a gain."""
    from matplotlib.patches import Rectangle

    name = gain_colour(gain)
    field = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=d.PALETTE[name], edgecolor="none")
    axes.add_patch(field)
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color=d.PAPER if name[-1] == "4" else d.INK)
