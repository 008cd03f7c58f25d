"""Files of a checkpoint: sync them, drop them from the page cache or read them into it, and check free space."""

import ctypes
import mmap
import os
import shutil
from pathlib import Path

import numpy as np

from tensorkeep.errors import StoreError, UnsupportedError
from tensorkeep.ext import format_bytes, machine
from tensorkeep.ext.storage import sync_directory

# The fraction of a cold checkpoint that may be in the page cache: the kernel may keep a page that it is using.
COLD_FRACTION = 0.01

# The folder of the checkpoints that a run keeps, on the measured disk.
KEPT = "bench-checkpoints"

_READ_BYTES = 8 * 1024**2


def files_of(path: Path) -> list[Path]:
    return sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]


def stored_bytes(path: Path) -> float:
    return float(sum(file.stat().st_size for file in files_of(path)))


def sync_tree(path: Path) -> None:
    """Sync a checkpoint: each file, each directory, and the directory that holds it."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        # A new file is durable only when its directory entry is, too.
        for directory in (*(found for found in path.rglob("*") if found.is_dir()), path):
            sync_directory(directory)
    # The entry of the checkpoint itself is in the folder above.
    sync_directory(path.absolute().parent)


def evict(path: Path) -> None:
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # The kernel keeps dirty pages.
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in files_of(path):
        # Unbuffered, into one buffer: the bytes are not kept.
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def cached_fraction(path: Path) -> float:
    """Return the fraction of a checkpoint's pages in the page cache, 0 to 1; UnsupportedError if unknown."""
    # The lowest bit of a flag says that the page is resident; the others are reserved.
    flags = np.concatenate([np.zeros(0, np.uint8), *map(_page_flags, files_of(path))])
    return float(np.mean(flags & 1)) if flags.size else 0.0


def _page_flags(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    size = path.stat().st_size
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    # An empty file cannot be mapped.
    if size == 0:
        return flags
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if machine.libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)):
            raise UnsupportedError(f"mincore(2) failed: {os.strerror(ctypes.get_errno())}", path=path)
    return flags


def make_cold(path: Path) -> bool:
    """Drop a checkpoint from the page cache; return whether ``mincore(2)`` confirms it."""
    evict(path)
    return cached_fraction(path) <= COLD_FRACTION


def remove(path: Path) -> None:
    # A link to a folder is removed, never the content of the folder.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def release_memory() -> None:
    """Return freed memory to the kernel, where the C library can."""
    # A checkpoint is usually loaded when a process starts. Free memory that an earlier load left in the heap would make
    # a later one faster.
    if hasattr(machine.libc(), "malloc_trim"):
        machine.libc().malloc_trim(0)


def check_capacity(directory: Path, *, disk: int, memory: int) -> None:
    """Raise StoreError unless ``disk`` bytes are free in a folder, and ``memory`` bytes are available."""
    # Checked before the measurement, which would otherwise end with a full disk after minutes.
    if (free := shutil.disk_usage(directory).free) < disk:
        raise StoreError(
            f"the measurement needs {format_bytes(disk)} on the disk, {format_bytes(free)} are free",
            path=directory,
            remedy="choose another folder or a smaller state",
        )
    if (available := machine.available_bytes()) < memory:
        raise StoreError(
            f"the measurement needs {format_bytes(memory)} of memory, {format_bytes(available)} are available",
            remedy="close other programs or choose a smaller state",
        )
