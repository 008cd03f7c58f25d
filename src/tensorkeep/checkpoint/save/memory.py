"""The memory of saves in the background: one budget over the copies of the state and the work on them."""

from __future__ import annotations

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.errors import UsageError
from tensorkeep.formats.base import BLOCK_BYTES, thread_bytes
from tensorkeep.formats.native.writer import buffers_each
from tensorkeep.io.buffers import DEFAULT_BUDGET, MINIMUM_BUDGET, BufferPool, PageLock
from tensorkeep.machine import available_bytes
from tensorkeep.state.cuda import CudaPageLock
from tensorkeep.units import format_bytes, parse_bytes

_LITTLE_MORE = 1.25


class SaveMemory:
    """Two pools of buffers, kept from one save to the next: memory that was touched before is filled much faster.

    Parameters
    ----------
    budget : int, optional
        Bytes of both together. By default what a state needs, but at most half of the memory that is available when
        it is first asked for.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._staging: BufferPool | None = None
        self._working: BufferPool | None = None
        self._page_lock = CudaPageLock()

    def working(self, threads: int, *, delta: bool) -> BufferPool:
        """Return the pool for the work of that many threads, which may have to make differences."""
        each = thread_bytes(BLOCK_BYTES, buffers=buffers_each(staged=True, delta=delta))
        most = threads * each if self._budget is None else self._budget // 4
        self._working = _fitting(self._working, max(MINIMUM_BUDGET, each, min(threads * each, most)))
        return self._working

    def staging(self, needed: int, *, from_cuda: bool) -> BufferPool:
        """Return the pool for copies that take ``needed`` bytes, or as much of it as the budget leaves.

        `working` comes before. Copies from CUDA devices go to page-locked buffers.
        """
        if self._working is None:
            raise AssertionError("the work's share is taken first")
        if self._budget is not None:
            room = self._budget - self._working.budget
        elif self._staging is not None and needed <= self._staging.budget <= 2 * max(needed, MINIMUM_BUDGET):
            room = self._staging.budget
        else:
            room = self._half_of_what_there_is(needed)
        self._staging = _fitting(self._staging, room, exact=True, page_lock=self._page_lock if from_cuda else None)
        return self._staging

    def _half_of_what_there_is(self, needed: int) -> int:
        kept = 0 if self._staging is None else self._staging.allocated_bytes
        room = max(MINIMUM_BUDGET, min(needed, (available_bytes() + kept) // 2))
        # Memory that is kept is warm: a little more of it is worth less.
        if self._staging is not None and room < needed and room <= _LITTLE_MORE * self._staging.budget:
            return self._staging.budget
        return room

    def whole(self) -> BufferPool:
        """Return one pool of all of the budget, for a save that copies nothing."""
        self._working = _fitting(self._working, DEFAULT_BUDGET if self._budget is None else self._budget)
        return self._working

    @property
    def peak_bytes(self) -> int:
        """The most that the buffers took at one moment, at most."""
        return sum(pool.peak_bytes for pool in (self._staging, self._working) if pool is not None)

    def close(self) -> None:
        """Give the buffers back; it can still be used."""
        for pool in (self._staging, self._working):
            if pool is not None:
                pool.close()


def checked_budget(
    budget: MemorySize | None, *, copies: int = 1, delta: bool = False, background: bool = True
) -> int | None:
    """Return the bytes of a memory budget, None for none.

    Parameters
    ----------
    budget : int or str, optional
    copies : int
        How many saves have a share of it each.
    delta : bool
        Whether differences may be made.
    background : bool
        Whether the state is copied first.

    Raises
    ------
    UsageError
        If it is too small for one thread that does the work.
    """
    if budget is None:
        return None
    parsed = parse_bytes(budget)
    work = max(MINIMUM_BUDGET, thread_bytes(BLOCK_BYTES, buffers=buffers_each(staged=background, delta=delta)))
    least = copies * (work + MINIMUM_BUDGET if background else work)
    if parsed < least:
        what = ["saving in the background"] if background else ["saving"]
        what += ["of differences"] if delta else []
        what += [f"with {copies} copies of the state"] if copies > 1 else []
        raise UsageError(
            f"a memory budget of {format_bytes(parsed)} is too small for {' '.join(what)}",
            remedy=f"give at least {format_bytes(least)}",
        )
    return parsed


def _fitting(
    pool: BufferPool | None, budget: int, *, exact: bool = False, page_lock: PageLock | None = None
) -> BufferPool:
    if pool is not None and pool.budget == budget and pool.page_lock is page_lock:
        return pool
    if pool is not None:
        pool.close()
    return BufferPool(budget, exact=exact, page_lock=page_lock)
