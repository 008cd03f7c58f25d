"""Formatting and parsing of bytes and durations."""

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.units import (
    format_age,
    format_bytes,
    format_least_bytes,
    format_moment,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (-2_930_000_000, "-2.93 GB"),
        (5e12, "5.00 TB"),
        (7e18, "7000 PB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(2**26, "64MiB"), (2**26 + 1, "65MiB"), (1, "1MiB")])
def test_the_least_bytes_suffice(count: int, text: str) -> None:
    assert format_least_bytes(count) == text
    assert parse_bytes(text) >= count


@pytest.mark.parametrize(
    ("text", "count"),
    [(1024, 1024), ("1024", 1024), (" 4 GB ", 4 * 10**9), ("256MiB", 2**28), ("1.5k", 1500), ("2tib", 2**41)],
)
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "4 GX", "-1", "5s", "4 MBs", "one"])
def test_parse_bytes_refuses_other_texts(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (8.5e-4, "850 us"), (0.0123, "12.3 ms"), (4.56, "4.56 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [(90, 90), ("90s", 90), ("10 min", 600), ("2 hours", 7200), ("1d", 86400), ("5ms", 0.005)]
)
def test_parse_seconds(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1", "10MB"])
def test_parse_seconds_refuses_other_texts(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_seconds(text)


def test_format_moment() -> None:
    assert format_moment(0) == "1970-01-01 00:00:00 UTC"
    assert format_moment(1795411190.9) == "2026-11-23 05:19:50 UTC"


def test_format_rate() -> None:
    assert format_rate(4.82e9, 2) == "2.41 GB/s"
    assert format_rate(1, 0) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (42, "42 s"), (330, "6 min"), (3 * 3600, "3 h"), (12.3 * 86400, "12 d"), (1e9, "11,574 d")],
)
def test_format_age(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
