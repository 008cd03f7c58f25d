"""Where the time of a run goes: training, evaluation, checkpoints, samples, and the first step, which compiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by what they were spent on.

    Parameters
    ----------
    now : callable
        Returns seconds; it must not go back.

    Attributes
    ----------
    seconds : dict of str to float
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Time a block. Blocks are not nested."""
        begin = self._now()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + self._now() - begin
