"""Parallel positional reads and writes of one file.

Writing goes around the page cache (O_DIRECT) where the file system allows it: a buffered write of a checkpoint costs
a copy, then a flush that the caller waits for in ``fsync``. Where it is refused (tmpfs, some network file systems) the
same calls go through the page cache, and ``direct`` says so.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptCheckpointError, NotACheckpointError, StoreError
from holdfast.io.buffers import ALIGNMENT, round_down, round_up
from holdfast.io.parallel import default_threads
from holdfast.io.residency import Residency

Bytes = npt.NDArray[np.uint8]


class _Transfers:
    """How many transfers may be under way at once: as many as half the threads.

    Threads that wait for one disk fall into step: all transfer, then all copy, hash or code, and the disk idles. With
    turns, one half transfers while the other computes.
    """

    def __init__(self) -> None:
        self.renew()
        # A child that is forked while all turns are taken would wait for ever.
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.turn = threading.BoundedSemaphore(max(2, default_threads() // 2))


_transfers = _Transfers()


def store_error(error: OSError, path: str | os.PathLike[str], doing: str) -> StoreError:
    """Return the error of the operating system as ours, with what to do about it."""
    remedies = {
        errno.ENOSPC: "free some space, or save elsewhere",
        errno.EDQUOT: "free some of your quota, or save elsewhere",
        errno.EROFS: "the file system is read-only: save elsewhere",
        errno.EACCES: "check the permissions of the folder, or save elsewhere",
        errno.EPERM: "check the permissions of the folder, or save elsewhere",
        errno.EIO: "the device reports an I/O error: check it (dmesg) before you trust it",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
    reason = error.strerror or str(error)
    return StoreError(f"cannot {doing}: {reason}", path=path, remedy=remedies.get(error.errno or 0))


class DirectFile:
    """A new file that many threads write at once, at offsets and from memory that are multiples of 4096 bytes.

    Attributes
    ----------
    direct : bool
        Whether the page cache is bypassed.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self.direct = direct
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = self._open(flags)
        except OSError as error:
            raise store_error(error, path, "create the file") from error

    def _open(self, flags: int) -> int:
        if self.direct and hasattr(os, "O_DIRECT"):
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Linux creates the file before the file system gets to refuse the flag.
                self.path.unlink(missing_ok=True)
        self.direct = False
        return os.open(self.path, flags, 0o666)

    def preallocate(self, size: int) -> None:
        """Reserve ``size`` bytes, so that a full disk is found now and extents are laid out in one go.

        The file is closed if that fails.
        """
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return
            self.close()
            raise store_error(error, self.path, f"reserve {size:,} bytes") from error

    def write(self, offset: int, data: Bytes) -> None:
        """Write all of ``data``; offset, length and address are multiples of 4096."""
        done = 0
        view = memoryview(data)
        while done < len(view):
            direct = self.direct  # another thread may fall back meanwhile
            try:
                with _transfers.turn:
                    written = os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._fall_back()
                    continue
                raise store_error(error, self.path, "write") from error
            if written <= 0:
                raise StoreError("cannot write: the kernel accepted no bytes", path=self.path)
            # The kernel may write less than asked; a direct write goes on from a page that it still accepts.
            if direct and written < ALIGNMENT:
                self._fall_back()
            done += round_down(written) if direct else written

    def _fall_back(self) -> None:
        """Write through the page cache from now on: some file systems accept the flag and refuse the first write."""
        with self._lock:
            if self.direct:
                buffered = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(buffered, self._fd, inheritable=False)
                os.close(buffered)
                self.direct = False

    def finish(self, size: int) -> None:
        """Cut the file to ``size`` bytes, make it durable and close it."""
        try:
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
        except OSError as error:
            raise store_error(error, self.path, "make the file durable") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


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
            raise NotACheckpointError("there is no such file", path=path) from error
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

    def goes_direct(self, offset: int, count: int) -> bool:
        """Say whether `fetch` would go around the page cache for a range: it may, and the range is not cached."""
        return self._residency is not None and not self._residency.holds(offset, count)

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the file, in a part of ``scratch``.

        Parameters
        ----------
        scratch : uint8 array
            Page-aligned, at least ``count`` and two pages long.
        """
        if not self.goes_direct(offset, count):
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
                with _transfers.turn:
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


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_small(path: Path, content: bytes) -> None:
    """Create a small file with this content and make it durable."""
    file = DirectFile(path, direct=False)
    try:
        file.write(0, np.frombuffer(content, np.uint8))
        file.finish(len(content))
    finally:
        file.close()
