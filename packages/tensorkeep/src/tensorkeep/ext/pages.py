"""Pages of HTML: tables, bars, curves, and how a page is written."""

from tensorkeep.pages.canvas import (
    PALETTE,
    SIZE,
    Box,
    Canvas,
    Line,
    Point,
    Shape,
    Text,
    round_ticks,
    text_width,
)
from tensorkeep.pages.curves import Chart, Curve, chart
from tensorkeep.pages.elements import Bars, ChartBar, ReportTable, TableEntry, facts_of
from tensorkeep.pages.rendering import PageKind, check_page, render_page

__all__ = [
    "PALETTE",
    "SIZE",
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
    "Shape",
    "TableEntry",
    "Text",
    "chart",
    "check_page",
    "facts_of",
    "render_page",
    "round_ticks",
    "text_width"
]  # fmt: skip
