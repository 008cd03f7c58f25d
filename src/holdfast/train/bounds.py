"""The bounds of settings that are numbers."""

from __future__ import annotations

from holdfast.errors import UsageError


def check_bounds(
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise UsageError unless a number lies within its bounds."""
    bounds = {
        f"{least} or more": least is None or value >= least,
        f"above {above}": above is None or value > above,
        f"{most} or less": most is None or value <= most,
        f"below {below}": below is None or value < below,
    }
    wanted = [text for text in bounds if "None" not in text]
    if not all(bounds.values()):
        raise UsageError(f"{name} is {value}", remedy=f"give a number {' and '.join(wanted)}")
