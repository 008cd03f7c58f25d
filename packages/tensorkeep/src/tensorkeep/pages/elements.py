"""What pages are made of: tables, bars and lists of facts; the command line prints the tables, too."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorkeep.units import format_bytes


@dataclass(frozen=True, slots=True)
class TableEntry:
    text: str
    order: float | None = None  # what the page sorts by; None sorts by the text, behind all numbers
    tone: str = ""  # classes of the page: ``"good"``, ``"bad"``, ``"faint"``, or the colour of a heat map
    code: bool = False  # whether it is set in a fixed-width font
    about: str = ""  # what a pointer over it shows


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table that the command line prints, the page makes sortable, and a file may hold."""

    title: str
    headings: tuple[str, ...]  # a leading ``>`` aligns the column to the right, ``=`` keeps it unwrapped
    rows: Sequence[tuple[TableEntry, ...]]
    note: str = ""  # a sentence below the table

    def texts(self) -> list[tuple[str, ...]]:
        return [tuple(entry.text for entry in row) for row in self.rows]


@dataclass(frozen=True, slots=True)
class ChartBar:
    """One bar; ``low`` and ``high`` are the ends of the range of the runs."""

    label: str
    value: float
    text: str
    # Whether the value is scaled from a smaller state.
    scaled: bool = False
    # ``"good"``, ``"bad"``, ``"base"`` or empty.
    tone: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    title: str
    bars: list[ChartBar]

    @property
    def full(self) -> float:
        # Longer bars, which were scaled, are cut off: they would make all others short.
        return max((max(bar.value, bar.high or 0.0) for bar in self.bars if not bar.scaled), default=1.0) or 1.0


def facts_of(environment: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for key, value in environment.items():
        label = key.replace("_", " ")
        if isinstance(value, dict):
            if key == "versions":
                # A version of null means that the package is missing.
                value = {name: version or "not installed" for name, version in value.items()}
            facts += [(f"{label}: {name}", text) for name, text in facts_of(value)]
        elif value is None or value == []:
            facts.append((label.removesuffix(" bytes"), "none"))
        elif isinstance(value, list):
            facts.append((label, json.dumps(value, ensure_ascii=False)))
        # Before numbers: a bool is an int.
        elif isinstance(value, bool):
            facts.append((label, "yes" if value else "no"))
        elif label.endswith(" bytes") and isinstance(value, int | float):
            facts.append((label.removesuffix(" bytes"), format_bytes(value)))
        else:
            facts.append((label, str(value)))
    return facts
