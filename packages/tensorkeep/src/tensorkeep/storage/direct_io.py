"""Parallel direct writes of one new file."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from tensorkeep.errors import StoreError
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage.buffers import ALIGNMENT, Buffer, round_down
from tensorkeep.storage.parallel import ForkSafeSemaphore, default_threads
from tensorkeep.storage.system_errors import close, store_error, store_errors

logger = logging.getLogger(__name__)

# Limits the transfers that run at once to half the threads. Threads that wait for one disk synchronise: all transfer,
# then all copy, hash or code while the disk is idle. With the limit, one half transfers while the other half computes.
transfers = ForkSafeSemaphore(lambda: max(2, default_threads() // 2))


class OutputOptions(TypedDict, total=False):
    most_bytes: int
    direct: bool  # whether the page cache is bypassed where this is possible; True by default
    progress: Callable[[int], None]  # called by each write with its `counts`


class DirectFile:
    """A new file that many threads write at once, at multiples of 4096 bytes. Raises StoreError."""

    def __init__(self, path: Path, **options: Unpack[OutputOptions]) -> None:
        self.path = path
        self._progress: Callable[[int], None] = options.get("progress", lambda count: None)
        self.direct = options.get("direct", True)
        self._lock = threading.Lock()
        # O_EXCL: two saves that race must never write one file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with store_errors(path, "create the file"):
            self._fd = self._open(flags)

    def _open(self, flags: int) -> int:
        # A buffered write costs a copy, and a flush that ``fsync`` waits for. O_DIRECT avoids both. Where it is refused
        # (tmpfs, some network file systems), the same calls go through the page cache.
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Linux creates the file before the file system refuses the flag.
                self.path.unlink(missing_ok=True)
                self._use_page_cache()
        return os.open(self.path, flags, 0o666)

    def _use_page_cache(self) -> None:
        self.direct = False
        logger.info("%s: the file system refuses direct I/O; writing through the page cache", self.path)

    def preallocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                # The file system cannot reserve space: a full disk is found while writing.
                return
            self.close()
            raise store_error(error, self.path, f"reserve {size:,} bytes") from error

    def write(self, offset: int, data: Bytes, memory: Buffer | None = None, *, counts: int = 0) -> None:
        """Offset, length and address must be multiples of 4096."""
        done = 0
        view = memoryview(data)
        while done < len(view):
            direct = self.direct  # another thread may fall back meanwhile
            try:
                # The permit covers one system call, so that other threads can copy, hash or code meanwhile.
                with transfers.permit:
                    written = os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._fall_back()
                    # The loop writes the same bytes again.
                    continue
                raise store_error(error, self.path, "write") from error
            if written <= 0:
                raise StoreError("cannot write: the kernel accepted no bytes", path=self.path)
            # After a short write, a direct write continues at the last page that was written in full.
            # Less than a page: a direct write must continue at a multiple of a page.
            if direct and written < ALIGNMENT:
                self._fall_back()
            done += round_down(written) if direct else written
        self._progress(counts)

    def _fall_back(self) -> None:
        # Some file systems accept the flag and refuse the first write. One thread falls back, others only retry.
        with self._lock:
            if self.direct:
                with store_errors(self.path, "open the file again, without direct I/O"):
                    buffered = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
                    try:
                        # The same number: other threads may be about to write to this descriptor.
                        os.dup2(buffered, self._fd, inheritable=False)
                    finally:
                        close(buffered)
                self._use_page_cache()

    def finish(self, size: int) -> None:
        try:
            with store_errors(self.path, "make the file durable"):
                # The last direct write was padded to a page.
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            close(fd)


def sync_directory(path: Path) -> None:
    """Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file that no other process changes, durably. Raises StoreError."""
    with store_errors(path, "write the file"):
        # O_NONBLOCK: opening a pipe would wait for its reader.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            size = os.fstat(fd).st_size
            cut = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            left = memoryview(b"\n" + lines if cut else lines)
            while left:
                written = os.pwrite(fd, left, size)
                left, size = left[written:], size + written
            os.fsync(fd)
        finally:
            close(fd)
        if size == len(lines):  # the file is new
            sync_directory(path.parent)


def write_small(path: Path, content: bytes) -> None:
    # Small content is not page-aligned, and the page cache costs nothing here.
    file = DirectFile(path, direct=False)
    try:
        file.write(0, np.frombuffer(content, np.uint8))
        file.finish(len(content))
    finally:
        file.close()
