"""The first touch of new memory, with the page size that is the faster one at the moment.

New memory has no pages yet; the kernel provides and clears each when it is first written. That takes longer than
copying a file from the page cache, and which page size is faster changes from one moment to the next. On a machine with
free memory, huge pages (2 MiB) are ready four times as fast as small ones (4 KiB). On a virtual machine that has
returned its free memory to the host, each huge page must be fetched back whole, and takes four times as long as small
pages, which the kernel takes from fragments that were not returned. So both sizes are timed while they are used.
"""

import ctypes
import mmap
import time
from typing import Literal

from tensorkeep.io.buffers import round_down, round_up
from tensorkeep.io.files import Bytes
from tensorkeep.machine import libc

_HUGE_PAGE = 2 * 1024**2
_FIRST_INTERVAL = 8
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it

PageSize = Literal["small", "huge"]


class NewPages:
    """Makes the pages of new memory present, for the reads of one load; from any thread.

    A piece of 2 MiB at a time is populated by ``madvise(MADV_POPULATE_WRITE)``, with the page size that took less
    processor time the last time. The slower one is timed again after 8, 16, 32, ... pieces. A kernel before Linux 5.14
    populates nothing, and the memory is then touched by the read itself.
    """

    def __init__(self) -> None:
        # Processor seconds of the last piece, 0 before the first, so that both are tried. Threads share them without a
        # lock: an update that is lost is soon measured again.
        self._seconds: dict[PageSize, float] = {"small": 0.0, "huge": 0.0}
        self._interval = self._pieces_left = _FIRST_INTERVAL

    def populate(self, memory: Bytes) -> None:
        """Make the pages of some memory present; what is present already stays as it is."""
        begin = memory.ctypes.data
        end = begin + len(memory)
        first, last = round_up(begin, _HUGE_PAGE), round_down(end, _HUGE_PAGE)
        if first >= last:
            return
        advised: PageSize = "small"
        for address in range(first, last, _HUGE_PAGE):
            wanted = self._choose()
            if wanted != advised:
                _advise(address, last, mmap.MADV_HUGEPAGE if wanted == "huge" else mmap.MADV_NOHUGEPAGE)
                advised = wanted
            started = time.thread_time()
            _advise(address, address + _HUGE_PAGE, _MADV_POPULATE_WRITE)
            self._seconds[wanted] = time.thread_time() - started
        for start, stop in ((round_up(begin), first), (last, round_down(end))):
            _advise(start, stop, _MADV_POPULATE_WRITE)

    def _choose(self) -> PageSize:
        faster, slower = sorted(self._seconds, key=self._seconds.__getitem__)
        self._pieces_left -= 1
        if self._pieces_left > 0:
            return faster
        self._interval *= 2
        self._pieces_left = self._interval
        return slower


def _advise(start: int, stop: int, advice: int) -> None:
    # Advice that the kernel declines changes only the speed.
    if start < stop:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
