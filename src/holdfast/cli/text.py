"""Text and tables for people: in colour on a terminal, aligned and whole in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[str]


def printable(text: str) -> str:
    """Return a text without anything that could drive a terminal: names come from files, and files may be hostile."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, such as ``1 tensor`` or ``2,370 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ratio(nbytes: int, stored_bytes: int) -> str:
    """Return how many times smaller the stored bytes are, such as ``1.49x``."""
    return f"{nbytes / stored_bytes:.2f}x" if stored_bytes else "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings.

    Attributes
    ----------
    headings : tuple of str
        One per column; a leading ``>`` puts the column's text to the right, as for numbers.
    rows : list of tuple of str
    """

    headings: tuple[str, ...]
    rows: list[Row]

    def show(self) -> None:
        """Print it: fitted to the terminal, or, into a pipe or a file, with nothing cut and nothing wrapped."""
        rows = [tuple(map(printable, row)) for row in self.rows]
        if sys.stdout.isatty():
            self._show_fitted(rows)
        else:
            self._show_whole(rows)

    def _show_fitted(self, rows: list[tuple[str, ...]]) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for heading in self.headings:
            right = heading.startswith(">")
            # Numbers stay whole; names give way, and lose nothing.
            table.add_column(
                heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
            )
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False, emoji=False).print(table)

    def _show_whole(self, rows: list[tuple[str, ...]]) -> None:
        right = [heading.startswith(">") for heading in self.headings]
        headings = tuple(heading.removeprefix(">") for heading in self.headings)
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            cells = (
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            )
            print("  ".join(cells).rstrip())
