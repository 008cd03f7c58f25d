"""Student's t distribution, central and noncentral: all the probability theory that the statistics need.

Own code, so that measuring needs no scipy; the tests hold every function here against scipy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

_TINY = 1e-300
_EPSILON = 1e-16
_MOST_TERMS = 100_000
_NODES = 40


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by Lentz's continued fraction.

    Parameters
    ----------
    a, b : float
        Positive.
    x : float
        From 0 to 1.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        # The fraction converges fast on the other side only.
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            result *= c * d
        if abs(c * d - 1) < _EPSILON:
            break
    return result


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def t_two_sided(t: float, df: float) -> float:
    """Return the probability that Student's t with ``df`` degrees of freedom is at least ``abs(t)`` away from 0."""
    if math.isinf(t):
        return 0.0
    square = t * t
    if square > 4:
        return incomplete_beta(df / 2, 0.5, df / (df + square))
    # Near 0, df / (df + t * t) is too close to 1 to hold t; far from it, 1 - p is too close to 1 to hold p.
    return 1 - incomplete_beta(0.5, df / 2, square / (df + square))


@lru_cache(maxsize=4096)
def t_critical(df: float, alpha: float) -> float:
    """Return the t that Student's t exceeds, on either side, with probability ``alpha``: 2.776 for 4 and 0.05."""
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > alpha:
        low, high = high, high * 2
    return _bisect(lambda t: t_two_sided(t, df) < alpha, low, high)


def power(shift: float, df: float, alpha: float) -> float:
    """Return how likely a two-sided t-test at level ``alpha`` finds a true effect.

    Parameters
    ----------
    shift : float
        The effect in standard errors: the noncentrality of t.
    df : float
        Degrees of freedom.
    """
    critical = t_critical(df, alpha)
    return 1 - _noncentral_cdf(critical, df, shift) + _noncentral_cdf(-critical, df, shift)


@lru_cache(maxsize=4096)
def shift_for_power(df: float, alpha: float, wanted: float = 0.8) -> float:
    """Return the smallest effect, in standard errors, that a two-sided t-test finds with this probability."""
    high = 1.0
    while power(high, df, alpha) < wanted:
        high *= 2
    return _bisect(lambda shift: power(shift, df, alpha) >= wanted, 0.0, high)


def _noncentral_cdf(t: float, df: float, shift: float) -> float:
    """P(T <= t), where T = (Z + shift) / W: the normal probability of Z <= t W - shift, averaged over W."""
    centre, reach = shift / t, 9 / abs(t)
    spread = 10 / math.sqrt(2 * df)
    start, stop = max(0.0, 1 - spread), 1 + spread
    # The normal probability turns from 0 to 1 around W = shift / t, which may be a narrow place.
    cuts = sorted({start, stop, *(min(max(c, start), stop) for c in (centre - reach, centre, centre + reach, 1.0))})
    total = 0.0
    for a, b in itertools.pairwise(cuts):
        half, middle = (b - a) / 2, (a + b) / 2
        for node, weight in _quadrature():
            w = middle + half * node
            total += half * weight * _density_of_root(w, df) * _normal_cdf(t * w - shift)
    return min(max(total, 0.0), 1.0)


@lru_cache(maxsize=1)
def _quadrature() -> list[tuple[float, float]]:
    """Return Gauss and Legendre's nodes between -1 and 1, and their weights."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return list(zip(nodes.tolist(), weights.tolist(), strict=True))


def _density_of_root(w: float, df: float) -> float:
    """Return the density of W = sqrt(chi square / df)."""
    half = df / 2
    return 2 * math.exp(half * math.log(half) - math.lgamma(half) + (df - 1) * math.log(w) - half * w * w)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition begins to hold, between a place where it does not and one where it does."""
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return (low + high) / 2
