"""Text and tables: fitted to the width of a terminal, aligned and complete in a pipe; the streams of a program."""

import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

# The reader of a pipe has closed it (`tensorkeep ls x | head -1`): 128 + SIGPIPE, as shells do.
BROKEN_PIPE = 141
_GAP = "  "
# The least width of a column of names or text, unless all its cells are shorter.
_NARROWEST = 8
# Longer words are shortened where a table is too wide.
_LONGEST_WORD = 16
# A width of names or text that is worth leaving out other columns.
_COMFORTABLE = 30


def make_streams_safe() -> None:
    """Replace closed streams, and escape characters that a stream cannot encode."""
    for name in ("stdin", "stdout", "stderr"):
        # The caller closed the stream. Without a replacement, the next opened file, such as a checkpoint, would get its
        # file descriptor, and prints would go into that file.
        if getattr(sys, name) is None:
            # Open until the process ends, like the stream that it replaces.
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Tests and notebooks replace the streams by objects without `reconfigure`.
        if isinstance(stream, io.TextIOWrapper):
            # Under LC_ALL=C a name of a tensor may not be printable.
            stream.reconfigure(errors="backslashreplace")


def finish_stdout() -> OSError | None:
    """Flush stdout and return the error, if one occurs."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout again at exit, and would print the error a second time.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None


def printable(text: str) -> str:
    """Return a text with control characters escaped."""
    # Names come from files, which may be hostile. Most are printable, and this test is fast.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_text(text: str) -> str:
    """Escape characters in a generated text that could control a terminal or reorder its text."""
    # These reorder text: a name could look like another one.
    escaped = {*"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
    escaped |= {c for c in {*text} - {*"\t\n"} if unicodedata.category(c) in ("Cc", "Cs")}
    return "".join(c.encode("unicode_escape").decode() if c in escaped else c for c in text)


def print_lines(*lines: str) -> None:
    """Print lines with control characters escaped, on a terminal wrapped between words."""
    for line in lines:
        print(_wrapped(printable(line)))


def _wrapped(line: str) -> str:
    if not sys.stdout.isatty():
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return "\n".join(wrapped(line, columns(), f"{indent}  "))


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """Break a text into lines between words; further lines begin with ``indent``."""
    import textwrap

    # A path or a name that is broken cannot be copied.
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def columns() -> int:
    """Return the width of the terminal, or 80 without one."""
    import shutil

    if found := shutil.get_terminal_size((0, 0)).columns:
        return found
    # The output may go through a pager.
    for stream in (0, 2):
        with suppress(OSError):
            return os.get_terminal_size(stream).columns or 80
    return 80


def has_colours() -> bool:
    """Return whether text on stdout may have colours: on a terminal that has them, or if the user forces them."""
    # The variables that rich knows.
    wanted = os.environ.get("FORCE_COLOR") or (
        sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    )
    return bool(wanted) and not os.environ.get("NO_COLOR")


def ratio(nbytes: int, stored_bytes: int) -> str:
    """Return how many times smaller the stored bytes are, such as ``1.49x``."""
    return f"{nbytes / stored_bytes:.2f}x" if stored_bytes else "-"


def elided(text: str, width: int) -> str:
    """Shorten text in the middle to ``width`` characters, such as ``model.layers.0…weight``."""
    if len(text) <= width:
        return text
    # The end of a name or path says most. It begins after a dot or slash, unless that end would be very short.
    # At least half of the width is for the end.
    least = width // 2
    starts = (i + 1 for i in range(len(text) - least - 1, len(text) - 4) if text[i] in "./")
    tail = text[next(starts, len(text) - least) :]
    return f"{text[: width - len(tail) - 1].rstrip('./')}…{tail}"


def print_verdict(verdict: str, rest: str, *, good: bool | None) -> None:
    """Print a line that begins with a verdict, on a terminal in green, red, or (None) yellow."""
    if not sys.stdout.isatty():
        print_lines(f"{verdict}{rest}")
        return
    from rich.text import Text

    # Wrapped before it is coloured, because rich would break paths.
    line = Text(_wrapped(printable(f"{verdict}{rest}")))
    line.stylize(_COLOURS[good], 0, len(verdict))
    _console().print(line, soft_wrap=True)


_COLOURS: dict[bool | None, str] = {True: "green", False: "red", None: "yellow"}

# Cells of tables that have a colour.
_VERDICTS = {
    **dict.fromkeys(("helps", "reproduced"), True),
    **dict.fromkeys(("hurts", "not reproduced", "wrong result"), False),
    **dict.fromkeys(("within noise", "undecided", "about the same", "confounded", "too few runs", "too small"), None),
}


def _console() -> "Console":
    from rich.console import Console

    # Names may have brackets and colons, which rich would read as markup and emoji. rich respects NO_COLOR.
    return Console(markup=False, highlight=False, emoji=False)


def _style(heading: str, cell: str) -> str:
    if heading == "problem":
        return _COLOURS[False]
    # The verdict "undecided after 5 blocks" has the colour of "undecided".
    verdict = cell.partition(" after ")[0]
    return _COLOURS[_VERDICTS[verdict]] if verdict in _VERDICTS else ""


# Not a dataclass: `tensorkeep --help` imports this file, and importing dataclasses takes 10 ms.
class Table(NamedTuple):
    """Rows of text under headings.

    The first character of a heading is the kind of its column: ``>`` is right-aligned and never shortened, for
    numbers; ``=`` is never wrapped, for names; all other columns are wrapped between words. A word that is longer than
    its column is shortened in the middle. A narrow terminal leaves out the columns ``spare``, the last one first, and
    names them below the table. If the table is still too wide, each row becomes a list of its cells.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    spare: tuple[str, ...] = ()

    def show(self) -> None:
        """Print the table, fitted to a terminal; in a pipe or a file nothing is cut or wrapped."""
        headings = tuple(printable(heading.lstrip(">=")) for heading in self.headings)
        rows = [tuple(map(printable, row)) for row in self.rows]
        if sys.stdout.isatty():
            self._show_fitted(headings, rows, _console())
        else:
            self._show_complete([headings, *rows] if any(headings) else rows)

    def _show_complete(self, rows: list[tuple[str, ...]]) -> None:
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        sides = [">" if heading.startswith(">") else "<" for heading in self.headings]
        for row in rows:
            # Trailing blanks would be in the way of diff and grep.
            cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            print(_GAP.join(cells).rstrip())

    def _show_fitted(self, headings: tuple[str, ...], rows: list[tuple[str, ...]], console: "Console") -> None:
        columns = [_Column(self.headings[i], headings[i], [row[i] for row in rows]) for i in range(len(headings))]
        hidden: list[str] = []
        spare = list(self.spare)
        # Leave out spare columns only as long as names would be cut.
        while spare and _total(column.comfortable for column in columns) > console.width:
            # The last spare column is the least important one.
            hidden.insert(0, spare.pop())
            columns = [column for column in columns if column.heading != hidden[0]]
        # A list of cells needs only the width of its longest word.
        if _total(column.least for column in columns) <= console.width:
            _print_columns(columns, console)
        else:
            hidden = []
            _print_records(headings, rows, console)
        if hidden:
            console.print(f"(not shown in {console.width} columns: {', '.join(hidden)})", style="dim")


class _Column:
    def __init__(self, marked_heading: str, heading: str, cells: Sequence[str]) -> None:
        self.mark = marked_heading[:1]
        self.heading = heading
        self.cells = cells
        # Characters, not columns of the terminal: wide characters in names are rare.
        self.most = max(map(len, (heading, *cells)))
        texts = (heading, *cells)
        words = texts if self.mark == "=" else [word for text in texts for word in text.split()]
        # A cell of an ``=`` column with a space holds figures, and is not shortened.
        # The longest word decides how narrow a column can be.
        longest = max((len(word) if " " in word else min(len(word), _LONGEST_WORD) for word in words), default=0)
        # A number that is cut would be another number.
        self.least = self.most if self.mark == ">" else min(self.most, max(longest, _NARROWEST))
        self.comfortable = self.least if self.mark == ">" else min(self.most, max(longest, _COMFORTABLE))

    def fitted(self, cell: str, width: int) -> str:
        if self.mark in (">", "="):
            return elided(cell, width)
        return " ".join(elided(word, width) for word in cell.split(" "))


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(_GAP) * (len(found) - 1)


def _print_columns(columns: Sequence[_Column], console: "Console") -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    widths = [column.least for column in columns]
    spare = console.width - _total(widths)
    # The columns that need least come first, and leave their share to the others.
    order = sorted(range(len(columns)), key=lambda i: columns[i].most - widths[i])
    for done, i in enumerate(order):
        # An equal share of the space that is left, but no more than the column can use.
        added = min(columns[i].most - widths[i], spare // (len(order) - done))
        widths[i], spare = widths[i] + added, spare - added
    table = RichTable(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
    table.show_header = any(column.heading for column in columns)
    for column, width in zip(columns, widths, strict=True):
        # Numbers align at their last digit.
        justify: Literal["left", "right"] = "right" if column.mark == ">" else "left"
        table.add_column(column.fitted(column.heading, width), justify=justify, width=width)
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = zip(columns, row, widths, strict=True)
        table.add_row(*(Text(each.fitted(cell, width), _style(each.heading, cell)) for each, cell, width in cells))
    console.print(table)


def _print_records(headings: Sequence[str], rows: Sequence[Sequence[str]], console: "Console") -> None:
    for number, row in enumerate(rows):
        # An empty line separates the records.
        if number:
            console.print()
        # An empty cell says nothing in a list.
        pairs = [(heading, cell) for heading, cell in zip(headings, row, strict=True) if cell]
        columns = [_Column("=", "", [heading for heading, _ in pairs]), _Column("", "", [cell for _, cell in pairs])]
        _print_columns(columns, console)
