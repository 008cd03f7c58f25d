"""Statistics of ratios: interval, test, adjustment for many tests, smallest detectable gain."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tensorkeep.errors import import_extra

# All ratios are taken within a block, on a log scale: what slows a block down slows both sides of its ratio.
LEVEL = 0.05  # the significance level of tests; intervals have a confidence of 1 - LEVEL, which is 95%

_RESAMPLES = 1000  # each is used twice, see `_bootstrap`
_SEED = 20_240_229
_LARGEST_LOG = 690.0  # exp of more is infinite
_ROUNDING = 1e-12
_POWER = 0.8
_FEWEST_ARMS = 3


@dataclass(frozen=True, slots=True)
class Description:
    """Raw samples in a few numbers, in their own unit; ``std`` (n - 1) is None for one sample."""

    n: int
    mean: float
    std: float | None
    median: float
    low: float
    high: float


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times better one arm is than another; all but ``n`` and ``gain`` are None below 2 blocks."""

    n: int
    gain: float  # geometric mean of the blocks' ratios; above 1 is better
    low: float | None = None  # 95% interval
    high: float | None = None
    p: float | None = None  # p-value of the two-sided paired t-test on the log-ratios
    std: float | None = None  # standard deviation (n - 1) of the log-ratios, moderated by a `SharedVariance`
    borrowed: float = 0.0  # degrees of freedom of ``std`` that other arms add to n - 1


@dataclass(frozen=True, slots=True)
class SharedVariance:
    """An estimate of the variance of any arm from the variances of many, with ``df`` degrees of freedom."""

    variance: float
    df: float
    # The sum of the arms' own degrees of freedom, which no estimate of a variance can exceed.
    most: float

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> "SharedVariance | None":
        """Estimate it from several arms, by Smyth (2004), section 6.2; None unless three have samples that differ."""
        # The variances are scaled F variables, so their two parameters follow from mean and variance of their
        # logarithms. The arms' errors must be independent, so each arm needs a baseline that took turns with it.
        found = [(len(each) - 1, _std(np.asarray(each)) ** 2) for each in samples if len(each) > 1]
        # The log of a variance of 0 is infinite.
        known = [(df, variance) for df, variance in found if variance > 0]
        if len(known) < _FEWEST_ARMS:
            return None
        special = require_scipy()
        half, variances = np.array(known, dtype=np.float64).T * [[0.5], [1.0]]
        logs = np.log(variances) - special.psi(half) + np.log(half)
        excess = float(logs.var(ddof=1) - special.polygamma(1, half).mean())
        most = float(2 * half.sum())
        if excess <= 0:  # the variances differ no more than by chance
            return cls(float((half * variances).sum() / half.sum()), most, most)
        other = _inverse_trigamma(excess)
        return cls(math.exp(float(logs.mean() + special.psi(other)) - math.log(other)), min(2 * other, most), most)

    def moderate(self, std: float, df: float) -> tuple[float, float]:
        variance = (self.df * self.variance + df * std**2) / (self.df + df)
        # Never smaller, unlike in the paper: an arm that is noisier than the others would get too narrow an interval.
        # In simulations of arms twice as noisy as the others, 95% intervals of 3 blocks cover the truth in 89% of
        # cases, and in 82% with a smaller standard deviation; over all arms they cover it in 95 to 96%.
        return max(std, math.sqrt(variance)), max(df, min(self.df + df, self.most))


def require_scipy() -> Any:
    """Return ``scipy.special``; MissingExtraError if scipy is not installed."""
    # Student's t distribution, central and noncentral, is in ``scipy.special``. ``scipy.stats`` has more, but takes
    # seconds to import.
    return import_extra("scipy", "tensorkeep-bench", "the statistics need scipy").special


@lru_cache(maxsize=4096)
def t_critical(df: float, alpha: float) -> float:
    """Return the t that Student's t exceeds, on either side, with probability ``alpha``: 2.776 for 4 and 0.05."""
    return float(-require_scipy().stdtrit(df, alpha / 2))


@lru_cache(maxsize=4096)
def effect_for_power(df: float, alpha: float) -> float:
    """Return the smallest effect, in standard errors, that a two-sided t-test finds with probability 0.8."""
    # The noncentrality that makes t exceed its critical value with that probability. The probability that t falls below
    # the opposite critical value is negligible.
    return float(require_scipy().nctdtrinc(df, 1 - _POWER, t_critical(df, alpha)))


def describe(samples: Sequence[float]) -> Description:
    values = np.asarray(samples, dtype=np.float64)
    std = float(values.std(ddof=1)) if len(values) > 1 else None
    low, high = float(values.min()), float(values.max())
    # Sums are rounded; clamp the mean of equal samples to their range.
    mean = min(max(float(values.mean()), low), high)
    return Description(len(values), mean, std, float(np.median(values)), low, high)


def compare(log_ratios: Sequence[float], shared: SharedVariance | None = None) -> Comparison:
    """Return gain, interval and test of at least one block's log-ratio (natural; above 0 is better)."""
    # Sorted, so that neither sums nor resamples depend on the order of the blocks.
    values = np.sort(np.asarray(log_ratios, dtype=np.float64))
    # Equal figures may give a log-ratio of 1e-16 instead of 0.
    values[np.abs(values) < _ROUNDING] = 0.0
    n, mean = len(values), _mean(values)
    if n < 2:
        return Comparison(n, _exp(mean))
    std, df = _std(values), n - 1.0
    # Three blocks say little about the standard deviation of an arm: their interval is 2.2 times as wide as with a
    # known one. The other arms were measured on the same machine, and their standard deviations are evidence, too (the
    # moderated t-test; Smyth 2004, Linear models and empirical Bayes methods for assessing differential expression in
    # microarray experiments).
    if shared is None:
        low, high = interval(values)
    else:
        std, df = shared.moderate(std, df)
        reach = t_critical(df, LEVEL) * std / math.sqrt(n)
        low, high = mean - reach, mean + reach
    p = paired_p(mean, std, n, df)
    return Comparison(n, _exp(mean), _exp(low), _exp(high), p, std, df - (n - 1))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% interval of the mean of at least two values, sorted: the wider of Student's t and bootstrap."""
    n, mean = len(values), _mean(values)
    reach = t_critical(n - 1, LEVEL) * _std(values) / math.sqrt(n)
    # The wider, on each side, of Student's t and the percentile bootstrap (Efron and Tibshirani, 1993). For few blocks
    # the bootstrap alone is too narrow: in simulations with normal errors, its 95% intervals covered the truth in 50%
    # of cases at 2 blocks, 76% at 3, 78% at 4 and 83% at 5. Student's t covers 95% at any number of blocks; with many
    # blocks and skewed errors, the bootstrap widens the side that t leaves too narrow. With errors as skewed as an
    # exponential distribution, the interval covers 88 to 92%. The tests repeat these simulations.
    low, high = _bootstrap(values)
    return min(mean - reach, low), max(mean + reach, high)


def paired_p(mean: float, std: float, n: int, df: float) -> float:
    """Return the two-sided p-value of a mean of ``n`` differences; their ``std`` has ``df`` degrees of freedom."""
    # Without any spread, the statistic would be 0 / 0 or infinite.
    if std == 0:
        return float(mean == 0)
    return float(2 * require_scipy().stdtr(df, -abs(mean) * math.sqrt(n) / std))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for many tests by Holm's step-down method, in the order given."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # Never below the one before: an adjusted p-value must not reverse the order of the tests.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable_gain(std: float, n: int, tests: int = 1, borrowed: float = 0.0) -> float | None:
    """Return the smallest gain, at least 1, that ``n`` blocks show with probability 0.8; None if infinite."""
    # ``std`` has n - 1 + ``borrowed`` degrees of freedom. With several tests, Holm's strictest step sets the level.
    log_gain = effect_for_power(n - 1 + borrowed, LEVEL / max(tests, 1)) * std / math.sqrt(n)
    return math.exp(log_gain) if log_gain < _LARGEST_LOG else None


@lru_cache(maxsize=1024)
def blocks_needed(std: float, gain: float, tests: int = 1, borrowed: float = 0.0, most: int = 1000) -> int | None:
    """Return the blocks that show this gain, above or below 1, with probability 0.8; None if above ``most``."""
    wanted = math.exp(min(abs(math.log(gain)), _LARGEST_LOG))

    def enough(n: int) -> bool:
        found = detectable_gain(std, n, tests, borrowed)
        return found is not None and found <= wanted

    # The detectable gain falls with every block, so bisection finds the first number that is enough.
    found = 2 + bisect_left(range(2, most + 1), True, key=enough)
    return found if found <= most else None


def _bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    n = len(values)
    # A fixed seed: the same results file always has the same intervals.
    ranks = np.random.default_rng(_SEED).integers(0, n, size=(_RESAMPLES, n))
    # Every resample is used again with mirrored ranks, so that swapping the sides of the ratio mirrors the interval.
    means = [values[ranks].mean(axis=1), values[n - 1 - ranks].mean(axis=1)]
    low, high = np.quantile(np.concatenate(means), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def _inverse_trigamma(value: float) -> float:
    """Return the x > 0 with trigamma(x) = ``value`` > 0, by Newton's method (Smyth 2004)."""
    polygamma = require_scipy().polygamma
    x = 0.5 + 1 / value
    for _ in range(50):
        found = float(polygamma(1, x))
        step = found * (1 - found / value) / float(polygamma(2, x))
        x += step
        if -step < 1e-8 * x:
            break
    return x


def _mean(values: NDArray[np.float64]) -> float:
    # fsum rounds only once, at the end.
    return math.fsum(values) / len(values)


def _std(values: NDArray[np.float64]) -> float:
    std = float(values.std(ddof=1))
    # Equal values may differ by rounding; a tiny spread would make any difference significant.
    return std if std > _ROUNDING else 0.0


def _exp(log: float) -> float:
    # The interval of two very different blocks may overflow.
    return math.exp(min(max(log, -_LARGEST_LOG), _LARGEST_LOG))
