"""The buffers of saves: one memory budget for copying the state and writing it."""

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.errors import UsageError
from tensorkeep.formats.base import BLOCK_BYTES, thread_bytes
from tensorkeep.formats.blockfile.write import buffers_per_thread
from tensorkeep.machine import available_bytes
from tensorkeep.state.cuda import CudaPageLock
from tensorkeep.storage.buffers import DEFAULT_BUDGET, MINIMUM_BUDGET, BufferPool
from tensorkeep.storage.object_store import part_bytes
from tensorkeep.units import format_bytes, format_least_bytes, parse_bytes

_SLIGHTLY_LARGER = 1.25


class SaveMemory:
    """Two pools of buffers, kept from one save to the next: memory that was touched before is filled much faster.

    ``budget`` limits both together. Without it they have what a state needs, but at most half of the memory that is
    available at the first save.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._staging: BufferPool | None = None
        self._working: BufferPool | None = None
        self._page_lock = CudaPageLock()

    def working(self, threads: int, *, delta: bool, in_store: bool = False) -> BufferPool:
        """Return the pool for that many writing threads, which may have to compute differences, or to upload.

        Raises UsageError if the budget is too small to upload: `checked_budget` does not know where a save goes.
        """
        each = thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=True, delta=delta))
        if in_store:
            each += part_bytes(0)
            self._check_budget(max(MINIMUM_BUDGET, each) + MINIMUM_BUDGET)
        limit = threads * each if self._budget is None else self._budget // 4
        self._working = _with_budget(self._working, max(MINIMUM_BUDGET, each, min(threads * each, limit)))
        return self._working

    def _check_budget(self, least: int) -> None:
        if self._budget is not None and self._budget < least:
            found = format_bytes(self._budget)
            raise UsageError(
                f"a memory budget of {found} for each copy of the state is too small for saving into a store",
                remedy=f"give at least {format_least_bytes(least)} for each",
            )

    def staging(self, needed: int, *, from_cuda: bool) -> BufferPool:
        """Return the pool for copies that take ``needed`` bytes, or for as much as the budget leaves.

        `working` is called first. Copies from CUDA devices go to page-locked buffers.
        """
        assert self._working is not None
        if self._budget is not None:
            size = self._budget - self._working.budget
        elif self._staging is not None and needed <= self._staging.budget <= 2 * max(needed, MINIMUM_BUDGET):
            size = self._staging.budget
        else:
            size = self._half_of_available(needed)
        lock = self._page_lock if from_cuda else None
        self._staging = _with_budget(self._staging, size, page_lock=lock)
        return self._staging

    def _half_of_available(self, needed: int) -> int:
        kept = 0 if self._staging is None else self._staging.allocated_bytes
        size = max(MINIMUM_BUDGET, min(needed, (available_bytes() + kept) // 2))
        # The kept buffers are faster to fill, which is worth more than a slightly larger pool.
        if self._staging is not None and size < needed and size <= _SLIGHTLY_LARGER * self._staging.budget:
            return self._staging.budget
        return size

    def single_pool(self) -> BufferPool:
        """Return one pool of the whole budget, 256 MiB by default, for a save without a copy."""
        self._working = _with_budget(self._working, DEFAULT_BUDGET if self._budget is None else self._budget)
        return self._working

    @property
    def peak_bytes(self) -> int:
        """An upper bound of the peak of the two pools together."""
        return sum(pool.peak_bytes for pool in (self._staging, self._working) if pool is not None)

    def close(self) -> None:
        """Free the buffers; the pools can still be used."""
        for pool in (self._staging, self._working):
            if pool is not None:
                pool.close()


def checked_budget(
    budget: MemorySize | None, *, copies: int = 1, delta: bool = False, background: bool = True
) -> int | None:
    """Return a memory budget in bytes, or None; UsageError if it is too small for one writing thread.

    ``copies`` of a state share it. ``delta`` means that differences may be computed, ``background`` that it is copied
    first.
    """
    if budget is None:
        return None
    parsed = parse_bytes(budget)
    work = max(MINIMUM_BUDGET, thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=background, delta=delta)))
    least = copies * (work + MINIMUM_BUDGET if background else work)
    if parsed < least:
        what = ["saving in the background"] if background else ["saving"]
        what += ["of differences"] if delta else []
        what += [f"with {copies} copies of the state"] if copies > 1 else []
        raise UsageError(
            f"a memory budget of {format_bytes(parsed)} is too small for {' '.join(what)}",
            remedy=f"give at least {format_least_bytes(least)}",
        )
    return parsed


def _with_budget(pool: BufferPool | None, budget: int, *, page_lock: CudaPageLock | None = None) -> BufferPool:
    """Return the pool if it has this budget and lock, else a new one."""
    if pool is not None and pool.budget == budget and pool.page_lock is page_lock:
        return pool
    if pool is not None:
        pool.close()
    return BufferPool(budget, page_lock=page_lock)
