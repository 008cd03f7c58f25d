"""Formatting and parsing of bytes and durations."""

from collections.abc import Callable
from typing import Any

import pytest

from tensorkeep import units
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case

SIZES = {0: "0 B", 999: "999 B", 999.6: "1.00 kB", 12_345: "12.3 kB", 999_499: "999 kB", 999_500: "1.00 MB"}
SIZES |= {-2_930_000_000: "-2.93 GB", 5e12: "5.00 TB", 7e18: "7000 PB"}
AGES = {-5: "0 s", 42: "42 s", 330: "6 min", 3 * 3600: "3 h", 12.3 * 86400: "12 d", 1e9: "11,574 d"}
DURATIONS = {0: "0 us", 8.5e-4: "850 us", 0.0123: "12.3 ms", 4.56: "4.56 s", 185: "3 min 05 s", 7800: "2 h 10 min"}
PARSED = {1024: 1024, "1024": 1024, " 4 GB ": 4 * 10**9, "256MiB": 2**28, "1.5k": 1500, "2tib": 2**41}


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (units.format_bytes, SIZES),
        (units.format_age, AGES),
        (units.format_seconds, DURATIONS),
        (units.format_moment, {0: "1970-01-01 00:00:00 UTC", 1795411190.9: "2026-11-23 05:19:50 UTC"}),
        (lambda given: units.format_rate(*given), {(4.82e9, 2): "2.41 GB/s", (1, 0): "-"}),
        (units.parse_bytes, PARSED),
        (units.parse_seconds, {90: 90, "90s": 90, "10 min": 600, "2 hours": 7200, "1d": 86400, "5ms": 0.005}),
    ],
)
def test_sizes_rates_durations_and_moments(convert: Callable[[Any], object], expected: dict[object, object]) -> None:
    for given, result in expected.items():
        with case(given):
            assert convert(given) == result


@pytest.mark.parametrize(("count", "text"), [(2**26, "64MiB"), (2**26 + 1, "65MiB"), (1, "1MiB")])
def test_the_least_bytes_suffice(count: int, text: str) -> None:
    assert units.format_least_bytes(count) == text
    assert units.parse_bytes(text) >= count


@pytest.mark.parametrize("text", ["", "4 GX", "-1", "5s", "4 MBs", "one", "5 parsecs", "10MB"])
def test_other_texts_are_refused(text: str) -> None:
    if text != "10MB":
        with pytest.raises(UsageError, match="is not a size"):
            units.parse_bytes(text)
    if text != "5s":
        with pytest.raises(UsageError, match="is not a duration"):
            units.parse_seconds(text)
