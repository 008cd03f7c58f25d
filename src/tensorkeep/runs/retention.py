"""Which steps to keep: rules that choose among all steps, and combinations of them.

A rule never deletes anything. The manager deletes what no rule keeps, after a later step is durable; the last step is
never deleted.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensorkeep.errors import UsageError
from tensorkeep.runs.metrics import (
    checked_mode,
    metric_names,
    mode_of,
    only_metric,
    ranked,
    usual_metric,
)
from tensorkeep.runs.steps import Step
from tensorkeep.units import check_count, parse_seconds


class Keep(ABC):
    """A rule for which steps to keep; ``first | second`` keeps what either of them keeps.

    A rule of your own implements `wanted`.

    Examples
    --------
    >>> from tensorkeep import Keep, KeepBest, KeepLast
    >>> class KeepPrimes(Keep):
    ...     def wanted(self, steps):
    ...         return {step.number for step in steps if all(step.number % n for n in range(2, step.number))}
    >>> rule = KeepPrimes() | KeepLast(2) | KeepBest(1, "loss")
    """

    @abstractmethod
    def wanted(self, steps: Sequence[Step]) -> set[int]:
        """Return the numbers of the steps to keep, given all complete steps by number."""

    def check(self, metrics: Mapping[str, object]) -> None:
        """Check the metrics of a step before it is saved; UsageError if the rule needs other ones."""
        return

    def __or__(self, other: "Keep") -> "Keep":
        return KeepAny((self, other))


@dataclass(frozen=True)
class KeepAll(Keep):
    """Keeps every step."""

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps}


@dataclass(frozen=True)
class KeepAny(Keep):
    """Keeps what any of several rules keeps."""

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

    Examples
    --------
    >>> from tensorkeep import KeepLast
    >>> KeepLast(2)
    KeepLast(count=2)
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

    Examples
    --------
    >>> from tensorkeep import KeepEvery, KeepLast
    >>> rule = KeepEvery(1000) | KeepLast(2)
    """

    interval: int

    def __post_init__(self) -> None:
        check_count("keep_every", self.interval)

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps if step.number % self.interval == 0}


@dataclass(frozen=True)
class KeepBest(Keep):
    """Keeps the ``count`` best steps by a metric; of equally good steps the later ones.

    Whether the smallest or the largest values are best is the ``mode``, or else known from the name of the metric:
    ``loss``, ``perplexity``, ``error``, ``mse`` and others are best when small, ``accuracy``, ``f1``, ``bleu``,
    ``auc``, ``reward`` and others when large, also within longer names such as ``val_loss`` or ``eval/top1_accuracy``.
    The name of the metric may be omitted if the steps have only one.

    A step without the metric, or with NaN, is not among the best; another rule may keep it. As long as there is nothing
    to compare, since no step has metrics or all values are NaN, all steps are kept.

    Raises
    ------
    UsageError
        If the count is below 1 or the mode is unknown, or is neither given nor known from the name. From `wanted`, if
        no step has the metric although some have others, or they have several metrics and none is named.

    Examples
    --------
    >>> from tensorkeep import KeepBest
    >>> KeepBest(3, "accuracy")
    KeepBest(count=3, metric='accuracy', mode=None)
    >>> KeepBest(3, "score", mode="max")
    KeepBest(count=3, metric='score', mode='max')
    """

    count: int = 1
    metric: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        check_count("keep_best", self.count)
        checked_mode(self.mode)
        if self.metric is not None:
            mode_of(self.metric, self.mode)

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in (self.ranked(steps)[: self.count] or steps)}

    def check(self, metrics: Mapping[str, object]) -> None:
        metric = self.metric or only_metric(metrics.keys())
        if metric is not None:
            mode_of(metric, self.mode)

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that have the metric, best first; raise as `wanted`."""
        metric = self.metric or only_metric(metric_names(steps))
        return [] if metric is None else ranked(steps, metric, self.mode)


@dataclass(frozen=True)
class KeepThinned(Keep):
    """Keeps older steps further apart; age is the run's own time.

    Each of the ``intervals`` is a pair of an age and a distance, the youngest first: steps up to that age are kept at
    least that far apart. ``(("1h", 0), ("1d", "1h"), ("30d", "1d"))`` keeps all steps of the last hour, one an hour of
    the last day, one a day of the last month, and none beyond. Durations are texts such as ``"90s"``, ``"10min"``,
    ``"2h"``, ``"1d"``, or seconds. Ages are in the run's own time, see `run_times`: a run that was stopped for a month
    loses no step when it resumes, and neither does one whose clock was changed.

    Raises
    ------
    UsageError
        If an age or a distance is negative, or the ages are not in ascending order.

    Examples
    --------
    >>> from tensorkeep import KeepThinned
    >>> rule = KeepThinned((("1h", 0), ("1d", "1h")))
    """

    intervals: tuple[tuple[str | float, str | float], ...]

    def __post_init__(self) -> None:
        ages = [age for age, _ in self._seconds()]
        if ages != sorted(ages):
            raise UsageError("the ages of KeepThinned are not in ascending order", remedy="give the youngest first")

    def _seconds(self) -> list[tuple[float, float]]:
        return [(parse_seconds(age), parse_seconds(distance)) for age, distance in self.intervals]

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        if not steps:
            return set()
        times = run_times(steps)
        kept: set[int] = {steps[-1].number}
        last: float | None = None
        # From the oldest to the newest, so that a step that was kept once is kept until it leaves its interval.
        for step, time in zip(steps, times, strict=True):
            age = times[-1] - time
            distance = next((distance for most, distance in self._seconds() if age <= most), None)
            if distance is not None and (last is None or time - last >= distance):
                kept.add(step.number)
                last = time
        return kept


def best_rule(keep_best: int | KeepBest | None, metric: str | None, mode: str | None) -> KeepBest:
    """Return the rule of the best steps for the arguments of `CheckpointManager`, also if it shall not keep any."""
    if not isinstance(keep_best, KeepBest):
        return KeepBest(1 if keep_best is None else keep_best, metric, mode)
    if metric is not None or mode is not None:
        raise UsageError("metric and mode are given, and keep_best is a rule", remedy="give them to KeepBest")
    return keep_best


def keep_rule(keep_last: int | None, keep_every: int | None, keep_best: KeepBest | None, keep: Keep | None) -> Keep:
    """Return the rule for the arguments of `CheckpointManager`; all steps are kept if none is given."""
    arguments = [
        None if keep_last is None else KeepLast(keep_last),
        None if keep_every is None else KeepEvery(keep_every),
        keep_best,
        keep,
    ]
    rules = tuple(rule for rule in arguments if rule is not None)
    return KeepAny(rules) if rules else KeepAll()


def best_step(steps: Sequence[Step], metric: str | None = None, mode: str | None = None) -> Step | None:
    """Return the best step by a metric, or None if no step has metrics or all its values are NaN.

    Without a metric it is the only one that the steps have, or else their validation loss or their loss.

    Raises UsageError if no step has the metric although some have others, if several may be meant, or if the mode is
    neither given nor known from the name.
    """
    checked_mode(mode)
    metric = metric or usual_metric(metric_names(steps))
    return None if metric is None else next(iter(ranked(steps, metric, mode)), None)


def unwanted(rule: Keep, steps: Sequence[Step], protect: Collection[int] = ()) -> list[Step]:
    """Return the steps to delete: those that a rule does not keep, except for the last one.

    Steps that were just saved are protected. After a return to step 500, the rule is also applied to the steps up to
    the new one, so that new steps are kept although higher old ones exist: a run that returned from step 1000 keeps its
    last two, 600 and 700, beside the last two of all, 900 and 1000, until it overtakes those.
    """
    if len(steps) < 2:
        return []
    kept = rule.wanted(steps).union(protect)
    for number in protect:
        kept |= rule.wanted([step for step in steps if step.number <= number])
    return [step for step in steps[:-1] if step.number not in kept]


def run_times(steps: Sequence[Step]) -> list[float]:
    """Return when each step was saved, in seconds of the run's own time since the first one.

    The time between two saves is the difference of their clocks, unless that is negative or more than twice the usual
    time of so many training steps, the median over all pairs of neighbours. Then the clock was changed, or the run was
    stopped, and the usual time is used instead. So a wrong clock never makes a step much older than it is. If a run
    becomes slower, steps seem younger until the slow pairs are in the majority.
    """
    gaps = [(after.saved_at - before.saved_at, after.number - before.number) for before, after in pairwise(steps)]
    paces = sorted(seconds / count for seconds, count in gaps if seconds > 0)
    # One pair is not enough to detect a clock change. The lower median keeps a step rather than deletes it.
    pace = paces[(len(paces) - 1) // 2] if len(paces) > 1 else 0.0
    times = [0.0]
    for seconds, count in gaps:
        usual = pace * count
        times.append(times[-1] + (seconds if 0 <= seconds <= 2 * usual else usual))
    return times
