"""Whether a range of a file lies in the page cache, asked without reading it.

A read that is told not to wait (``RWF_NOWAIT``) is no such question: it starts the read-ahead of what it does not find,
and the disk then reads the same bytes twice.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import numpy as np

from tensorkeep.io.buffers import round_down

_SAMPLE_BYTES = 1024**2
"""One page is asked about in every so many bytes: the cache is filled and emptied in longer runs than single pages."""


class Residency:
    """The page-cache residency of an open file, by ``mincore(2)`` on a mapping that is never touched.

    Parameters
    ----------
    fd : int
    size : int
        Bytes of the file; not zero.
    """

    def __init__(self, fd: int, size: int) -> None:
        # The array keeps the mapping alive, and knows its address.
        self._pages = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)

    def holds(self, offset: int, count: int) -> bool:
        """Say whether all sampled pages of a range are cached.

        A kernel that does not tell, as it need not of another user's file, says so of all.
        """
        places = [*range(offset, offset + count, _SAMPLE_BYTES), offset + count - 1]
        return all(self._holds_page(round_down(place, mmap.PAGESIZE)) for place in places)

    def _holds_page(self, place: int) -> bool:
        answer = (ctypes.c_ubyte * 1)()
        address = ctypes.c_void_p(self._pages.ctypes.data + place)
        return _libc().mincore(address, ctypes.c_size_t(1), answer) == 0 and bool(answer[0] & 1)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
