"""Heat maps: each cell shows the effect as a colour and a number."""

import math
from typing import TYPE_CHECKING

from tensorkeep.bench.analysis.wording import clipped, percent
from tensorkeep.bench.results import Arm, Results
from tensorkeep.report.plots import drawing as d

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A factor of four has the full colour. These colours are not in the palette: the page does not replace them in dark
# mode, because the text colours were chosen for them.
_FULL = math.log(4)
_BETTER = (0.0, 0.44, 0.69)
_WORSE = (0.85, 0.38, 0.02)
_PALE = (0.955, 0.96, 0.965)
_GREY: tuple[float, ...] = (0.86, 0.875, 0.89)


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
    axes.set_xlabel("grey: about the same, within noise or no verdict; blue: better; orange: worse")
    axes.spines["bottom"].set_visible(False)


def draw_field(axes: "Axes", column: float, row: float, gain: float | None, text: str) -> None:
    """Draw one field of a heat map; it is grey without a gain."""
    from matplotlib.patches import Rectangle

    colour = _GREY
    if gain is not None and gain > 0:
        # From pale to blue above 1, to orange below.
        part = min(abs(math.log(gain)) / _FULL, 1.0)
        ends = zip(_PALE, _BETTER if gain > 1 else _WORSE, strict=True)
        colour = tuple(pale + part * (end - pale) for pale, end in ends)
    axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    ink = "#000000" if _luminance(colour) > 0.18 else "#fffffe"
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)


def _luminance(colour: tuple[float, ...]) -> float:
    """Return the relative luminance of WCAG 2; black and white have the same contrast to 0.18."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
