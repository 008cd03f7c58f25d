"""The drawing engine of all figures: boxes, lines and texts on a canvas, in pixels, written as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# A shape names its colour. In the page a colour is a CSS variable, so that the figure follows the light or dark theme;
# in a file it is this value, on white. The colours are from Okabe and Ito (2008); people with any colour vision can
# distinguish them.
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
    "third": "#b07d00",
    "fourth": "#6a51a3",
    # The steps of `gain_colour`. On the strongest ones, text has the colour of the paper instead of ink.
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

SIZE = 12.0
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    about: str = ""  # what a pointer over it shows

    def svg(self, colours: dict[str, str]) -> str:
        place = f'x="{_text(self.x)}" y="{_text(self.y)}" width="{_text(self.width)}" height="{_text(self.height)}"'
        # Escaped, because names come from results files.
        title = f"<title>{escape(self.about)}</title>" if self.about else ""
        return f'<rect {place} style="fill:{colours[self.fill]}">{title}</rect>'


@dataclass(frozen=True, slots=True)
class Line:
    """A line through some points, or a polygon if it has a filling."""

    points: Sequence[Point]
    stroke: str
    width: float = 1.0
    fill: str = ""
    name: str = ""  # class of the element, for styles and scripts of the page
    dashes: tuple[float, float, float] | None = (
        None  # length of a dash, of a gap, and of the gap at the start; in pages
    )

    def svg(self, colours: dict[str, str]) -> str:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self.points) + ("Z" if self.fill else "")
        named = f'class="{self.name}" ' if self.name else ""
        fill = colours[self.fill] if self.fill else "none"
        style = f"fill:{fill};stroke:{colours[self.stroke]};stroke-width:{self.width:g}"
        if self.dashes:
            dash, gap, start = self.dashes
            style += f";stroke-dasharray:{dash:g} {gap:g};stroke-dashoffset:{-start:g}"
        return f'<path {named}d="{path}" style="{style}"/>'


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text: ``anchor`` is the side at ``x``, and ``y`` is the baseline."""

    x: float
    y: float
    text: str
    size: float = SIZE
    colour: str = "ink"
    anchor: str = "start"  # start, middle or end
    bold: bool = False
    italic: bool = False

    def svg(self, colours: dict[str, str]) -> str:
        style = f"fill:{colours[self.colour]};font-size:{self.size:g}px"
        style += ";font-weight:600" * self.bold + ";font-style:italic" * self.italic
        anchor = "" if self.anchor == "start" else f' text-anchor="{self.anchor}"'
        return f'<text x="{_text(self.x)}" y="{_text(self.y)}"{anchor} style="{style}">{escape(self.text)}</text>'


Shape = Box | Line | Text


class Canvas:
    """A figure: shapes, the lowest first."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.shapes: list[Shape] = []

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes

    def mark(self, kind: str, x: float, y: float, colour: str, fill: str = "", size: float = 4.0) -> None:
        """Draw a marker: ``circle``, ``square``, ``diamond``, or a triangle: ``up``, ``left`` or ``right``."""
        self.add(Line([(x + a * size, y + b * size) for a, b in _MARKS[kind]], colour, 1.3, fill or colour))

    def page_svg(self, label: str) -> str:
        colours = {name: f"var(--plot-{name})" for name in PALETTE}
        head = f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(label)}"'
        return f"<svg {head}>{self.body(colours)}</svg>"

    def body(self, colours: dict[str, str]) -> str:
        return "".join(shape.svg(colours) for shape in self.shapes)


_MARKS: dict[str, list[Point]] = {
    "circle": [(math.cos(turn * math.pi / 12), math.sin(turn * math.pi / 12)) for turn in range(24)],
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "up": [(0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
    "left": [(-1.1, 0), (0.9, -1.1), (0.9, 1.1)],
    "right": [(1.1, 0), (-0.9, -1.1), (-0.9, 1.1)],
}


def _text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_NARROW, _WIDE = frozenset("ijl.,:;'|!I ftr()[]-"), frozenset("mwMW%@=+")


def text_width(text: str, size: float = SIZE) -> float:
    # Estimated, because the browser chooses the font; most fonts are narrower. Characters of East Asia are as wide as
    # high.
    widths = (0.36 if c in _NARROW else 0.9 if c in _WIDE else 1.05 if ord(c) > 0x2E7F else 0.64 for c in text)
    return size * sum(widths)


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    span = high - low
    if not span:
        return [low]
    # The smallest of 1, 2 and 5 times a power of ten that gives few enough ticks.
    exponent = math.floor(math.log10(span / most))
    unit = 10.0**exponent
    step = unit * next(factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= most)
    # Quotients are rounded: a limit that is a multiple of the step is a tick, too.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, -exponent) for place in range(first, last + 1)]


# Amounts have one colour, stronger for larger ones.
_FAINTEST = 0.06


def amount_opacity(value: float, low: float, high: float, *, log: bool) -> float:
    """Return the strength of an amount, 0 to 1; with ``log`` it follows the logarithm."""
    if value <= 0:
        return 0.0
    if log:
        part = math.log(min(value, high) / low) / math.log(high / low) if high > low else 1.0
    else:
        part = min(value, high) / high
    # Never fully transparent: the smallest amount differs from none.
    return round(_FAINTEST + (1 - _FAINTEST) * min(1.0, max(0.0, part)), 3)
