"""A table before it is shown: the command line prints it, the page makes it sortable, and a file may hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of a table.

    Attributes
    ----------
    text : str
        What people read.
    order : float or None
        What the page sorts by; None sorts by the text, behind all numbers.
    tone : str
        ``"good"``, ``"bad"``, ``"faint"`` or nothing.
    code : bool
        Whether it is set as code.
    """

    text: str
    order: float | None = None
    tone: str = ""
    code: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under headings.

    Attributes
    ----------
    title : str
    headings : tuple of str
        As `tensorkeep.cli.text.Table` takes them: a leading ``>`` puts the column to the right, ``=`` keeps it
    unwrapped. rows : sequence of tuple of Entry
    note : str
        A sentence for the reader, below the title.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[Entry, ...]]
    note: str = ""

    def texts(self) -> list[tuple[str, ...]]:
        """Return the rows as text alone."""
        return [tuple(entry.text for entry in row) for row in self.rows]

    def lines(self) -> list[str]:
        """Return the table as aligned lines of text, the headings first."""
        rows: Sequence[Sequence[str]] = [tuple(heading.lstrip(">=") for heading in self.headings), *self.texts()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = [heading.startswith(">") for heading in self.headings]
        return [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]


def entry(text: str, order: float | None = None, tone: str = "") -> Entry:
    """Return a cell."""
    return Entry(text, order, tone)
