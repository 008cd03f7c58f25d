"""Which steps to keep: rules that say of all steps which they want, and combinations of them.

A rule never deletes anything. What no rule wants is deleted by whoever asked, after its successor is durable, and never
the last step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.arguments import check_count
from holdfast.checkpoint.steps import Step
from holdfast.errors import UsageError
from holdfast.units import parse_seconds


class Keep(ABC):
    """A rule; ``first | second`` keeps what either of them wants."""

    @abstractmethod
    def wanted(self, steps: Sequence[Step]) -> set[int]:
        """Return the numbers of the steps to keep.

        Parameters
        ----------
        steps : sequence of Step
            All that are whole, by number.
        """

    def __or__(self, other: Keep) -> Keep:
        return KeepAny((self, other))


@dataclass(frozen=True)
class KeepAll(Keep):
    """Keeps every step."""

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps}


@dataclass(frozen=True)
class KeepAny(Keep):
    """Keeps what any of several rules wants."""

    rules: tuple[Keep, ...]

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return set().union(*(rule.wanted(steps) for rule in self.rules))


@dataclass(frozen=True)
class KeepLast(Keep):
    """Keeps the last ``count`` steps.

    Raises
    ------
    UsageError
        If the count is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        check_count("keep_last", self.count)

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps[-self.count :]}


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Keeps the steps whose number is a multiple of ``interval``.

    Raises
    ------
    UsageError
        If the interval is below 1.
    """

    interval: int

    def __post_init__(self) -> None:
        check_count("keep_every", self.interval)

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps if step.number % self.interval == 0}


@dataclass(frozen=True)
class KeepBest(Keep):
    """Keeps the ``count`` best steps by a metric; a step without it, or with NaN, is not among them.

    Of steps that are equally good the later ones are kept.

    Parameters
    ----------
    count : int
    metric : str, optional
        Its name; may be left out where the steps have one metric only.
    mode : str
        ``"min"`` or ``"max"``.

    Raises
    ------
    UsageError
        If the count is below 1 or the mode is unknown; from `wanted`, if the metric was left out and is not clear.
    """

    count: int = 1
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        check_count("keep_best", self.count)
        if self.mode not in ("min", "max"):
            raise UsageError(f"mode is {self.mode!r}", remedy='give "min" or "max"')

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in self.ranked(steps)[: self.count]}

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that have the metric, best first."""
        name = self.metric if self.metric is not None else _only_metric(steps)
        sign = 1 if self.mode == "min" else -1
        rated = [step for step in steps if name is not None and not math.isnan(step.metrics.get(name, math.nan))]
        return sorted(rated, key=lambda step: (sign * step.metrics[name or ""], -step.number))


@dataclass(frozen=True)
class KeepThinned(Keep):
    """Keeps fewer steps the older they are, by the times of their saves.

    Parameters
    ----------
    rungs : tuple of (str or float, str or float)
        Pairs of an age and a distance: steps up to that age are kept at least that far apart, beginning with the
        newest rung. ``(("1h", 0), ("1d", "1h"), ("30d", "1d"))`` keeps all of the last hour, one an hour of the last
        day, one a day of the last month, and none beyond. Texts as ``"90s"``, ``"10min"``, ``"2h"``, ``"1d"``, or
        seconds.

    Raises
    ------
    UsageError
        If an age or a distance is negative, or the ages do not grow.

    Notes
    -----
    Ages are counted from the newest save, not from now, so that a run that was stopped for a month loses nothing when
    it goes on. A clock that went back makes later steps look older, never newer than the last one.
    """

    rungs: tuple[tuple[str | float, str | float], ...]

    def __post_init__(self) -> None:
        ages = [age for age, _ in self._seconds()]
        if ages != sorted(ages):
            raise UsageError("the ages of KeepThinned do not grow", remedy="give the youngest first")

    def _seconds(self) -> list[tuple[float, float]]:
        return [(parse_seconds(age), parse_seconds(distance)) for age, distance in self.rungs]

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        if not steps:
            return set()
        newest = max(step.saved_at for step in steps)
        kept: set[int] = {steps[-1].number}
        last: float | None = None
        # From the oldest on, so that a step which was kept once stays kept until it leaves its rung.
        for step in steps:
            distance = self._distance(newest - step.saved_at)
            if distance is not None and (last is None or not 0 <= step.saved_at - last < distance):
                kept.add(step.number)
                last = step.saved_at
        return kept

    def _distance(self, age: float) -> float | None:
        return next((distance for most, distance in self._seconds() if age <= most), None)


def keep_rule(
    keep_last: int | None, keep_every: int | None, keep_best: int | KeepBest | None, keep: Keep | None
) -> Keep:
    """Return the rule that several arguments make together; all steps are kept where none is given."""
    rules: list[Keep] = []
    if keep_last is not None:
        rules.append(KeepLast(keep_last))
    if keep_every is not None:
        rules.append(KeepEvery(keep_every))
    if keep_best is not None:
        rules.append(keep_best if isinstance(keep_best, KeepBest) else KeepBest(keep_best))
    if keep is not None:
        rules.append(keep)
    return KeepAny(tuple(rules)) if rules else KeepAll()


def to_delete(rule: Keep, steps: Sequence[Step]) -> list[Step]:
    """Return the steps that a rule does not want, but for the last one, which is never deleted."""
    wanted = rule.wanted(steps)
    return [step for step in steps[:-1] if step.number not in wanted]


def _only_metric(steps: Iterable[Step]) -> str | None:
    names = {name for step in steps for name in step.metrics}
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise UsageError(f"the steps have several metrics: {listed}", remedy="say which one is meant")
    return next(iter(names), None)
