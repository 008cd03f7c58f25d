"""What plots need besides shapes: axes with ticks, colours of gains, and files in SVG and PNG."""

import io
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tensorkeep.errors import import_extra
from tensorkeep.ext.pages import PALETTE, Box, Canvas, Line, Point, Shape, Text, round_ticks, text_width

FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
# Positions and sizes are pixels.
_TITLE_HEIGHT = 34
_ANCHORS = {"start": "l", "middle": "m", "end": "r"}  # of Pillow, horizontally
_PIXELS = 2  # of a PNG, for each pixel of the canvas
_SUPERSAMPLED = 2


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def cuts(self, value: float) -> str:
        """Return the side on which a value is cut off, ``left`` or ``right`` of a horizontal axis; empty inside."""
        return "left" if value < self.low else "right" if value > self.high else ""

    def at(self, value: float) -> float:
        # Clipped, so that a shape never leaves its panel.
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, suffix: str = "") -> list[tuple[float, str]]:
        ticks = log_ticks(self.low, self.high) if self.log else round_ticks(self.low, self.high)
        kept: list[tuple[float, str]] = []
        # From 1 outwards, which the axis of gains has in any case.
        for tick in sorted(ticks, key=lambda tick: abs(math.log(tick))) if self.log else ticks:
            label = f"{tick:,.6g}{suffix}" if self.log else f"{tick:,.10g}{suffix}"
            # Labels of a horizontal axis never overlap.
            far = text_width(label, 11) / 2 + 5
            if all(abs(self.at(tick) - self.at(other)) > far + text_width(text, 11) / 2 for other, text in kept):
                kept.append((tick, label))
        return sorted(kept)


_LOG_FROM = 20.0
_ZERO_FROM = 1.25
_LEAST_SPAN = 0.02


def amount_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return the axis of all figures that show amounts as points.

    The axis is logarithmic if the values differ by more than a factor of 20: a linear axis would hide the small ones.
    It begins at 0 if they differ by a factor of 1.25 or more. Closer values would all lie at its end, so they get an
    axis around them, 2% wide or more: smaller differences mean nothing, and look like nothing.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low > _LOG_FROM:
        margin = (high / low) ** 0.06
        return Axis(low / margin, high * margin, start, end, log=True)
    if low >= 0 and high >= low * _ZERO_FROM:
        return Axis(0.0, high * 1.06 or 1.0, start, end)
    span = max(high - low, _LEAST_SPAN * abs(high))
    middle = (low + high) / 2
    return Axis(middle - 0.6 * span, middle + 0.6 * span, start, end)


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most so many round numbers between two positive limits, 1 among them if it lies there."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # From fine to coarse, until there are few enough ticks.
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in decades for step in steps if low <= step * 10.0**power <= high]
        if 3 <= len(ticks) <= most:
            return ticks
        if len(ticks) < 3:
            break
    else:
        # Multiples of the stride, so that 1 is a tick.
        stride = math.ceil(len(ticks) / most)
        return [10.0**power for power in decades if power % stride == 0 and low <= 10.0**power <= high]
    if high / low < 4:
        return [tick for tick in round_ticks(low, high, most - 1) if tick > 0]
    return [step * 10.0**power for power in decades for step in (1, 2, 5) if low <= step * 10.0**power <= high]


Rectangle = tuple[float, float, float, float]  # left, top, right, bottom
_STEP_OUT, _BETWEEN = 8.0, 5.0
_DIRECTIONS = [(math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)) for turn in (0, 12, 4, 8, *range(16))]


def overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def place_labels(
    labels: Sequence[tuple[str, Point]], radius: float, size: float, area: Rectangle, taken: Sequence[Rectangle] = ()
) -> Iterator[tuple[Text, Rectangle, Line | None]]:
    """Place a text at each point so that no text covers another text, a marker of this radius or a taken rectangle.

    Yields each text, its rectangle, and a line to the point. The line is None for a text directly beside its point,
    which is always nearer to its own point than to any other.
    """
    points = [point for _, point in labels]
    kept = [*taken, *((x - radius, y - radius, x + radius, y + radius) for x, y in points)]
    for text, (x, y) in labels:
        width = text_width(text, size) + _BETWEEN
        for middle, direct in _places((x, y), width, size, radius + 2, area):
            box = (middle[0] - width / 2, middle[1] - size / 2, middle[0] + width / 2, middle[1] + size / 2)
            nearest = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
            # The line is a row of small squares, so that later texts keep away from it.
            line = [] if direct else _squares((x, y), nearest, radius)
            if any(overlap(box, other) for other in kept):
                continue
            if direct and any(math.dist(middle, other) < math.dist(middle, (x, y)) for other in points):
                continue
            break
        kept += [box, *line]
        placed = Text(middle[0], middle[1] + size * 0.35, text, size, anchor="middle")
        yield placed, box, None if direct else Line([(x, y), nearest], "faint", 0.7)


def _places(point: Point, width: float, height: float, least: float, area: Rectangle) -> Iterator[tuple[Point, bool]]:
    # From the nearest places outwards; those beside the point come first.
    out = least
    while out < max(area[2] - area[0], area[3] - area[1]):
        for across, down in _DIRECTIONS:
            x, y = point[0] + across * (out + width / 2), point[1] + down * (out + height / 2)
            inside_across = area[0] <= x - width / 2 and x + width / 2 <= area[2]
            if inside_across and area[1] <= y - height / 2 and y + height / 2 <= area[3]:
                yield (x, y), out == least
        out += _STEP_OUT


def _squares(start: Point, end: Point, radius: float) -> list[Rectangle]:
    length = math.dist(start, end)
    parts = [place / length for place in range(math.ceil(radius), int(length), 3)]
    middles = [(start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part) for part in parts]
    return [(x - 1.5, y - 1.5, x + 1.5, y + 1.5) for x, y in middles]


# Gains have the same steps on both sides of 1 and in every map, so that twice as good and half as good are equally
# strong.
_LIMITS = (1.25, 2.0, 4.0)
EVEN = "even"
# Colours, and their meaning.
GAIN_LEGEND = (
    ("worse-4", "up to 0.25x"),
    ("worse-3", "up to 0.5x"),
    ("worse-2", "up to 0.8x"),
    ("worse-1", "below 1x"),
    (EVEN, "not decided, or about the same"),
    ("better-1", "above 1x"),
    ("better-2", "from 1.25x"),
    ("better-3", "from 2x"),
    ("better-4", "from 4x"),
)


def is_even(gain: float) -> bool:
    """Return whether a gain reads 1.00x: a colour would contradict the number."""
    return abs(gain - 1) < 0.005


def gain_colour(gain: float | None) -> str:
    """Return the colour of a gain; `EVEN` for 1.00x, and for None, where no difference is shown."""
    if gain is None or gain <= 0 or is_even(gain):
        return EVEN
    # A little more, because 1 / 0.8 is less than 1.25 in floating point.
    size = max(gain, 1 / gain) * (1 + 1e-9)
    return f"{'better' if gain > 1 else 'worse'}-{1 + sum(size >= limit for limit in _LIMITS)}"


def svg_file(canvas: Canvas, title: str) -> str:
    height = canvas.height + _TITLE_HEIGHT
    head = f'viewBox="0 0 {canvas.width:g} {height:g}" width="{canvas.width:g}" height="{height:g}"'
    ground = Box(0, 0, canvas.width, height, "paper").svg(PALETTE)
    body = f'<g transform="translate(0 {_TITLE_HEIGHT})">{canvas.body(PALETTE)}</g>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {head} font-family="{FONT}">'
    return f"{head}{ground}{_title(title).svg(PALETTE)}{body}</svg>\n"


def png_file(canvas: Canvas, title: str) -> bytes:
    """Raises MissingExtraError if Pillow is not installed."""
    import_extra("PIL", "tensorkeep-bench", "plots as PNG need Pillow")
    from PIL import Image, ImageDraw

    width, height = round(canvas.width * _PIXELS), round((canvas.height + _TITLE_HEIGHT) * _PIXELS)
    large = Image.new("RGB", (width * _SUPERSAMPLED, height * _SUPERSAMPLED), PALETTE["paper"])
    drawing = ImageDraw.Draw(large)
    _paint(_title(title), drawing, 0)
    for shape in canvas.shapes:
        _paint(shape, drawing, _TITLE_HEIGHT)
    content = io.BytesIO()
    # Pillow does not smooth edges; the mean of smaller pixels does.
    large.resize((width, height), Image.Resampling.BOX).save(content, "PNG")
    return content.getvalue()


def _title(title: str) -> Text:
    return Text(8, 21, title, 14, bold=True)


def _paint(shape: Shape, image: Any, down: float) -> None:
    scale = float(_PIXELS * _SUPERSAMPLED)
    if isinstance(shape, Box):
        left, top = shape.x * scale, (shape.y + down) * scale
        # Pillow counts the last pixel as a part of the rectangle, and refuses one that is narrower.
        corner = (max(left, left + shape.width * scale - 1), max(top, top + shape.height * scale - 1))
        # Pillow draws a rectangle of no width as a line.
        if shape.width > 0 and shape.height > 0:
            image.rectangle([(left, top), corner], fill=PALETTE[shape.fill])
    elif isinstance(shape, Line):
        points = [(x * scale, (y + down) * scale) for x, y in shape.points]
        if shape.fill:
            image.polygon(points, fill=PALETTE[shape.fill])
            points.append(points[0])  # the outline of a polygon is closed
        # A line of width 0 would vanish.
        image.line(points, fill=PALETTE[shape.stroke], width=max(1, round(shape.width * scale)), joint="curve")
    else:
        font, complete = _font(round(shape.size * scale), shape.bold, shape.italic)
        # Without a font of the system, Pillow has one for little more than ASCII.
        text = shape.text if complete else _ascii(shape.text)
        place, anchor = (shape.x * scale, (shape.y + down) * scale), f"{_ANCHORS[shape.anchor]}s"
        image.text(place, text, font=font, fill=PALETTE[shape.colour], anchor=anchor)


@lru_cache(maxsize=64)
def _font(size: int, bold: bool, italic: bool) -> tuple[Any, bool]:
    """Return a font of Pillow, and whether it has more than ASCII."""
    from PIL import ImageFont

    style = "-Bold" if bold else "-Oblique" if italic else ""
    for name in (f"DejaVuSans{style}.ttf", "DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size), True
        except OSError:
            continue
    return ImageFont.load_default(size), False


def _ascii(text: str) -> str:
    plain = text.replace("…", "...").replace("µ", "u").replace("±", "+-")
    return unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
