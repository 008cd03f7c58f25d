"""The base of the pages of ``tensorkeep show``: a subject, tables of a bounded size, heat maps, the file."""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from tensorkeep.pages.canvas import amount_opacity
from tensorkeep.pages.elements import ReportTable
from tensorkeep.pages.rendering import PageKind, render_page
from tensorkeep.pages.statistics import Histogram
from tensorkeep.runs.address import CHECKPOINTS
from tensorkeep.storage.commit import replace_file
from tensorkeep.units import counted, format_bytes
from tensorkeep.version import __version__

SHOW = PageKind("show", "page of tensorkeep show", "tensorkeep[show]", "tensorkeep.pages")
# The most bytes of a table in a page: with it, a page has less than 5 MB.
TABLE_BYTES = 4_000_000
# Rows of the table that the terminal shows.
MOST_MODULES = 12
# What a reader should know first, as (tone, sentence); the tone is "good", "bad" or empty.
Findings = list[tuple[str, str]]
_LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = 5
_STEP = re.compile(r"step-\d{6,}")
_LETTER_WIDTH, _MOST_LETTERS = 6.4, 40
_ROW_HEIGHT = 15
_TOP, _BOTTOM = 4, 22
_WIDTH = 900
# The least distance of two labels of columns, and the widest column.
_LEAST_GAP, _WIDEST = 56, 80


class PageSubject(ABC):
    """What a page shows: a checkpoint, a run, the difference of two checkpoints, or two runs."""

    @property
    @abstractmethod
    def heading(self) -> str:
        """The first line on the terminal."""

    @property
    def note(self) -> str:
        """A sentence after the findings, for the terminal."""
        return ""

    @abstractmethod
    def findings(self) -> Findings:
        """Return what a reader should know first."""

    @abstractmethod
    def summary(self) -> ReportTable:
        """Return the table for the terminal."""

    @abstractmethod
    def page(self) -> str:
        """Return the page as HTML; MissingExtraError if jinja2 is not installed."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as ``--json`` prints them."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, the kind of its values, and an explanation."""

    title: str
    # name, text, word (a text that many rows share), count, bytes, number, percent, ratio or histogram.
    kind: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table as JSON, which the script of a page draws, without the last ``left_out`` rows."""

    json: dict[str, Any]
    left_out: int

    def left_out_text(self, listed: str, nbytes: int | None = None) -> str:
        """Return which rows are ``listed``, and how many are left out; empty if the table has all rows."""
        if not self.left_out:
            return ""
        rows, size = (len(self.json["rows"]), "" if nbytes is None else f", {format_bytes(nbytes)} together,")
        total = counted(rows + self.left_out, self.json["noun"])
        others = f"The other {self.left_out:,}{size} are left out to keep the page small; --json has all."
        return f"Listed here: {rows:,} of {total}, {listed}. {others}"


def drawn_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, noun: str, limit: int = TABLE_BYTES
) -> DrawnTable:
    """Return a table with the first rows that fit into ``limit`` bytes."""
    words: list[dict[str, int]] = [{} for _ in columns]
    kept: list[list[Any]] = []
    size = 0
    rest: Iterator[Sequence[Any]] = iter(rows)
    for row in rest:
        plain = [_plain(value, column, known) for value, column, known in zip(row, columns, words, strict=True)]
        # Measured as JSON, because names may have any length and need escapes.
        size += len(json.dumps(plain, separators=(",", ":"))) + 1
        if size > limit:
            # The row that did not fit counts as left out.
            rest = chain([row], rest)
            break
        kept.append(plain)
    described = [
        {"title": column.title, "kind": column.kind, "about": column.about, "words": list(known)}
        for column, known in zip(columns, words, strict=True)
    ]
    left_out = sum(1 for _ in rest)
    return DrawnTable({"noun": noun, "columns": described, "rows": kept, "left_out": left_out}, left_out)


def _plain(value: Any, column: Column, words: dict[str, int]) -> Any:
    if value is None:
        return None
    # Words that repeat, such as dtypes, are numbers in a list of words: a tenth of the bytes.
    if column.kind == "word":
        return words.setdefault(value, len(words))
    if isinstance(value, Histogram):
        return _levels(value)
    return _rounded(value) if isinstance(value, float) else value


def _rounded(value: float) -> Any:
    """Return a number with few digits, as an integer if it is one."""
    if not math.isfinite(value):
        # JSON has no infinity: the script reads it as a text.
        return None if math.isnan(value) else str(value)
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e5 else short


def _levels(found: Histogram) -> list[Any]:
    """Return a histogram as its range, scale, elements beyond the range, and one character for the height of a bar."""
    most = max(found.counts, default=0) or 1
    top = len(_LEVELS) - 1
    # Rounded up, so that a bin with one element is visible.
    heights = "".join(_LEVELS[math.ceil(count / most * top)] for count in found.counts)
    return [_rounded(found.low), _rounded(found.high), int(found.log), found.beyond, heights]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A heat map for the template: its size, its cells as (x, y, opacity, text), labels as (position, text)."""

    width: float
    height: float
    cell: tuple[float, float]
    cells: Sequence[tuple[float, float, float, str]]
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    left: float
    right: float


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    text: Callable[[int, int, float], str],
    *,
    log: bool = False,
) -> HeatMap:
    """Return a heat map of values of at least 0, with larger values darker; None is left blank.

    ``text`` returns what a pointer shows for a row, a column and a value. With ``log`` the darkness follows
    the logarithm.
    """
    left = 12 + _LETTER_WIDTH * min(_MOST_LETTERS, max(map(len, rows), default=0))
    wide = min(_WIDEST, (_WIDTH - left) / max(len(columns), 1))
    # Infinite differences are drawn like the largest finite one.
    positive = [value for row in values for value in row if value and math.isfinite(value)] or [1.0]
    low, high = min(positive), max(positive)
    cells = [
        (left + j * wide, _TOP + i * _ROW_HEIGHT, amount_opacity(value, low, high, log=log), text(i, j, value))
        for i, row in enumerate(values)
        for j, value in enumerate(row)
        if value is not None
    ]
    # Labels of columns must not overlap.
    every = math.ceil(_LEAST_GAP / wide)
    return HeatMap(
        _WIDTH,
        _TOP + _ROW_HEIGHT * len(rows) + _BOTTOM,
        (wide, _ROW_HEIGHT),
        cells,
        [(_TOP + _ROW_HEIGHT * (i + 0.72), shortened(row)) for i, row in enumerate(rows)],
        [(left + (j + 0.5) * wide, column) for j, column in enumerate(columns) if j % every == 0],
        left,
        left + wide * len(columns),
    )


def shortened(text: str, most: int = _MOST_LETTERS) -> str:
    """Return a text of at most ``most`` characters, without its middle."""
    # The end of a name says more than its beginning.
    first = most // 3
    return text if len(text) <= most else f"{text[:first]}…{text[first + 1 - most :]}"


def data_json(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))
    # No text in it, such as the name of a tensor, can end the script element.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def title_of(path: str) -> str:
    """Return the name of a checkpoint or run; ``run: step-000100`` for a step."""
    place = PurePath(os.path.abspath(path))
    # A step alone says little.
    run = place.parent if _STEP.fullmatch(place.name) else place
    name = (run.parent if run.name == CHECKPOINTS else run).name or path
    return name if run is place else f"{name}: {place.name}"


def show_page(template: str, title: str, table: DrawnTable | None, **content: Any) -> str:
    """Return a page, with a table that its script draws or without one; raises as `render_page`."""
    data = data_json({} if table is None else {"tensors": table.json})
    return render_page(template, SHOW, title=title, data=data, version=__version__, **content)


def write_page(page: Path, text: str) -> int:
    """Write a page and return its bytes; StoreError if the operating system refuses."""
    # Names of files need not be valid text.
    content = text.encode("utf-8", "backslashreplace")
    # Complete or not at all: a browser may have the old page open.
    replace_file(page, content)
    return len(content)
