"""Page-aligned buffers under one byte budget.

A task acquires all its memory in one call: two tasks that each hold a buffer and wait for another could deadlock.
"""

import logging
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.closing import Closing
from tensorkeep.errors import OutOfMemoryError, UsageError
from tensorkeep.storage.parallel import POLL_SECONDS, Cancellation
from tensorkeep.units import format_bytes, format_least_bytes

logger = logging.getLogger(__name__)

# O_DIRECT needs addresses, offsets and lengths that are multiples of this many bytes, on every common device.
ALIGNMENT = 4096
# x86-64 and AArch64 with 4 KiB base pages both have huge pages of this size.
_HUGE_PAGE = 2 * 1024**2
DEFAULT_BUDGET = 256 * 1024**2
MINIMUM_BUDGET = 64 * 1024**2


def round_up(count: int, multiple: int = ALIGNMENT) -> int:
    return -(-count // multiple) * multiple


def round_down(count: int, multiple: int = ALIGNMENT) -> int:
    return count // multiple * multiple


def buffer_bytes(nbytes: int) -> int:
    # The kernel backs a mapping by huge pages throughout only if its length is a multiple of theirs; direct writes
    # from small pages are a tenth slower.
    return round_up(max(nbytes, 1), ALIGNMENT if nbytes < _HUGE_PAGE else _HUGE_PAGE)


class Buffer:
    """A buffer of a pool until `release`, in any thread. Its contents are undefined; ``size`` bytes were requested."""

    def __init__(self, pool: "BufferPool", memory: mmap.mmap, size: int) -> None:
        # The array exports the mapping's buffer: the memory is unmapped when the last view is gone.
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._pool = pool
        self.size = size
        self._memory: mmap.mmap | None = memory
        self._released = False
        self._lent = 0

    def release(self) -> None:
        self._change(released=True)

    def lend(self) -> None:
        """Keep the buffer from its pool, also after `release`, until `give_back`."""
        self._change(lent=1)

    def give_back(self) -> None:
        self._change(lent=-1)

    def _change(self, *, released: bool = False, lent: int = 0) -> None:
        # Under the pool's lock: the last `release` or `give_back` may come from any thread, and only one may return the
        # memory.
        with self._pool._changed:
            self._released |= released
            self._lent += lent
            if self._released and not self._lent and self._memory is not None:
                memory, self._memory = self._memory, None
                self._pool._put(memory, self.size)

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self.array

    def __exit__(self, *error: object) -> None:
        self.release()


class CudaPageLock:
    """Page-locks host memory by ``cudaHostRegister``: a GPU copies to it at the speed of its bus."""

    _PORTABLE = 1  # for all devices of the process, not only the current one

    def __init__(self) -> None:
        self._locked: set[int] = set()
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> None:
        """If CUDA refuses, log a warning and leave the buffer as it is."""
        # Not torch's pinned memory: it is rounded up to powers of two, which would break a memory budget.
        address = _address(memory)
        error = int(_runtime().cudaHostRegister(address, len(memory), self._PORTABLE))
        if error:
            _clear_last_error()
            logger.warning(
                "CUDA refuses to page-lock %s of host memory (cudaHostRegister returns %d): copies from the GPU are "
                "slower",
                format_bytes(len(memory)),
                error,
            )
            return
        self._locked.add(address)

    def unlock(self, memory: mmap.mmap) -> None:
        # Memory that a forked child inherits is locked for its parent, and CUDA cannot be used in the child.
        if os.getpid() != self._process:
            return
        address = _address(memory)
        with suppress(KeyError):
            self._locked.remove(address)
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    import torch

    runtime: Any = torch.cuda  # which is not typed
    return runtime.cudart()


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _clear_last_error() -> None:
    import torch

    # CUDA reports the error once, by the next kernel, which has nothing to do with it.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")


class BufferPool(Closing):
    """Reusable page-aligned host buffers under one budget; a context manager.

    When a pool is closed, its buffers are kept for the next pool of the process: memory that was touched before is
    filled several times faster than new memory.

    ``budget`` limits ``allocated_bytes``, the bytes of all buffers, free ones included; ``peak_bytes`` is the maximum
    so far. A request may get a free buffer of up to twice its size, as long as the threads granted by `threads` keep
    enough budget: they never wait for each other. ``page_lock`` page-locks the buffers while the pool has them.

    Raises UsageError if the budget is below 64 MiB, which one thread needs to code and write blocks of 16 MiB.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET, *, page_lock: CudaPageLock | None = None) -> None:
        if budget < MINIMUM_BUDGET:
            raise UsageError(
                f"a memory budget of {format_bytes(budget)} is too small",
                remedy=f"give at least {format_least_bytes(MINIMUM_BUDGET)}",
            )
        self.budget = budget
        self.page_lock = page_lock
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self._granted = 0
        self._excess = 0  # bytes of the buffers in use that were not asked for
        self._free: list[mmap.mmap] = []
        self._changed = threading.Condition()
        if page_lock is not None:
            # Memory that is unmapped while it is page-locked is lost to the system, except when the process exits.
            weakref.finalize(self, _unlock_all, page_lock, self._free).atexit = False

    def threads(self, wanted: int, bytes_each: int) -> int:
        """Return how many threads the budget allows if each holds `bytes_each` at once; UsageError if not even one."""
        if bytes_each > self.budget:
            raise UsageError(
                f"a memory budget of {format_bytes(self.budget)} is too small for blocks of this size",
                remedy=f"give at least {format_least_bytes(bytes_each)}",
            )
        # More threads could deadlock: each would wait for memory that another one holds.
        count = max(1, min(wanted, self.budget // bytes_each))
        with self._changed:
            # A pool may serve nested operations at once, and outlives them.
            self._granted = max(self._granted, count * bytes_each)
        return count

    def acquire(self, nbytes: int, cancellation: Cancellation | None = None) -> Buffer:
        """Waits while the budget is used up. Raises Cancelled; UsageError if the buffer alone exceeds the budget."""
        size = buffer_bytes(nbytes)
        if size > self.budget:
            raise UsageError(
                f"one step needs a buffer of {format_bytes(size)}, more than the memory budget",
                remedy=f"give a budget of at least {format_least_bytes(size)}",
            )
        memory, new = self._take(size, cancellation)
        # Outside the pool's lock: page-locking takes long, and other threads must be able to release meanwhile.
        if new and self.page_lock is not None:
            self.page_lock.lock(memory)
        return Buffer(self, memory, size)

    def _put(self, memory: mmap.mmap, size: int) -> None:
        with self._changed:
            self._excess -= len(memory) - size
            self._free.append(memory)
            self._changed.notify_all()

    def _take(self, size: int, cancellation: Cancellation | None) -> tuple[mmap.mmap, bool]:
        with self._changed:
            while True:
                # Larger buffers would break the arithmetic in `threads`, which counts requested sizes.
                spare = self.budget - self._granted - self._excess if self._granted else 0
                largest = size + max(0, min(size, spare))
                if best := _take_smallest(self._free, size, largest):
                    self._excess += len(best) - size
                    return best, False
                # Each free buffer may be too small or too large for the request: drop some to make space in the budget.
                while self._free and self.allocated_bytes + size > self.budget:
                    self._remove_free()
                if self.allocated_bytes + size <= self.budget:
                    memory = _spares.take(size, at_most=min(largest, self.budget - self.allocated_bytes)) or _map(size)
                    self._excess += len(memory) - size
                    self.allocated_bytes += len(memory)
                    self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
                    return memory, True
                if cancellation is None:
                    self._changed.wait()
                else:
                    cancellation.check()
                    # With a timeout: `cancel` does not notify this condition.
                    self._changed.wait(timeout=POLL_SECONDS)

    def _remove_free(self) -> mmap.mmap:
        # Views of its array may still be alive; the memory is then unmapped with the last view.
        memory = self._free.pop()
        if self.page_lock is not None:
            self.page_lock.unlock(memory)
        self.allocated_bytes -= len(memory)
        return memory

    def close(self) -> None:
        """Pass the free buffers on to the next pool. This pool can still be used."""
        with self._changed:
            # The finalizer has the same list, which is then empty: no buffer is unlocked twice.
            while self._free:
                _spares.put(self._remove_free())


def _unlock_all(page_lock: CudaPageLock, buffers: list[mmap.mmap]) -> None:
    for memory in buffers:
        page_lock.unlock(memory)


def _take_smallest(buffers: list[mmap.mmap], size: int, at_most: int) -> mmap.mmap | None:
    best = min((memory for memory in buffers if size <= len(memory) <= at_most), key=len, default=None)
    if best is not None:
        buffers.remove(best)
    return best


class _Spares:
    # Bounded: the memory stays resident for the life of the process.
    _MAX_BYTES = 96 * 1024**2

    def __init__(self) -> None:
        self.clear()
        # In a forked child, a lock that another thread held would never be released.
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int, *, at_most: int) -> mmap.mmap | None:
        with self._lock:
            best = _take_smallest(self._buffers, size, at_most)
            if best is None:
                # The caller maps new memory: unused buffers of that size go, so that the sum does not grow.
                self._drop(size)
            return best

    def put(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._buffers.append(memory)
            self._drop(sum(map(len, self._buffers)) - self._MAX_BYTES)

    def _drop(self, nbytes: int) -> None:
        while nbytes > 0 and self._buffers:
            nbytes -= len(self._buffers.pop(0))


_spares = _Spares()


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemoryError(
            f"the system has no {format_bytes(size)} for a buffer ({error.strerror or error})",
            remedy="free some memory, raise the limit of this process (ulimit -v), or give a smaller memory_budget",
        ) from error
    # First-touch faults of 4 KiB pages cost as much as the copy into them. A kernel without huge pages refuses.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def aligned_copy(data: bytes) -> npt.NDArray[np.uint8]:
    array = np.frombuffer(_map(max(len(data), 1)), np.uint8)[: len(data)]
    array[:] = np.frombuffer(data, np.uint8)
    return array
