"""The cells of a results document as figures by arm, measure and block: what every computation starts from.

A figure counts only if its cell is ``ok``. Two figures are compared within one block and per raw byte, so that an arm
that worked on a smaller subject compares fairly. A rate (``better: higher``) is per something already, and stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorkeep.bench.analysis.statistics import Comparison, compare
from tensorkeep.errors import UsageError

OK = "ok"
_MOST_FACTORS = 64
_REMEDY = "give a results file that `tensorkeep bench` wrote; docs/reference/results.md describes it"


@dataclass(frozen=True, slots=True)
class Measure:
    """What was measured: its name in the figures, its label, its unit, and which direction is better."""

    name: str
    label: str
    unit: str
    higher_is_better: bool
    primary: bool


@dataclass(frozen=True, slots=True)
class Arm:
    """What was compared.

    Attributes
    ----------
    name : str
    role : str
        ``"baseline"``, ``"placebo"`` or ``"arm"``.
    settings : mapping
        The workload's own.
    places : tuple of mapping
        Where it stands in the design: its own place first, then those that it also fills.
    """

    name: str
    role: str
    settings: Mapping[str, Any]
    places: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One process that was run or was to be run; ``amount`` in raw bytes, figures in their measure's unit."""

    arm: str
    block: int
    status: str
    reason: str | None
    amount: float | None
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Samples:
    """Measures, arms and cells of one results document, in its order."""

    measures: tuple[Measure, ...]
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    experiment: Mapping[str, Any] = field(default_factory=dict)
    _by_arm: dict[str, list[Cell]] = field(default_factory=dict, repr=False)

    @property
    def baseline(self) -> str | None:
        """The baseline's name; None where the experiment has none."""
        return next((arm.name for arm in self.arms if arm.role == "baseline"), None)

    @property
    def blocks(self) -> int:
        """How many blocks the document has cells of."""
        return len({cell.block for cell in self.cells})

    def cells_of(self, arm: str) -> list[Cell]:
        """Return an arm's cells in the order of the blocks."""
        if not self._by_arm:
            for cell in sorted(self.cells, key=lambda cell: cell.block):
                self._by_arm.setdefault(cell.arm, []).append(cell)
        return self._by_arm.get(arm, [])

    def raw(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the figures of one measure of one arm, by block."""
        return {
            cell.block: cell.figures[measure.name]
            for cell in self.cells_of(arm)
            if cell.status == OK and measure.name in cell.figures
        }

    def per_byte(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return the figures divided by the raw bytes worked on, by block; rates as they are."""
        return {
            cell.block: cell.figures[measure.name] / (1.0 if measure.higher_is_better else cell.amount or 1.0)
            for cell in self.cells_of(arm)
            if cell.status == OK and measure.name in cell.figures and (cell.amount or measure.higher_is_better)
        }

    def logs(self, arm: str, measure: Measure) -> dict[int, float]:
        """Return how good each block's figure is, on a log scale: larger is better, whatever the direction.

        Figures that are not above zero have no logarithm and are left out. An arm that gave back something else than
        was saved, even once, has none: how fast it is says nothing.
        """
        if self.failed_gate(arm):
            return {}
        sign = 1 if measure.higher_is_better else -1
        return {block: sign * math.log(x) for block, x in self.per_byte(arm, measure).items() if x > 0}

    def log_gains(self, arm: str, over: str, measure: Measure) -> list[float]:
        """Return the log of how many times better an arm is than another, for each block that has both."""
        better, worse = self.logs(arm, measure), self.logs(over, measure)
        return [better[block] - worse[block] for block in sorted(better.keys() & worse.keys())]

    def compare(self, arm: str, over: str, measure: Measure) -> Comparison | None:
        """Return how many times better an arm is than another; None if no block has both."""
        gains = self.log_gains(arm, over, measure)
        return compare(gains) if gains else None

    def standing(self, **place: object) -> Arm | None:
        """Return the arm that stands at a place of the design, such as ``kind="alone", change="zstd"``."""
        for arm in self.arms:
            if any(all(at.get(key) == value for key, value in place.items()) for at in arm.places):
                return arm
        return None

    def failures(self, arm: str) -> list[Cell]:
        """Return an arm's cells that gave no figures though they were reached, or can never be."""
        return [cell for cell in self.cells_of(arm) if cell.status not in (OK, "planned")]

    def failed_gate(self, arm: str) -> bool:
        """Return whether what an arm gave back was, even once, not what was saved."""
        return any(cell.status == "gate" for cell in self.cells_of(arm))

    def measure(self, name: str) -> Measure | None:
        """Return the measure of this name."""
        return next((measure for measure in self.measures if measure.name == name), None)


def read_samples(results: Mapping[str, Any]) -> Samples:
    """Return the samples of a results document.

    Raises
    ------
    UsageError
        If the document lacks ``measures``, ``arms`` or ``cells``, or an entry lacks what is computed from.
    """
    try:
        return Samples(
            tuple(_measure(entry) for entry in results["measures"]),
            _different(tuple(_arm(entry) for entry in results["arms"])),
            tuple(_cell(entry) for entry in results["cells"]),
            _experiment(results.get("experiment") or {}),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"this is not a results document: {what}", remedy=_REMEDY) from error


def _measure(entry: Mapping[str, Any]) -> Measure:
    name = str(entry["name"])
    return Measure(
        name,
        str(entry.get("label") or name),
        str(entry.get("unit") or ""),
        entry.get("better") == "higher",
        bool(entry.get("primary")),
    )


def _arm(entry: Mapping[str, Any]) -> Arm:
    place = entry.get("place") or {"kind": "arm"}
    return Arm(
        str(entry["name"]),
        str(entry.get("role") or "arm"),
        dict(entry.get("settings") or {}),
        tuple(_place(at) for at in (place, *(place.get("also") or ()))),
    )


def _place(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **entry,
        "index": int(entry.get("index") or 0),
        "changes": [str(change) for change in entry.get("changes") or ()],
        "levels": dict(entry.get("levels") or {}),
    }


def _different(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise ValueError(f"two arms are called {arm.name!r}")
        seen.add(arm.name)
    return arms


def _experiment(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment with those parts that are computed with as they have to be."""
    factors = {str(name): list(levels) for name, levels in (entry.get("factors") or {}).items()}
    if len(factors) > _MOST_FACTORS:
        raise ValueError(f"{len(factors)} factors are more than any design has")
    return {
        **entry,
        "factors": factors,
        "aliases": [[[str(name) for name in effect] for effect in group] for group in entry.get("aliases") or ()],
        "omitted": [
            {"place": dict(left_out.get("place") or {}), "reason": str(left_out.get("reason"))}
            for left_out in entry.get("omitted") or ()
        ],
    }


def _cell(entry: Mapping[str, Any]) -> Cell:
    reason = entry.get("reason")
    return Cell(
        str(entry["arm"]),
        int(entry["block"]),
        str(entry["status"]),
        None if reason is None else str(reason),
        _finite(entry.get("amount")) or None,
        _figures(entry.get("figures") or {}),
    )


def _figures(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, given in entry.items() if (value := _finite(given)) is not None}


def _finite(value: object) -> float | None:
    """Return a number that can be computed with, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
