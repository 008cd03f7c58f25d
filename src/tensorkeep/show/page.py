"""The pages of ``tensorkeep show``: the tables that their script draws, as JSON of a bounded size; writing a page."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from tensorkeep.report.rendering import PageKind, render_page
from tensorkeep.runs.address import CHECKPOINTS
from tensorkeep.show.tensors.histogram import Histogram
from tensorkeep.storage.commit import replace_file
from tensorkeep.units import counted, format_bytes
from tensorkeep.version import __version__

SHOW = PageKind("show", "page of tensorkeep show", "show", package="tensorkeep.show")

TABLE_BYTES = 4_000_000
"""The most bytes of one table in a page: with it, a page has less than 5 MB."""

_LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = 5

_STEP = re.compile(r"step-\d{6,}")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, the kind of its values, and an explanation.

    The kind is ``"name"``, ``"text"``, ``"word"`` (a text that many rows share), ``"count"``, ``"bytes"``,
    ``"number"``, ``"percent"``, ``"ratio"`` or ``"histogram"``.
    """

    title: str
    kind: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table as JSON that the script of a page draws: with search, sorting, pages and details of a row.

    ``left_out`` of its rows, the last ones, are not in it, because the page would be too large.
    """

    json: dict[str, Any]
    left_out: int


def drawn_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, noun: str, limit: int = TABLE_BYTES
) -> DrawnTable:
    """Return a table with as many of the rows, the first ones, as take so many bytes."""
    words: list[dict[str, int]] = [{} for _ in columns]
    kept: list[list[Any]] = []
    size = 0
    rest: Iterator[Sequence[Any]] = iter(rows)
    for row in rest:
        plain = [_plain(value, column, known) for value, column, known in zip(row, columns, words, strict=True)]
        size += len(json.dumps(plain, separators=(",", ":"))) + 1
        if size > limit:
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
    if column.kind == "word":
        return words.setdefault(value, len(words))
    if isinstance(value, Histogram):
        return _levels(value)
    if isinstance(value, float):
        return _rounded(value)
    return value


def _rounded(value: float) -> Any:
    """Return a number with few digits, as an integer if it is one; JSON has no infinities, which become texts."""
    if not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e5 else short


def _levels(found: Histogram) -> list[Any]:
    """Return a histogram as its range, scale, elements beyond, and a character for the height of each bar."""
    most = max(found.counts, default=0) or 1
    top = len(_LEVELS) - 1
    heights = "".join(_LEVELS[math.ceil(count / most * top)] for count in found.counts)
    return [_rounded(found.low), _rounded(found.high), int(found.log), found.beyond, heights]


def data_json(data: dict[str, Any]) -> str:
    """Return data as JSON for a script element: no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def left_out_text(table: DrawnTable, listed: str, nbytes: int | None = None) -> str:
    """Return which rows a table lists, ``listed``, and how many it leaves out; an empty text if it has all."""
    if not table.left_out:
        return ""
    rows, size = len(table.json["rows"]), "" if nbytes is None else f", {format_bytes(nbytes)} together,"
    total = counted(rows + table.left_out, table.json["noun"])
    others = f"The other {table.left_out:,}{size} are left out to keep the page small; --json has all."
    return f"Listed here: {rows:,} of {total}, {listed}. {others}"


def title_of(path: str) -> str:
    """Return the name of a checkpoint or run: ``run: step-000100`` for a step, which without its run says little."""
    place = PurePath(os.path.abspath(path))
    run = place.parent if _STEP.fullmatch(place.name) else place
    name = (run.parent if run.name == CHECKPOINTS else run).name or path
    return name if run is place else f"{name}: {place.name}"


def show_page(template: str, title: str, data: dict[str, Any], **content: Any) -> str:
    """Return a page with the data that its script draws; raises as `render_page`."""
    return render_page(template, SHOW, title=title, data=data_json(data), version=__version__, **content)


def write_page(page: Path, text: str) -> int:
    """Write a page and return its bytes; StoreError if the operating system refuses."""
    # Names of files need not be valid text.
    content = text.encode("utf-8", "backslashreplace")
    replace_file(page, content)
    return len(content)
