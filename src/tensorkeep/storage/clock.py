"""The clock by which this package waits, repeats and gives up; tests use one that they set."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The clock of the machine, and the base of others."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences have a meaning."""
        return time.monotonic()

    def time(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def thread_time(self) -> float:
        """Return the seconds for which the calling thread has run on a processor."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        time.sleep(seconds)

    def library_pause(self, seconds: float) -> float:
        """Return for how long a library that waits by itself, such as obstore, is to wait in place of so long."""
        return seconds

    def patience(self, seconds: float) -> float:
        """Return for how long to wait for another thread in place of so long."""
        return seconds


_current = Clock()


def clock() -> Clock:
    """Return the clock in use.

    Examples
    --------
    >>> clock().monotonic() <= clock().monotonic()
    True
    """
    return _current


@contextmanager
def use_clock(other: Clock) -> Iterator[None]:
    """Use another clock in this context, in all threads; contexts of several threads may not overlap."""
    global _current
    before, _current = _current, other
    try:
        yield
    finally:
        left, _current = _current, before
        assert left is other, "two uses of a clock overlap"
