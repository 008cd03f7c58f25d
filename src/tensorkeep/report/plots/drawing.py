"""Fonts, colours, axes and labels of all figures, and their rendering as SVG and PNG.

The colours are those of Okabe and Ito (2008), which people with any colour vision can distinguish. `PALETTE` names
every colour that a figure may use, so that the page can replace them in dark mode.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorkeep.bench.analysis.wording import clipped
from tensorkeep.bench.results import Arm, Results
from tensorkeep.report.measures import compared_arms
from tensorkeep.report.tables import why_not_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

PALETTE = {
    "ink": "#1b1f24",
    "faint": "#5f6872",
    "grid": "#d8dde2",
    "band": "#e8ebee",
    "paper": "#ffffff",
    "base": "#454d57",
    "neutral": "#8d959e",
    "good": "#0072b2",
    "bad": "#d55e00",
    "first": "#009e73",
    "second": "#c46a9b",
    # Further curves.
    "third": "#b07d00",
    "fourth": "#6a51a3",
    # The steps of `tensorkeep.report.charts.scales`. The strongest have the colour of the paper as text, others ink.
    "worse-4": "#b34e00",
    "worse-3": "#ec8b45",
    "worse-2": "#f6c29b",
    "worse-1": "#fbe6d8",
    "even": "#e3e7eb",
    "better-1": "#dcebf5",
    "better-2": "#a9d0ea",
    "better-3": "#5aa5d3",
    "better-4": "#00629b",
}
INK, FAINT, GRID, BAND, PAPER, BASE, NEUTRAL, GOOD, BAD, FIRST, SECOND, *_ = PALETTE.values()

WIDTH = 11.0
MOST_ARMS = 40
LOG_FROM = 20.0
NAME_LENGTH = 34
_DPI = 200
_TITLE_HEIGHT = 0.3
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_TIGHT: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.08}
_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": NEUTRAL,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0.0,
    "text.color": INK,
    # Names come from files: a dollar sign in one must not start a formula.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker whose shape and filling carry the same meaning as its colour."""

    shape: str
    colour: str
    fill: str


BETTER, WORSE = Mark("o", GOOD, GOOD), Mark("s", BAD, BAD)
UNSETTLED = Mark("D", NEUTRAL, PAPER)


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure, which has its title; its file name without suffix, and its SVG for the page, which shows the title."""

    name: str
    title: str
    svg: str
    figure: "Figure" = field(repr=False)

    def file_svg(self) -> str:
        """Return the SVG for a file, on a white background."""
        return _with_fonts(self._saved("svg", metadata=_NO_METADATA).decode())

    def png(self) -> bytes:
        """Return the PNG, on a white background."""
        return self._saved("png", dpi=_DPI)

    def _saved(self, kind: str, **options: Any) -> bytes:
        content = io.BytesIO()
        with _applied(self.name):
            self.figure.savefig(content, format=kind, facecolor=PAPER, **options, **_TIGHT)
        return content.getvalue()


def drawn(name: str, title: str, draw: "Callable[[Results], Figure]", results: Results) -> Plot:
    """Return a drawn figure."""
    content = io.StringIO()
    with _applied(name):
        figure = draw(results)
        figure.savefig(content, format="svg", metadata=_NO_METADATA, **_TIGHT)
        _set_title(figure, title)
    return Plot(name, title, _with_fonts(content.getvalue()), figure)


def _set_title(figure: "Figure", title: str) -> None:
    """Write a title above a figure, which becomes higher: its panels, and labels placed in them, keep their size."""
    font: Any = {"size": 11.0, "weight": "bold"}
    figure.set_figheight(figure.get_figheight() + _TITLE_HEIGHT)
    if figure.legends:
        # The layout would write a title of the figure over the legend.
        figure.legends[0].set_title(title, prop=font)
        figure.legends[0].set_alignment("left")
    else:
        figure.suptitle(title, x=0.01, ha="left", fontproperties=font)


def _with_fonts(svg: str) -> str:
    """Return an SVG for viewers that lack the font; Verdana is as wide."""
    return svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


@contextmanager
def _applied(name: str) -> Iterator[None]:
    import matplotlib

    settings: Any = {**_RC, "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # The font may lack characters of a name; the SVG shows them with another font.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .* natively")
        yield


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """Return an empty figure (inches) that lays itself out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.08, h_pad=0.08, wspace=0.02, hspace=0.04)  # type: ignore[call-arg]
    return figure


def shown_arms(results: Results) -> list[Arm]:
    """Return the arms that a figure shows, the baseline first; of too many, those with the largest gains."""
    arms = compared_arms(results)
    if len(arms) <= MOST_ARMS:
        return arms

    def best(arm: Arm) -> float:
        found = results.summary.arms.get(arm.name, {}).values()
        return max((one.gain or 0.0 for one in found), default=0.0)

    kept = {arm.name for arm in sorted(arms[1:], key=best, reverse=True)[: MOST_ARMS - 1]}
    return [arm for arm in arms if arm.name in kept or arm is arms[0]]


def left_out(results: Results) -> str:
    """Return a sentence about the arms that a figure omits, or an empty string."""
    count = len(compared_arms(results))
    return "" if count <= MOST_ARMS else f" {MOST_ARMS} of {count} arms are shown; the tables have all."


def label_rows(axes: "Axes", names: Sequence[str], *, bold: int | None = 0) -> None:
    """Write a name at each row, the first at the top, one of them (the baseline) in bold."""
    axes.set_yticks(range(len(names)), [clipped(name, NAME_LENGTH) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.spines["left"].set_visible(False)
    if bold is not None and names:
        axes.get_yticklabels()[bold].set_fontweight("bold")


def why_missing(results: Results, arm: str) -> str:
    """Return the text for an arm without a gain, such as ``not run (timed out)``; one that ran lacks a baseline."""
    if results.ran(arm):
        return "not compared"
    status = why_not_run(results.cells_by_arm[arm])[0]
    return "not run" if status in ("not run", "-") else f"not run ({status})"


def missing(axes: "Axes", row: float, text: str, *, at: float | None = None) -> None:
    """Write why a row is empty: at the left edge, or at an x in data coordinates."""
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    _annotate(axes, text, at, 0, row, 4, color=FAINT, style="italic", fontsize=8.5, bbox=box)


def write(axes: "Axes", text: str, x: float | None, row: float, *, size: float = 8.5) -> None:
    """Write a figure to the right of a point, or without an x to the right of the axes."""
    _annotate(axes, text, x, 1, row, 5, fontsize=size)


def _annotate(axes: "Axes", text: str, x: float | None, edge: float, row: float, right: float, **style: Any) -> None:
    """Write in a row, some points right of an x in data coordinates, or else of an x as a fraction of the axes."""
    coordinates: Any = "data" if x is not None else ("axes fraction", "data")
    place = {"xycoords": coordinates, "textcoords": "offset points", "va": "center_baseline"}
    axes.annotate(text, (edge if x is None else x, row), (right, 0), **place, **style)


def patches(words: Mapping[str, str]) -> "list[Patch]":
    """Return the entries of a legend: the words for some colours."""
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=word) for colour, word in words.items()]


def footnote(figure: "Figure", text: str) -> None:
    """Write a sentence below all panels."""
    figure.supxlabel(text, fontsize=8.5, color=FAINT, x=0.01, ha="left")


def needs_log(values: Sequence[float]) -> bool:
    """Return whether values span so much that a linear axis would hide the small ones."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def log_words(values: Sequence[float]) -> str:
    """Return the suffix of an axis label for a logarithmic scale, if the values need one."""
    return ", log scale" if needs_log(values) else ""


def linear_axis(axes: "Axes", low: float, high: float, *, which: str = "x") -> None:
    """Set the limits of an axis, whose few ticks are plain numbers: no offset, no power of ten beside the axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def log_axis(axes: "Axes", low: float, high: float, *, suffix: str = "", which: str = "x", most: int = 5) -> None:
    """Make an axis logarithmic, with ticks at round numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(log_ticks(low, high, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}{suffix}"))


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most so many round numbers between two limits, 1 among them if it lies there."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in decades for step in steps if low <= step * 10.0**power <= high]
        if 3 <= len(ticks) <= most:
            return ticks
        if len(ticks) < 3:
            break
    else:
        stride = math.ceil(len(ticks) / most)
        return [10.0**power for power in decades if power % stride == 0 and low <= 10.0**power <= high]
    if high / low < 4:
        ticks = [float(tick) for tick in MaxNLocator(nbins=most - 1).tick_values(low, high)]
        return [tick for tick in ticks if low <= tick <= high and tick > 0]
    return [step * 10.0**power for power in decades for step in (1, 2, 5) if low <= step * 10.0**power <= high]
