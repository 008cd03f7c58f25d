"""The two scales of colour of all heat maps: one for gains, one for amounts.

Gains have steps on both sides of 1 with the same limits, so that twice as good and half as good have equal strength,
and every map has the same steps, so that a colour means the same everywhere. Amounts have one colour, stronger for
larger ones, from the least to the largest amount of their map.
"""

import math

_LIMITS = (1.25, 2.0, 4.0)
EVEN = "even"

GAIN_LEGEND = (
    ("worse-4", "up to 0.25x"),
    ("worse-3", "up to 0.5x"),
    ("worse-2", "up to 0.8x"),
    ("worse-1", "below 1x"),
    (EVEN, "no difference shown"),
    ("better-1", "above 1x"),
    ("better-2", "from 1.25x"),
    ("better-3", "from 2x"),
    ("better-4", "from 4x"),
)
"""The name of each step, which is that of its colour, and a word for it."""

_FAINTEST = 0.06


def gain_colour(gain: float | None) -> str:
    """Return the name of the colour of a gain; that of `EVEN` for 1, and for None: no difference is shown."""
    if gain is None or gain <= 0 or gain == 1:
        return EVEN
    size = max(gain, 1 / gain) * (1 + 1e-9)
    return f"{'better' if gain > 1 else 'worse'}-{1 + sum(size >= limit for limit in _LIMITS)}"


def amount_opacity(value: float, low: float, high: float, *, log: bool) -> float:
    """Return the strength of an amount from 0, for none, to 1, for the largest.

    With ``log`` it follows the logarithm from the least positive amount on, else the amount itself.
    """
    if value <= 0:
        return 0.0
    if log:
        part = math.log(min(value, high) / low) / math.log(high / low) if high > low else 1.0
    else:
        part = min(value, high) / high
    return round(_FAINTEST + (1 - _FAINTEST) * min(1.0, max(0.0, part)), 3)
