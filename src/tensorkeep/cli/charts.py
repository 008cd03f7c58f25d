"""Bars and sparklines on the terminal, at most 79 columns wide."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tensorkeep.report.charts.bars import Bars

_LABEL, _BAR, _TEXT = 24, 34, 12
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = ".:-=+*%#"


def print_bars(bars: Bars) -> None:
    """Print a title and a bar per line; one that is longer than the others are is cut off and marked with ``>``."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    width = max(1, min(_BAR, console.width - _LABEL - _TEXT))
    console.print(Text(f"   {bars.title}", style="bold"))
    for bar in bars.bars:
        length = max(1, round(width * min(1.0, bar.value / bars.full)))
        drawn = _blocks("█", "#") * length
        if bar.value > bars.full * 1.001:
            drawn = drawn[:-1] + ">"
        style = "bold cyan" if bar.tone == "good" else "dim"
        console.print(Text.assemble(f"   {bar.label:<{_LABEL - 3}}", (f"{drawn:<{width}}", style), f"  {bar.text}"))


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Return values as a line of ``width`` characters, from ``low`` to ``high``; each is the mean of its values."""
    levels = _blocks(_LEVELS, _PLAIN_LEVELS)
    width = min(width, len(values))
    line = ""
    for place in range(width):
        part = values[place * len(values) // width : (place + 1) * len(values) // width]
        height = (sum(part) / len(part) - low) / ((high - low) or 1.0)
        line += levels[min(len(levels) - 1, max(0, int(height * len(levels))))]
    return line


def _blocks(wanted: str, plain: str) -> str:
    """Return characters that stdout can encode."""
    try:
        wanted.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return plain
    return wanted
