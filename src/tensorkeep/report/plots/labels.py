"""Labels of points that do not lie on each other, on points, or outside the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tensorkeep.report.plots import drawing as d
from tensorkeep.report.wording import clipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_SIZE = 8.0
_NAME_LENGTH = 34
_DIRECTIONS = (
    (1, 0),
    (1, 0.8),
    (1, -0.8),
    (-1, 0),
    (-1, 0.8),
    (-1, -0.8),
    (0, 1),
    (0, -1),
    (1, 1.8),
    (1, -1.8),
    (-1, 1.8),
    (-1, -1.8),
)
_DISTANCES = (8, 16, 26, 40, 58, 80, 105, 135)


Spot = tuple[float, float]
"""A point in data coordinates."""


def place_labels(
    figure: Figure,
    axes: Axes,
    named: Sequence[tuple[str, float, float]],
    spots: Sequence[Spot],
    lines: Sequence[tuple[Spot, Spot]] = (),
) -> None:
    """Write a name beside each point, with a line to it where it had to go far; leave out what fits nowhere.

    Parameters
    ----------
    named : sequence of (name, x, y)
        In data coordinates; the first ones choose first.
    spots : sequence of (x, y)
        Points that no label may cover.
    lines : sequence of (spot, spot)
        Horizontal and vertical lines that no label may cover.
    """
    from matplotlib.transforms import Bbox

    # Positions are known only after the figure has laid itself out.
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    points = axes.transData.transform([list(spot) for spot in spots] or [[0.0, 0.0]])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
    taken += [Bbox(axes.transData.transform(line)).padded(1) for line in map(sorted, lines)]
    for name, x, y in named:
        box = _place(axes, clipped(name, _NAME_LENGTH), (x, y), frame, taken)
        if box is not None:
            taken.append(box)


def _place(axes: Axes, name: str, spot: tuple[float, float], frame: Bbox, taken: list[Bbox]) -> Bbox | None:
    """Write one name at the first place that is free, nearest first; return the place, or None."""
    from matplotlib.transforms import Bbox

    probe = axes.text(*spot, name, fontsize=_SIZE)
    size = probe.get_window_extent()
    probe.remove()
    x, y = axes.transData.transform(spot)
    pixels = axes.figure.dpi / 72
    for distance in _DISTANCES:
        for across, up in _DIRECTIONS:
            left = x + across * distance * pixels - (size.width if across < 0 else size.width / 2 if across == 0 else 0)
            box = Bbox.from_bounds(left, y + up * distance * pixels - size.height / 2, size.width, size.height).padded(
                1
            )
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if not inside or any(box.overlaps(other) for other in taken):
                continue
            line = {"arrowstyle": "-", "color": d.NEUTRAL, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            side: Literal["left", "right", "center"] = "left" if across > 0 else "right" if across < 0 else "center"
            label = axes.annotate(
                name,
                spot,
                (across * distance, up * distance),
                textcoords="offset points",
                fontsize=_SIZE,
                ha=side,
                va="center",
                zorder=4,
                arrowprops=line if distance > _DISTANCES[0] else None,
            )
            label.set_in_layout(False)
            return box
    return None
