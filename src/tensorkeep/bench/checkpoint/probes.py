"""What is measured and how: a durable save, a cold and a warm load, bytes on disk, memory.

A save is over when its files and their names are on the disk, so the clock of every format includes an ``fsync`` of
all that it wrote. A load is *cold* when ``mincore`` proves that none of the checkpoint lies in the page cache, and
*warm* when all of it was read just before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from tensorkeep.errors import StoreError, UnsupportedError
from tensorkeep.io.files import sync_directory
from tensorkeep.machine import available_bytes
from tensorkeep.units import format_bytes

COLD_SHARE = 0.01
"""A file counts as cold when at most this share of it lies in memory: the kernel may keep a page that it looks at."""

_READ_BYTES = 8 * 1024**2


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def durable_seconds(save: Callable[[], object], path: Path) -> float:
    """Return how long it takes until what ``save`` writes at ``path`` is on the disk.

    The disk is idle at the start: whatever was written before is flushed first, off the clock.
    """
    os.sync()
    begin = time.perf_counter()
    save()
    sync_tree(path)
    return time.perf_counter() - begin


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint, which is one file or a directory, in a fixed order."""
    return sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]


def sync_tree(path: Path) -> None:
    """Make a checkpoint durable: each file, each directory, and its name in the directory above."""
    for file in files_of(path):
        _sync_file(file)
    if path.is_dir():
        for directory in [found for found in path.rglob("*") if found.is_dir()] + [path]:
            sync_directory(directory)
    sync_directory(path.absolute().parent)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def size_on_disk(path: Path) -> int:
    """Return the bytes of a checkpoint's files, everything included."""
    return sum(file.stat().st_size for file in files_of(path))


def evict(path: Path) -> None:
    """Drop a checkpoint from the page cache, as far as the file system can."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(path: Path) -> None:
    """Read a checkpoint once, so that it lies in the page cache as far as that has room."""
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in files_of(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def resident_share(path: Path) -> float:
    """Return the share of a checkpoint's pages that lies in the page cache, 0 to 1, as ``mincore(2)`` says.

    Raises
    ------
    UnsupportedError
        If the kernel does not answer.
    """
    resident = pages = 0
    for file in files_of(path):
        for held in _residency(file):
            resident += int(np.count_nonzero(held & 1))
            pages += held.size
    return resident / pages if pages else 0.0


def _residency(path: Path) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size == 0:
            return
        held = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        with mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(held.ctypes.data)):
                reason = os.strerror(ctypes.get_errno())
                raise UnsupportedError(f"the kernel does not say what is in memory: {reason}", path=path)
        yield held


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def make_cold(path: Path) -> bool:
    """Drop a checkpoint from the page cache; return whether ``mincore`` proves that it is gone."""
    evict(path)
    return resident_share(path) <= COLD_SHARE


def release_memory() -> None:
    """Give memory that was freed back to the kernel, as far as the C library can.

    A checkpoint is loaded when a process starts. Without this a load is faster the more another one left in the heap.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_room(directory: Path, *, disk: int, memory: int) -> None:
    """Refuse to start what will not fit.

    Raises
    ------
    StoreError
        If the directory's file system has less than ``disk`` bytes free, or the machine less than ``memory``.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < disk:
        raise StoreError(
            f"{format_bytes(disk)} of disk are needed, {format_bytes(free)} are free",
            path=directory,
            remedy="choose another folder, or a smaller state",
        )
    if (available := available_bytes()) < memory:
        raise StoreError(
            f"{format_bytes(memory)} of memory are needed, {format_bytes(available)} are available",
            remedy="close what you do not need, or choose a smaller state",
        )
