"""Bytes, durations and times: parsing and formatting."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from tensorkeep.errors import UsageError

_PREFIXES = "kmgtp"
_BYTES = {
    "": 1.0,
    "b": 1.0,
    **{f"{letter}{unit}": 1000.0**power for power, letter in enumerate(_PREFIXES, start=1) for unit in ("", "b")},
    **{f"{letter}ib": 1024.0**power for power, letter in enumerate(_PREFIXES, start=1)},
}
_SECONDS = {
    "ms": 1e-3,
    **dict.fromkeys(("", "s", "sec", "secs"), 1.0),
    **dict.fromkeys(("m", "min", "mins"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}


# Below this, the time is mostly the time of opening files, and a rate would mislead.
_FEW_BYTES = 10_000_000


def format_bytes(count: float) -> str:
    """Decimal units with three significant digits, such as ``2.93 GB``."""
    if abs(count) < 999.5:
        # Below 999.5, three digits do not round up to 1000.
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        count /= 1000
        if abs(count) < 999.5 or unit == "PB":
            break
    return f"{_three_digits(count)} {unit}"


def format_least_bytes(count: int) -> str:
    """Rounded up to whole MiB, such as ``64MiB``, as `parse_bytes` reads it."""
    # For remedies: the text of `format_bytes` may be rounded down to less than is needed.
    return f"{-(-count // 1024**2)}MiB"


def parse_bytes(text: str | int) -> int:
    """The bytes in a text such as ``256MiB`` or ``1024``; UsageError if the text is not a size."""
    return text if type(text) is int else int(_parse(str(text), _BYTES, "a size", "256MiB or 4GB"))


def format_rate(count: float, seconds: float) -> str:
    """Bytes per second, such as ``2.41 GB/s``."""
    return f"{format_bytes(count / seconds)}/s" if seconds > 0 else "-"


def format_speed(count: float, seconds: float) -> str:
    """A duration, with the rate for more than 10 MB: ``4.56 s at 2.41 GB/s``."""
    rate = f" at {format_rate(count, seconds)}" if count >= _FEW_BYTES else ""
    return f"{format_seconds(seconds)}{rate}"


def format_seconds(seconds: float) -> str:
    """As ``850 us``, ``12.3 ms``, ``4.56 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_age(seconds: float) -> str:
    """An age in one unit, such as ``42 s``, ``5 min``, ``3 h`` or ``12 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_moment(seconds: float) -> str:
    """Seconds since 1970 as ``2026-11-23 05:19:50 UTC``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def parse_seconds(text: str | float) -> float:
    """The seconds in a text such as ``90s`` or ``2 hours``; UsageError if the text is not a duration."""
    return _parse(str(text), _SECONDS, "a duration", "90s or 10min")


def _parse(text: str, factors: Mapping[str, float], kind: str, example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not {kind}", remedy=f"write a number with a unit, for example {example}")
    return float(match[1]) * factor


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def counted(count: int, noun: str) -> str:
    """Such as ``1 tensor`` or ``2,370 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def check_count(what: str, count: object) -> None:
    """Raises UsageError unless a count is an int of 1 or more."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"{what} is {count!r}", remedy="give an int of 1 or more")


def number(value: float, digits: int = 3) -> str:
    """Format a number: ``0.663``, ``2.91``, ``134``, ``26,412``, ``1.2e-05``."""
    if not 10.0**-digits <= abs(value) < 1e7:
        return f"{value:.{digits}g}"
    return f"{value:,.{_decimals(value, digits)}f}"


def _decimals(value: float, digits: int) -> int:
    # Formatted first, because rounding may carry: 9.996 has one digit more than its logarithm says.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(0, digits - 1 - exponent)
