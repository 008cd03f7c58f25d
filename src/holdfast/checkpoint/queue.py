"""One save at a time: the next one waits for it, or waits in its place in a queue of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from holdfast.checkpoint.arguments import MemorySize
from holdfast.checkpoint.background import PendingSave
from holdfast.checkpoint.save_memory import SaveMemory
from holdfast.errors import UsageError
from holdfast.units import parse_bytes

WhenBusy = Literal["wait", "replace"]


class SaveQueue:
    """The saves of one manager, and the memory that they share.

    Parameters
    ----------
    when_busy : str
        ``"wait"``: a save waits until the one before is over. ``"replace"``: it is copied and queued, in the place of
        what is queued already; where the memory does not hold a second copy, it waits.
    budget : int or str, optional
        See `SaveMemory`; with ``"replace"`` each copy has half of it.
    """

    def __init__(self, when_busy: WhenBusy, budget: MemorySize | None) -> None:
        if when_busy not in ("wait", "replace"):
            raise UsageError(f"when_busy is {when_busy!r}", remedy='give "wait" or "replace"')
        copies = 1 if when_busy == "wait" else 2
        each = None if budget is None else parse_bytes(budget) // copies
        self._memories = [SaveMemory(each) for _ in range(copies)]
        self._running: PendingSave | None = None
        self._queued: tuple[PendingSave, Callable[[], None]] | None = None
        self._ended: list[PendingSave] = []
        self._changed = threading.Condition()

    def make_room(self) -> None:
        """Wait until a save can be added, if it has to wait."""
        if len(self._memories) == 1:
            self.drain()

    def add(self, prepare: Callable[[SaveMemory], PendingSave], after: Callable[[], None]) -> PendingSave:
        """Start a save, or queue it.

        Parameters
        ----------
        prepare : callable
            Makes it, with the memory that it is given.
        after : callable
            Called in the background when it is durable.
        """
        with self._changed:
            running = self._running
            if self._queued is not None:
                self._queued[0].supersede()
                self._queued = None
        free = next(memory for memory in self._memories if running is None or memory is not running.memory)
        pending = prepare(free)
        if running is not None and pending.fits:
            pending.stage()
            with self._changed:
                if self._running is not None:
                    self._queued = pending, after
                    return pending
            self._begin(pending, after, staged=True)
            return pending
        self.drain()
        self._begin(pending, after, staged=False)
        return pending

    def run(self, prepare: Callable[[SaveMemory], PendingSave], after: Callable[[], None]) -> PendingSave:
        """Run a save in the caller's thread; see `add`."""
        self.drain()
        pending = prepare(self._memories[0])
        pending.run(after=after)
        return pending

    def _begin(self, pending: PendingSave, after: Callable[[], None], *, staged: bool) -> None:
        with self._changed:
            self._running = pending
        try:
            if staged:
                pending.launch(after=after, on_end=self._next)
            else:
                pending.start(after=after, on_end=self._next)
        except BaseException:
            with self._changed:
                if self._running is pending:
                    self._running = None
                self._changed.notify_all()
            raise

    def _next(self) -> None:
        """Start what is queued; called in the background when a save is over."""
        with self._changed:
            if self._running is not None:
                self._ended.append(self._running)
            queued, self._queued = self._queued, None
            self._running = queued[0] if queued else None
            self._changed.notify_all()
        if queued:
            queued[0].launch(after=queued[1], on_end=self._next)

    def drain(self) -> None:
        """Wait until nothing is running or queued, whether it failed or not."""
        with self._changed:
            while self._running is not None:
                self._changed.wait()
            ended = list(self._ended)
        for pending in ended:
            pending.settled()

    def raise_failure(self) -> None:
        """Raise the error of a save that is over, if nobody has seen it."""
        with self._changed:
            ended, self._ended = self._ended, []
        for position, pending in enumerate(ended):
            pending.settled()
            if pending.failed():
                with self._changed:
                    self._ended = ended[position + 1 :] + self._ended
                pending.wait()

    def close(self) -> None:
        """Give the memory back."""
        for memory in self._memories:
            memory.close()
