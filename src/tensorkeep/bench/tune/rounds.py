"""Interleaved rounds: every arm once in each round, in random order, so that a drift of the machine meets all alike.

A ratio is taken round by round, between two figures of one round, and its median is reported with the smallest and the
largest: machines drift from minute to minute by more than arms differ.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tensorkeep.bench.checkpoint.measure import visit
from tensorkeep.bench.checkpoint.subject import Subject
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.errors import TensorkeepError

Visit = Callable[[], Mapping[str, float]]
"""Measures one arm once: returns a figure for each measure that could be taken, or raises `NotRun`."""


class NotRun(Exception):
    """An arm cannot do what is measured; the reason is its text, and the arm is left out from then on."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One raw figure: seconds, or bytes, of one measure of one arm in one round (from 0)."""

    round: int
    arm: str
    measure: str
    value: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over the rounds of a ratio within each round, and its spread."""

    median: float
    low: float
    high: float


@dataclass(slots=True)
class Rounds:
    """What some rounds measured.

    Attributes
    ----------
    seed : int
        Of the random order.
    order : list of list of str
        The arms in the order in which each round visited them.
    samples : list of Sample
        Every figure, in the order in which it was taken.
    not_run : dict of str to str
        The arms that could not be measured, and why.
    """

    seed: int
    order: list[list[str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    def values(self, arm: str, measure: str) -> dict[int, float]:
        """Return the figures of one measure of one arm, by round."""
        return {s.round: s.value for s in self.samples if (s.arm, s.measure) == (arm, measure)}

    def median(self, arm: str, measure: str) -> float | None:
        """Return the median over the rounds; None if it was never measured."""
        values = self.values(arm, measure)
        return statistics.median(values.values()) if values else None

    def ratio(self, above: tuple[str, str], below: tuple[str, str]) -> Ratio | None:
        """Return one (arm, measure) over another: "how many times faster is ``below``", if they are seconds.

        Returns
        -------
        Ratio or None
            None if no round measured both.
        """
        top, bottom = self.values(*above), self.values(*below)
        ratios = [top[index] / bottom[index] for index in sorted(top.keys() & bottom.keys())]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def run_rounds(
    visits: Mapping[str, Visit],
    rounds: int,
    *,
    seed: int = 0,
    seconds: float = math.inf,
    on_visit: Callable[[int, str], None] | None = None,
) -> Rounds:
    """Visit every arm once per round, in an order drawn anew for each round.

    Parameters
    ----------
    visits : mapping of str to callable
        How each arm is measured.
    rounds : int
    seed : int
        Of the order; the same seed gives the same order.
    seconds : float
        No round begins that would end later than this if it took as long as the one before; the first always does.
    on_visit : callable, optional
        Called with the visits done so far and the arm that is next.
    """
    draw = random.Random(seed)
    result = Rounds(seed)
    begin = last = time.perf_counter()
    for index in range(rounds):
        now = time.perf_counter()
        if index and now + (now - last) > begin + seconds:
            break
        last = now
        order = draw.sample(list(visits), len(visits))
        result.order.append(order)
        for place, arm in enumerate(order):
            if on_visit is not None:
                on_visit(index * len(visits) + place, arm)
            if arm not in result.not_run:
                _note(result, index, arm, visits[arm])
    return result


def _note(result: Rounds, index: int, arm: str, visit: Visit) -> None:
    try:
        figures = visit()
    except NotRun as reason:
        result.not_run[arm] = str(reason)
        result.samples = [sample for sample in result.samples if sample.arm != arm]
    else:
        result.samples.extend(Sample(index, arm, measure, value) for measure, value in figures.items())


def visitor(tool: Tool, name: str, subject: Subject, directory: Path) -> Visit:
    """Return what measures a tool once, in a fresh file each time, and removes it."""
    return partial(_visit, tool, name, subject, directory / f"state{tool.suffix}")


def _visit(tool: Tool, name: str, subject: Subject, path: Path) -> Mapping[str, float]:
    try:
        return visit(tool, name, subject, path).figures
    except (TensorkeepError, OSError, MemoryError):
        raise
    except Exception as error:
        # A peer that cannot hold this state says so in its own way.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotRun(f"{name} cannot hold this state: {reason}") from error
