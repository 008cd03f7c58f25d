"""Bytes and seconds: parsing what people type, printing what they read."""

from __future__ import annotations

import re

from tensorkeep.errors import UsageError

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{letter: 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}


def format_bytes(count: float) -> str:
    """Return a byte count in decimal units with three significant digits, such as ``2.93 GB``."""
    value = float(count)
    for unit in _DECIMAL[:-1]:
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} {_DECIMAL[-1]}"


def parse_bytes(text: str | int) -> int:
    """Return the bytes that a text such as ``256MiB``, ``4 GB`` or ``1024`` means.

    Raises
    ------
    UsageError
        If the text is no byte count, or a negative one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a size", remedy="write a number with a unit, for example 256MiB or 4GB")
    return int(float(match.group(1)) * factor)


def format_rate(count: float, seconds: float) -> str:
    """Return bytes per second, such as ``2.41 GB/s``."""
    return f"{format_bytes(count / seconds)}/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """Return a duration as a person reads it: ``850 us``, ``12.3 ms``, ``4.56 s``, ``3 min 05 s``, ``2 h 10 min``."""
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


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


_SECONDS = {
    "": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "w": 604800.0,
    "week": 604800.0,
}


def parse_seconds(text: str | float) -> float:
    """Return the seconds that a text such as ``90s``, ``10min``, ``2h``, ``1d`` or a number means.

    Raises
    ------
    UsageError
        If it is no duration, or a negative one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = match.group(2).lower() if match else ""
    factor = _SECONDS.get(unit, _SECONDS.get(unit.removesuffix("s")))
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a duration", remedy="write a number with a unit, for example 90s or 10min")
    return float(match.group(1)) * factor
