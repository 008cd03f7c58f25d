"""The clock for waiting, retrying and giving up. Tests replace it by a clock that they set."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    def monotonic(self) -> float:
        """Only differences have a meaning."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def thread_time(self) -> float:
        """CPU seconds of the calling thread."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def library_pause(self, seconds: float) -> float:
        """The pause of a library with its own clock, such as obstore, instead of ``seconds``."""
        return seconds

    def patience(self, seconds: float) -> float:
        """How long to wait for another thread, instead of ``seconds``."""
        return seconds


_current = Clock()


def clock() -> Clock:
    return _current


@contextmanager
def use_clock(other: Clock) -> Iterator[None]:
    """Use another clock in all threads. Contexts of several threads may not overlap."""
    global _current
    before, _current = _current, other
    try:
        yield
    finally:
        left, _current = _current, before
        assert left is other, "two uses of a clock overlap"
