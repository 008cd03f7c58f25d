"""One limit on the bytes that all arrays in flight may hold together.

Whoever writes takes all that one step needs at once and holds nothing while waiting, and steps are admitted in the
order in which they ask. A step that is larger than the limit is admitted when nothing else is in flight. So none waits
for ever, and only such a step ever exceeds the limit.
"""

from __future__ import annotations

import threading
from collections import deque

from tensorkeep.io.parallel import Cancelled


class ByteBudget:
    """A counter of bytes in flight.

    Parameters
    ----------
    limit : int
        The most bytes in flight at once; a larger step goes alone.

    Attributes
    ----------
    peak : int
        The most bytes that were in flight at one moment.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._used = 0
        self._waiting: deque[object] = deque()
        self._cancelled = False
        self._changed = threading.Condition()

    def acquire(self, count: int) -> None:
        """Take so many bytes, after whoever asked before; waits until they are there.

        Raises
        ------
        Cancelled
            If `cancel` was called.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._cancelled or (self._waiting[0] is ticket and self._fits(count)))
                if self._cancelled:
                    raise Cancelled
                self._used += count
                self.peak = max(self.peak, self._used)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return self._used == 0 or self._used + count <= self.limit

    def release(self, count: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._used -= count
            self._changed.notify_all()

    def cancel(self) -> None:
        """Let everyone who waits, and whoever comes, give up; what is in flight is still given back."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        """Wait until nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0)
