"""Pages of HTML: tables, bars, curves, and how a page is written."""

from tensorkeep.pages.canvas import (
    GAIN_LEGEND,
    SIZE,
    Axis,
    Box,
    Canvas,
    Line,
    Point,
    Text,
    gain_colour,
    needs_log,
    text_width,
)
from tensorkeep.pages.curves import Chart, Curve, chart
from tensorkeep.pages.elements import Bars, ChartBar, ReportTable, TableEntry, facts_of
from tensorkeep.pages.rendering import PageKind, check_page, render_page

__all__ = [
    "GAIN_LEGEND",
    "SIZE",
    "Axis",
    "Bars",
    "Box",
    "Canvas",
    "Chart",
    "ChartBar",
    "Curve",
    "Line",
    "PageKind",
    "Point",
    "ReportTable",
    "TableEntry",
    "Text",
    "chart",
    "check_page",
    "facts_of",
    "gain_colour",
    "needs_log",
    "render_page",
    "text_width"
]  # fmt: skip
