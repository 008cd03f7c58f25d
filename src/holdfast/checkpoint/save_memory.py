"""The memory of saves in the background: one budget over the copies of the state and the work on them."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.arguments import MemorySize
from holdfast.errors import UsageError
from holdfast.formats.base import BLOCK_BYTES, thread_bytes
from holdfast.formats.native.writer import buffers_each
from holdfast.io.buffers import DEFAULT_BUDGET, MINIMUM_BUDGET, BufferPool
from holdfast.io.page_lock import CudaPageLock, PageLock
from holdfast.units import format_bytes, parse_bytes


class SaveMemory:
    """Two pools of buffers, kept from one save to the next: memory that was touched before is filled much faster.

    Parameters
    ----------
    budget : int or str, optional
        Bytes of both together. By default what a state needs, but at most half of the memory that is available when
        it is first asked for.

    Raises
    ------
    UsageError
        If the budget is below 128 MiB.
    """

    def __init__(self, budget: MemorySize | None = None) -> None:
        self._budget = None if budget is None else parse_bytes(budget)
        if self._budget is not None and self._budget < 2 * MINIMUM_BUDGET:
            raise UsageError(
                f"a memory budget of {format_bytes(self._budget)} is too small for saving in the background",
                remedy=f"give at least {format_bytes(2 * MINIMUM_BUDGET)}, or call holdfast.save",
            )
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
            room = max(MINIMUM_BUDGET, min(needed, available_bytes() // 2))
        self._staging = _fitting(self._staging, room, self._page_lock if from_cuda else None)
        return self._staging

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


def _fitting(pool: BufferPool | None, budget: int, page_lock: PageLock | None = None) -> BufferPool:
    if pool is not None and pool.budget == budget and pool.page_lock is page_lock:
        return pool
    if pool is not None:
        pool.close()
    return BufferPool(budget, page_lock=page_lock)


def available_bytes() -> int:
    """Return the memory that the kernel would give this process without swapping (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise AssertionError("/proc/meminfo has MemAvailable since Linux 3.14")
