"""Which steps to keep: rules that say of all steps which they want, and combinations of them.

A rule never deletes anything. What no rule wants is deleted by whoever asked, after its successor is durable, and never
the last step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensorkeep.checkpoint.arguments import check_count
from tensorkeep.checkpoint.manager.steps import Step
from tensorkeep.errors import UsageError
from tensorkeep.units import parse_seconds


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

    def check(self, metrics: Mapping[str, object]) -> None:
        """Refuse a step with these metrics, before it is saved, if the rule could not judge it.

        Raises
        ------
        UsageError
            If so.
        """
        return

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

    def check(self, metrics: Mapping[str, object]) -> None:
        for rule in self.rules:
            rule.check(metrics)


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

    def check(self, metrics: Mapping[str, object]) -> None:
        if self.metric is None:
            _only(metrics)

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that have the metric, best first."""
        name = self.metric if self.metric is not None else _only({name for step in steps for name in step.metrics})
        sign = 1 if self.mode == "min" else -1
        rated = [step for step in steps if name is not None and not math.isnan(step.metrics.get(name, math.nan))]
        return sorted(rated, key=lambda step: (sign * step.metrics[name or ""], -step.number))


@dataclass(frozen=True)
class KeepThinned(Keep):
    """Keeps fewer steps the older they are, by the time that the run took since.

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
    Ages are counted in the run's own time, see `run_times`: a run that was stopped for a month loses nothing when it
    goes on, and neither does one whose clock was set ahead or back.
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
        times = run_times(steps)
        kept: set[int] = {steps[-1].number}
        last: float | None = None
        # From the oldest on, so that a step which was kept once stays kept until it leaves its rung.
        for step, time in zip(steps, times, strict=True):
            distance = self._distance(times[-1] - time)
            if distance is not None and (last is None or time - last >= distance):
                kept.add(step.number)
                last = time
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


def to_delete(rule: Keep, steps: Sequence[Step], protect: Collection[int] = ()) -> list[Step]:
    """Return the steps that a rule does not want, but for the last one, which is never deleted.

    Parameters
    ----------
    rule : Keep
    steps : sequence of Step
        All that are whole, by number.
    protect : collection of int
        Steps that were saved just now. They are never deleted either, and the rule is also asked for the steps up to
        each of them: a run that went back from step 1000 to step 500 has its last two, 600 and 700, beside the last
        two of all, 900 and 1000, until it overtakes those.
    """
    wanted = rule.wanted(steps).union(protect)
    for number in protect:
        wanted |= rule.wanted([step for step in steps if step.number <= number])
    return [step for step in steps[:-1] if step.number not in wanted]


def run_times(steps: Sequence[Step]) -> list[float]:
    """Return when each step was saved, in seconds of the run's own time since the first one.

    Between two saves the time passes that their clocks say, unless it is negative or more than twice the usual time of
    so many training steps, which is the median over all neighbours. Then the clock was set, or the run was stopped, and
    the usual time is taken. So a wrong clock never makes a step much older than it is; where a run slows down for good,
    steps seem younger until there are more slow neighbours than fast ones.

    Parameters
    ----------
    steps : sequence of Step
        By number.
    """
    gaps = [(after.saved_at - before.saved_at, after.number - before.number) for before, after in pairwise(steps)]
    paces = sorted(seconds / count for seconds, count in gaps if seconds > 0)
    # One alone may be the wrong one; of an even number the lower, because too young is the safe side.
    pace = paces[(len(paces) - 1) // 2] if len(paces) > 1 else 0.0
    times = [0.0]
    for seconds, count in gaps:
        usual = pace * count
        times.append(times[-1] + (seconds if 0 <= seconds <= 2 * usual else usual))
    return times


def _only(metrics: Iterable[str]) -> str | None:
    """Return the only one of some metrics, None of none."""
    names = sorted(metrics)
    if len(names) > 1:
        raise UsageError(f"the steps have several metrics: {', '.join(names)}", remedy="say which one is meant")
    return next(iter(names), None)
