"""Parallel positional reads of one file, from the page cache or around it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotFoundError
from tensorkeep.io.buffers import ALIGNMENT, round_down, round_up
from tensorkeep.io.files import Bytes, store_error, transfers


class SourceFile:
    """A file that many threads read at once.

    Large reads take what lies in the page cache from there, and the rest around it (O_DIRECT), which is the faster way
    from a fast disk: the kernel's copy and its small pages cost more than the read.

    Parameters
    ----------
    path : Path
        What to open.
    follow_links : bool
        Whether the last component may be a symbolic link. A checkpoint that we wrote holds none, so a link there
        leads out of it.
    directory : int, optional
        Descriptor of the directory that holds it, whatever that is called by now.
    page_cache : bool
        Read everything through the page cache, and so leave it there for whoever reads the file next.

    Attributes
    ----------
    size : int
        Bytes, as they were when it was opened.
    """

    def __init__(
        self, path: Path, *, follow_links: bool = True, page_cache: bool = True, directory: int | None = None
    ) -> None:
        self.path = path
        self._direct_fd = -1
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            self._fd = os.open(path if directory is None else path.name, flags, dir_fd=directory)
        except FileNotFoundError as error:
            raise NotFoundError("there is no such file", path=path) from error
        except OSError as error:
            if error.errno == errno.ELOOP and not follow_links:
                raise CorruptCheckpointError("is a symbolic link, which a checkpoint never holds", path=path) from error
            raise store_error(error, path, "open the file") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CorruptCheckpointError("is not a regular file", path=path)
        self.size = status.st_size
        self._residency: Residency | None = None
        if not page_cache and self.size:
            self._direct_fd = _reopen_direct(self._fd)
            self._residency = Residency(self._fd, self.size) if self._direct_fd >= 0 else None

    @property
    def fd_path(self) -> str:
        """A path that stays this file's, whatever its name becomes; for libraries that open by path."""
        return f"/proc/self/fd/{self._fd}"

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` from the file.

        Raises
        ------
        CorruptCheckpointError
            If the file ends before.
        """
        view = memoryview(out)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise store_error(error, self.path, "read") from error
            if count == 0:
                raise CorruptCheckpointError(
                    f"the file ends at byte {offset + done:,}, inside the data", path=self.path
                )
            done += count

    def bypasses_cache(self, offset: int, count: int) -> bool:
        """Say whether `fetch` would go around the page cache for a range: it may, and the range is not cached."""
        return self._residency is not None and not self._residency.holds(offset, count)

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the file, in a part of ``scratch``.

        Parameters
        ----------
        scratch : uint8 array
            Page-aligned, at least ``count`` and two pages long.
        """
        if not self.bypasses_cache(offset, count):
            self.read_into(offset, scratch[:count])
            return scratch[:count]
        first = round_down(offset)
        wanted = scratch[: round_up(offset + count) - first]
        self._read_pages(first, wanted, offset + count)
        return scratch[offset - first : offset - first + count]

    def _read_pages(self, first: int, out: Bytes, end: int) -> None:
        """Fill ``out`` from whole pages of the file, as far as byte ``end`` at least."""
        view = memoryview(out)
        done = 0
        while first + done < end:
            try:
                with transfers.turn:
                    count = os.preadv(self._direct_fd, [view[done:]], first + done)
            except OSError as error:
                raise store_error(error, self.path, "read") from error
            if first + done + count < end and count < ALIGNMENT:
                self.read_into(first + done, out[done : end - first])  # says where the file ends, if it does
                return
            done += round_down(count) if first + done + count < end else count

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the file."""
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._residency = None
        for name in ("_fd", "_direct_fd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _reopen_direct(fd: int) -> int:
    """Return a descriptor of the same file, whatever its name is now, that goes around the page cache; -1 if none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return -1


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
