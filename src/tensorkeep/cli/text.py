"""Text and tables: fitted to a terminal, aligned and complete in a pipe."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_GAP = "  "


def printable(text: str) -> str:
    """Return a text with control characters escaped: names come from files, which may be hostile."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_lines(*lines: str) -> None:
    """Print lines with control characters escaped."""
    for line in lines:
        print(printable(line))


def ratio(nbytes: int, stored_bytes: int) -> str:
    """Return how many times smaller the stored bytes are, such as ``1.49x``."""
    return f"{nbytes / stored_bytes:.2f}x" if stored_bytes else "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings.

    A leading ``>`` of a heading right-aligns its column, as for numbers; columns with ``>`` or ``=`` are never wrapped.
    The columns ``spare`` are left out on a narrow terminal, the last one first, and named below the table.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    spare: tuple[str, ...] = ()

    def show(self) -> None:
        """Print the table, fitted to a terminal; into a pipe or a file nothing is cut or wrapped."""
        headings = tuple(heading.lstrip(">=") for heading in self.headings)
        rows = [tuple(map(printable, row)) for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
        if sys.stdout.isatty():
            self._show_fitted(headings, rows, widths)
        else:
            self._show_complete([headings, *rows], widths)

    def _show_fitted(self, headings: tuple[str, ...], rows: list[tuple[str, ...]], widths: list[int]) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        console = Console(markup=False, highlight=False, emoji=False)
        shown = list(range(len(headings)))
        spare = [headings.index(heading) for heading in self.spare]
        while spare and _width(shown, widths) > console.width:
            shown.remove(spare.pop())
        if all(self.headings[i][:1] in (">", "=") for i in shown) and _width(shown, widths) > console.width:
            # Better lines that the terminal breaks than numbers without their last digits.
            self._show_complete([headings, *rows], widths)
            return
        table = RichTable(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
        for i in shown:
            mark = self.headings[i][:1]
            justify: Literal["left", "right"] = "right" if mark == ">" else "left"
            table.add_column(headings[i], justify=justify, no_wrap=mark in (">", "="), overflow="fold")
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        console.print(table)
        hidden = [heading for i, heading in enumerate(headings) if i not in shown]
        if hidden:
            console.print(f"(not shown in {console.width} columns: {', '.join(hidden)})", style="dim")

    def _show_complete(self, rows: list[tuple[str, ...]], widths: list[int]) -> None:
        sides = [">" if heading.startswith(">") else "<" for heading in self.headings]
        for row in rows:
            cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            print(_GAP.join(cells).rstrip())


def _width(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] + len(_GAP) for i in shown) - len(_GAP)
