"""The bounds of settings that are numbers."""

from __future__ import annotations

import math

from tensorkeep.errors import UsageError


def check_bounds(
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise UsageError unless a number is finite and lies within its bounds."""
    bounds = {
        f"{least} or more": least is None or value >= least,
        f"above {above}": above is None or value > above,
        f"{most} or less": most is None or value <= most,
        f"below {below}": below is None or value < below,
    }
    wanted = " and ".join(text for text in bounds if "None" not in text)
    # An int has no infinity, and may be too large for a float.
    finite = isinstance(value, int) or math.isfinite(value)
    if not finite or not all(bounds.values()):
        raise UsageError(f"{name} is {value}", remedy=f"give a {'' if finite else 'finite '}number {wanted}".rstrip())
