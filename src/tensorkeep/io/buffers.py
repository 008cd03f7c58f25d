"""Aligned buffers under one byte budget.

Threads times block size is memory, so the budget is one number over everything that an operation holds, not one per
tensor. A task takes all that it needs in a single ``acquire``: a task that holds one buffer and waits for a second
could wait for ever.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UsageError
from tensorkeep.io.parallel import POLL_SECONDS, Cancellation
from tensorkeep.units import format_bytes

ALIGNMENT = 4096
"""Bytes that O_DIRECT wants addresses, offsets and lengths to be multiples of, on every common device."""

_HUGE_PAGE = 2 * 1024**2

DEFAULT_BUDGET = 256 * 1024**2
MINIMUM_BUDGET = 64 * 1024**2


def round_up(count: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple that is not below the count."""
    return -(-count // multiple) * multiple


def round_down(count: int, multiple: int = ALIGNMENT) -> int:
    """Return the largest multiple that is not above the count."""
    return count // multiple * multiple


def buffer_bytes(nbytes: int) -> int:
    """Return the size of the buffer that a need of so many bytes is given."""
    # The kernel backs a mapping by huge pages throughout only if its length is a multiple of theirs; direct writes
    # from small pages are a tenth slower.
    return round_up(max(nbytes, 1), ALIGNMENT if nbytes < _HUGE_PAGE else _HUGE_PAGE)


class PageLock(Protocol):
    """Page-locks buffers for a device; `tensorkeep.state.cuda.CudaPageLock` does it for CUDA."""

    def lock(self, memory: mmap.mmap) -> None:
        """Page-lock a buffer; if the system refuses, log a warning and leave the buffer as it is."""

    def unlock(self, memory: mmap.mmap) -> None:
        """Undo `lock` before the buffer has another user; does nothing if it is not page-locked."""


class Buffer:
    """A buffer that a pool has lent: to be given back by `release`, in any thread, or at the end of a ``with``.

    Attributes
    ----------
    array : uint8 array
        Page-aligned; it holds whatever the last user left in it.
    """

    def __init__(self, pool: BufferPool, memory: mmap.mmap) -> None:
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._pool = pool
        self._memory: mmap.mmap | None = memory

    def release(self) -> None:
        """Give the buffer back; a second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool._put(memory)

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self.array

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class BufferPool:
    """Page-aligned host buffers, reused, never more than the budget at once; a context manager.

    At its end the buffers go to a shelf of the process, from which the next pool takes them: memory that was touched
    before is filled several times faster than new memory.

    Parameters
    ----------
    budget : int
        The most bytes that all buffers together may take, those that lie free for reuse included.
    exact : bool
        Lend no buffer that is larger than `buffer_bytes` of the need, so that needs which add up to the budget can all
        be met at once. Otherwise a free buffer of up to twice the size is as good.
    page_lock : PageLock, optional
        What page-locks the buffers as long as they are the pool's.

    Attributes
    ----------
    peak_bytes : int
        The most bytes that were allocated at one moment.

    Raises
    ------
    UsageError
        If the budget is below 64 MiB: one thread needs that much to code and write blocks of 16 MiB.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET, *, exact: bool = False, page_lock: PageLock | None = None) -> None:
        if budget < MINIMUM_BUDGET:
            raise UsageError(
                f"a memory budget of {format_bytes(budget)} is too small",
                remedy=f"give at least {format_bytes(MINIMUM_BUDGET)}",
            )
        self.budget = budget
        self.page_lock = page_lock
        self.peak_bytes = 0
        self._largest = 1 if exact else 2
        self._allocated = 0
        self._free: list[mmap.mmap] = []
        self._changed = threading.Condition()
        if page_lock is not None:
            # Memory that is unmapped while it is locked is lost to the system. At exit all of it goes anyway.
            weakref.finalize(self, _unlock_all, page_lock, self._free).atexit = False

    @property
    def allocated_bytes(self) -> int:
        """What the buffers take now, those that are kept for the next use included."""
        return self._allocated

    def threads(self, wanted: int, bytes_each: int) -> int:
        """Return how many threads, at most ``wanted``, can have that much memory each.

        No more may run than all that each can hold at once is there for: else one could wait for ever for what
        another holds.

        Raises
        ------
        UsageError
            If there is not enough for one.
        """
        if bytes_each > self.budget:
            raise UsageError(
                f"a memory budget of {format_bytes(self.budget)} is too small for blocks of this size",
                remedy=f"give at least {format_bytes(bytes_each)}",
            )
        return max(1, min(wanted, self.budget // bytes_each))

    def acquire(self, nbytes: int, cancellation: Cancellation | None = None) -> Buffer:
        """Lend a page-aligned uint8 array of at least ``nbytes``; waits while the budget is used up.

        Parameters
        ----------
        nbytes : int
        cancellation : Cancellation, optional
            Ends the waiting.
        """
        size = buffer_bytes(nbytes)
        if size > self.budget:
            raise UsageError(
                f"one step needs a buffer of {format_bytes(size)}, more than the memory budget",
                remedy=f"give a budget of at least {format_bytes(size)}",
            )
        memory, new = self._take(size, cancellation)
        if new and self.page_lock is not None:
            self.page_lock.lock(memory)
        return Buffer(self, memory)

    def _put(self, memory: mmap.mmap) -> None:
        with self._changed:
            self._free.append(memory)
            self._changed.notify_all()

    def _take(self, size: int, cancellation: Cancellation | None) -> tuple[mmap.mmap, bool]:
        """Return a buffer, and whether it is new to the pool."""
        with self._changed:
            while True:
                # Not one far too large: the accounting of `threads` relies on what each need takes.
                largest = self._largest * size
                fitting = [memory for memory in self._free if size <= len(memory) <= largest]
                if fitting:
                    best = min(fitting, key=len)
                    self._free.remove(best)
                    return best, False
                while self._free and self._allocated + size > self.budget:
                    # Views of a lent array may still be alive somewhere; the memory then goes when they do.
                    self._allocated -= len(self._part_with(self._free.pop()))
                if self._allocated + size <= self.budget:
                    largest = min(largest, self.budget - self._allocated)
                    memory = _shelf.take(size, at_most=largest) or _map(size)
                    self._allocated += len(memory)
                    self.peak_bytes = max(self.peak_bytes, self._allocated)
                    return memory, True
                if cancellation is None:
                    self._changed.wait()
                else:
                    cancellation.check()
                    self._changed.wait(timeout=POLL_SECONDS)

    def close(self) -> None:
        """Give the free buffers back; the pool can still be used."""
        with self._changed:
            while self._free:
                memory = self._part_with(self._free.pop())
                self._allocated -= len(memory)
                _shelf.put(memory)

    def _part_with(self, memory: mmap.mmap) -> mmap.mmap:
        if self.page_lock is not None:
            self.page_lock.unlock(memory)
        return memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _unlock_all(page_lock: PageLock, buffers: list[mmap.mmap]) -> None:
    for memory in buffers:
        page_lock.unlock(memory)


class _Shelf:
    """Buffers that no pool has, kept for the next one; a bounded number of bytes for the life of the process."""

    _MOST_BYTES = 96 * 1024**2

    def __init__(self) -> None:
        self.clear()
        # A child that is forked while another thread holds the lock would wait for it for ever.
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int, *, at_most: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [memory for memory in self._buffers if size <= len(memory) <= at_most]
            if not fitting:
                # New memory takes the place of what lies here unused, so that both together do not grow.
                self._drop(size)
                return None
            best = min(fitting, key=len)
            self._buffers.remove(best)
            return best

    def put(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._buffers.append(memory)
            self._drop(sum(map(len, self._buffers)) - self._MOST_BYTES)

    def _drop(self, nbytes: int) -> None:
        """Give up so many bytes, or all there are, the oldest buffers first."""
        while nbytes > 0 and self._buffers:
            nbytes -= len(self._buffers.pop(0))


_shelf = _Shelf()


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # First-touch faults of 4 KiB pages cost as much as the copy into them.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def aligned_copy(data: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes in page-aligned memory of their own, as direct writes need them."""
    array = np.frombuffer(_map(max(len(data), 1)), np.uint8)[: len(data)]
    array[:] = np.frombuffer(data, np.uint8)
    return array
