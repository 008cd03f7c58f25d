"""A plain O_DIRECT write: the upper bound of what a format can reach on a disk.

It shares no code with the library's writer, so that both cannot have the same defect.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

from tensorkeep.errors import UnsupportedError
from tensorkeep.state.leaf import Bytes

BUFFER_BYTES = 16 * 1024**2


class DirectWriter:
    """Writes a file from page-aligned buffers that are filled in advance, one per thread.

    Parameters
    ----------
    sample : uint8 array
        What the buffers are filled with: bytes of the state, because some devices compress.
    threads : int
    """

    def __init__(self, sample: Bytes, threads: int) -> None:
        self._buffers = [_filled(sample, place) for place in range(threads)]

    def write(self, path: Path, nbytes: int) -> None:
        """Create the file, reserve and write ``nbytes`` rounded up to a page, and make it durable.

        Raises
        ------
        UnsupportedError
            If the file system refuses O_DIRECT.
        """
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise UnsupportedError("the file system refuses O_DIRECT") from error
            raise
        try:
            os.posix_fallocate(fd, 0, size)
            self._write_all(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write_all(self, fd: int, size: int) -> None:
        offsets = iter(range(0, size, BUFFER_BYTES))
        lock = threading.Lock()
        failures: list[BaseException] = []

        def work(buffer: mmap.mmap) -> None:
            view = memoryview(buffer)
            try:
                while True:
                    with lock:
                        start = next(offsets, None)
                    if start is None:
                        return
                    done, length = 0, min(BUFFER_BYTES, size - start)
                    while done < length:
                        done += os.pwrite(fd, view[done:length], start + done)
            except OSError as error:
                failures.append(error)
            finally:
                view.release()

        workers = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]


def _filled(sample: Bytes, place: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The kernel pins each page of a direct write; huge pages are fewer.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    start = place * BUFFER_BYTES % max(1, sample.size - BUFFER_BYTES)
    piece = sample[start : start + BUFFER_BYTES].tobytes()
    buffer.write((piece * -(-BUFFER_BYTES // len(piece)))[:BUFFER_BYTES])
    return buffer
