"""Which steps to keep: rules, and combinations of rules."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensorkeep.errors import UsageError
from tensorkeep.runs.steps import Step, checked_mode, metric_names, mode_of, only_metric, ranked
from tensorkeep.units import check_count, parse_seconds


class Keep(ABC):
    """A rule that chooses the steps to keep; ``first | second`` keeps a step if either rule keeps it.

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
    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {step.number for step in steps}


@dataclass(frozen=True)
class KeepAny(Keep):
    rules: tuple[Keep, ...]

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return set().union(*(rule.wanted(steps) for rule in self.rules))

    def check(self, metrics: Mapping[str, object]) -> None:
        for rule in self.rules:
            rule.check(metrics)


@dataclass(frozen=True)
class KeepLast(Keep):
    """Keeps the last ``count`` steps; UsageError if the count is below 1.

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
        # The steps come in the order of their numbers, not of their times.
        return {step.number for step in steps[-self.count :]}


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Keeps the steps with a number that is a multiple of ``interval``; UsageError if that is below 1.

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

    The ``mode`` says whether the smallest (``"min"``) or the largest (``"max"``) value is best. Without a mode, the
    name of the metric decides: ``loss``, ``perplexity``, ``error``, ``mse`` and others are best when small,
    ``accuracy``, ``f1``, ``bleu``, ``auc``, ``reward`` and others when large, also within longer names such as
    ``val_loss`` or ``eval/top1_accuracy``. The metric may be omitted if the steps have only one.

    A step without the metric, or with NaN, is not among the best; another rule may keep it. All steps are kept as long
    as no step has metrics, or all values are NaN.

    Raises
    ------
    UsageError
        If the count is below 1, or the mode is unknown, or is neither given nor known from the name. `wanted` raises
        if no step has the metric although some have others, or if the steps have several metrics and none is named.

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
        # Nothing to rank keeps all steps: a misspelt metric must not delete the run.
        return {step.number for step in (self.ranked(steps)[: self.count] or steps)}

    def check(self, metrics: Mapping[str, object]) -> None:
        # Before the step is saved: an error after it would leave old steps undeleted, one save after another.
        metric = self.metric or only_metric(metrics.keys())
        if metric is not None:
            mode_of(metric, self.mode)

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        metric = self.metric or only_metric(metric_names(steps))
        return [] if metric is None else ranked(steps, metric, self.mode)


@dataclass(frozen=True)
class KeepThinned(Keep):
    """Keeps older steps further apart.

    ``intervals`` are pairs of an age and a distance, the youngest first: steps up to this age are kept at least this
    far apart. ``(("1h", 0), ("1d", "1h"), ("30d", "1d"))`` keeps all steps of the last hour, one an hour of the last
    day, one a day of the last month, and no older steps. Durations are texts such as ``"90s"``, ``"10min"``, ``"2h"``,
    ``"1d"``, or seconds. Ages are measured in the run's own time, see `run_times`: a run that resumes after a month
    loses no step, and a wrong clock deletes no step.

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
        # The last step is kept even if no interval begins with age 0.
        kept: set[int] = {steps[-1].number}
        last: float | None = None
        # From the oldest to the newest: a step that is kept stays the first of its interval when new steps arrive, and
        # is kept until it leaves the interval.
        for step, time in zip(steps, times, strict=True):
            age = times[-1] - time
            distance = next((distance for most, distance in self._seconds() if age <= most), None)
            if distance is not None and (last is None or time - last >= distance):
                kept.add(step.number)
                last = time
        return kept


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which steps a `CheckpointManager` keeps: a step that any of the rules keeps; without rules, all steps.

    Parameters
    ----------
    keep_last, keep_every : int, optional
        See `KeepLast` and `KeepEvery`.
    keep_best : int or KeepBest, optional
        Keep the N best steps by ``metric``; all steps until one has metrics.
    metric, mode : str, optional
        Of ``keep_best`` and of `CheckpointManager.best`; see `KeepBest`.
    keep : Keep, optional
        Any other rule.

    Raises
    ------
    UsageError
        If a count is below 1 or the mode is unknown, or if ``keep_best`` is a rule that has its own metric.

    Examples
    --------
    >>> from tensorkeep import KeepThinned, Retention
    >>> retention = Retention(keep_last=3, keep_best=2, metric="accuracy", keep=KeepThinned((("1d", "1h"),)))
    >>> retention.best_rule
    KeepBest(count=2, metric='accuracy', mode=None)
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | KeepBest | None = None
    metric: str | None = None
    mode: str | None = None
    keep: Keep | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep_best, KeepBest) and (self.metric is not None or self.mode is not None):
            raise UsageError("metric and mode are given, and keep_best is a rule", remedy="give them to KeepBest")
        _ = self.best_rule, self.rule  # both raise for wrong arguments

    @property
    def best_rule(self) -> KeepBest:
        """The rule of the best steps, also if the retention does not keep any."""
        if isinstance(self.keep_best, KeepBest):
            return self.keep_best
        return KeepBest(1 if self.keep_best is None else self.keep_best, self.metric, self.mode)

    @property
    def rule(self) -> Keep:
        rules = [
            None if self.keep_last is None else KeepLast(self.keep_last),
            None if self.keep_every is None else KeepEvery(self.keep_every),
            None if self.keep_best is None else self.best_rule,
            self.keep,
        ]
        given = tuple(rule for rule in rules if rule is not None)
        return KeepAny(given) if given else KeepAll()


# A rule only chooses. Steps are deleted after a later step is durable.
def unwanted(rule: Keep, steps: Sequence[Step], protect: Collection[int] = ()) -> list[Step]:
    """Return the steps that a rule does not keep, without the last step and the protected ones, which are new."""
    # The last step is the one to resume from, whatever a rule chooses.
    if len(steps) < 2:
        return []
    kept = rule.wanted(steps).union(protect)
    # A run may return from step 1000 to 500, and save steps below old ones. The rule also applies to the steps up to
    # the new one: `KeepLast(2)` keeps 600 and 700 beside 900 and 1000, until the run overtakes those.
    for number in protect:
        kept |= rule.wanted([step for step in steps if step.number <= number])
    return [step for step in steps[:-1] if step.number not in kept]


def run_times(steps: Sequence[Step]) -> list[float]:
    """Return when each step was saved, in seconds of the run's own time since the first step."""
    gaps = [(after.saved_at - before.saved_at, after.number - before.number) for before, after in pairwise(steps)]
    paces = sorted(seconds / count for seconds, count in gaps if seconds > 0)
    # One pair is not enough to detect a clock change. The lower median makes steps younger, which rather keeps them.
    pace = paces[(len(paces) - 1) // 2] if len(paces) > 1 else 0.0
    # If the difference of two clocks is negative, or more than twice the usual time, the clock was changed or the run
    # was stopped: the usual time is used instead. If a run becomes slower, steps seem younger until the slow pairs are
    # in the majority.
    times = [0.0]
    for seconds, count in gaps:
        usual = pace * count
        times.append(times[-1] + (seconds if 0 <= seconds <= 2 * usual else usual))
    return times
