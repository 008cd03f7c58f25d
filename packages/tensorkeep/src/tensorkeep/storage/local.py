"""Files of a disk, read around the page cache, and directories read through one descriptor."""

import ctypes
import errno
import logging
import mmap
import os
import stat
from pathlib import Path
from typing import Unpack

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, NotFoundError, StoreError
from tensorkeep.machine import libc
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage.base import CommitOptions, Directory, OutputFile, PendingCommit, SourceFile, Storage
from tensorkeep.storage.buffers import ALIGNMENT, BufferPool, round_down, round_up
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import DirectFile, OutputOptions, append_lines, transfers, write_small
from tensorkeep.storage.parallel import Cancellation
from tensorkeep.storage.system_errors import close, store_error

logger = logging.getLogger(__name__)
# `bypasses_cache` looks at one page in every so many bytes: the kernel caches and drops much longer runs.
_SAMPLE_BYTES = 1024**2


class LocalFile(SourceFile):
    """Raises NotFoundError; CorruptCheckpointError if it is not a regular file, or a link without ``follow_links``."""

    def __init__(
        self, path: Path, *, follow_links: bool = True, page_cache: bool = True, directory: int | None = None
    ) -> None:
        self.path = path
        self._direct_fd = -1
        # The whole file, mapped for `mincore` only; the array keeps the mapping alive and has its address.
        self._pages: Bytes | None = None
        self._mapped: Bytes | None = None
        # O_NONBLOCK: opening a pipe would wait for its writer. O_NOFOLLOW: a checkpoint has no links, so a link leads
        # to foreign files.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            # Relative to the open directory, whatever its path leads to now.
            self._fd = os.open(path if directory is None else path.name, flags, dir_fd=directory)
        except FileNotFoundError as error:
            raise NotFoundError("there is no such file", path=path) from error
        except OSError as error:
            if error.errno == errno.ELOOP and not follow_links:
                text = "is a symbolic link, which a checkpoint never holds"
                remedy = "copy the folder with cp -rL; a download from the Hugging Face hub needs local_dir="
                raise CorruptCheckpointError(text, path=path, remedy=remedy) from error
            raise store_error(error, path, "open the file") from error
        try:
            self.status = os.fstat(self._fd)
        except OSError as error:
            self.close()
            raise store_error(error, path, "look at the file") from error
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            raise CorruptCheckpointError("is not a regular file", path=path)
        self.size = self.status.st_size
        if page_cache or not self.size:
            return
        try:
            # A second descriptor, by /proc: the path may lead to another file now.
            self._direct_fd = os.open(self.fd_path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            self._pages = np.frombuffer(mmap.mmap(self._fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        except OSError as error:
            logger.info("%s: no direct I/O (%s); reading through the page cache", self.path, error.strerror)

    @property
    def fd_path(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def read_into(self, offset: int, out: Bytes) -> None:
        view = memoryview(out)
        done = 0
        while done < len(view):
            try:
                # preadv, so that the bytes go to `out` without an intermediate copy.
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise store_error(error, self.path, "read") from error
            if count == 0:
                raise CorruptCheckpointError(
                    f"the file ends at byte {offset + done:,}, inside the data", path=self.path
                )
            done += count

    def bypasses_cache(self, offset: int, count: int) -> bool:
        # Whether direct reads work and the range is not cached.
        if self._pages is None:
            return False
        # ``mincore(2)`` answers without reading. A read with RWF_NOWAIT would start read-ahead, and the disk would read
        # the same bytes twice. The kernel may report all pages of another user's file as cached.
        places = [*range(offset, offset + count, _SAMPLE_BYTES), offset + count - 1]
        return not all(_is_cached(self._pages.ctypes.data + round_down(place, mmap.PAGESIZE)) for place in places)

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        # A copy from the page cache is faster than the disk. What is not cached is read around the cache: the kernel's
        # copy and its small pages take longer than a fast disk.
        if not self.bypasses_cache(offset, count):
            return super().fetch(offset, count, scratch)
        first = round_down(offset)
        self._read_pages(first, scratch[: round_up(offset + count) - first], offset + count)
        return scratch[offset - first : offset - first + count]

    def _read_pages(self, first: int, out: Bytes, end: int) -> None:
        """Fill ``out`` from whole pages, at least to byte ``end`` of the file."""
        view = memoryview(out)
        done = 0
        while first + done < end:
            try:
                with transfers.permit:
                    count = os.preadv(self._direct_fd, [view[done:]], first + done)
            except OSError as error:
                raise store_error(error, self.path, "read") from error
            # A short direct read within a page: continue through the page cache, which has no alignment.
            if first + done + count < end and count < ALIGNMENT:
                self.read_into(first + done, out[done : end - first])  # raises if the file ends here
                return
            done += round_down(count) if first + done + count < end else count

    def map_private(self) -> Bytes:
        """The file as private memory, read when used. A page behind a truncated end kills the process."""
        if self._mapped is None:
            import torch

            # Unlike Python's, torch's mapping does not keep a descriptor open for as long as it lives.
            try:
                mapped = torch.from_file(self.fd_path, shared=False, size=self.size, dtype=torch.uint8)
            except RuntimeError as error:
                remedy = "load it without mmap"
                raise StoreError(f"cannot be mapped ({error})", path=self.path, remedy=remedy) from error
            self._mapped = mapped.numpy()
        return self._mapped

    def close(self) -> None:
        self._pages = self._mapped = None
        descriptors, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, -1
        for fd in descriptors:
            if fd >= 0:
                close(fd)


def _is_cached(address: int) -> bool:
    # An error counts as "not cached": a direct read is always correct.
    answer = (ctypes.c_ubyte * 1)()
    return libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), answer) == 0 and bool(answer[0] & 1)


# Files that one checkpoint keeps open: with two descriptors each, two checkpoints fit the usual limit of 1024.
MAX_OPEN_FILES = 200


class LocalDirectory(Directory):
    """Raises NotFoundError if the path does not exist; StoreError if the operating system refuses to open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_PATH: names are looked up in it even if it cannot be listed.
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError("there is no such directory", path=path) from error
        except OSError as error:
            raise store_error(error, path, "open the directory") from error

    @property
    def stable_path(self) -> Path:
        return Path(f"/proc/self/fd/{self._fd}")

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True, one_of: int = 1) -> SourceFile:
        # Very many files would exceed the limit of open files.
        if one_of > MAX_OPEN_FILES:
            return _ReopenedFile(self, name, follow_links=follow_links)
        return LocalFile(self.path / name, follow_links=follow_links, page_cache=page_cache, directory=self._fd)

    def status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def was_replaced(self) -> bool:
        # Compared by device and inode: a directory that was renamed into its place has another inode.
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return True

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            close(fd)


class _ReopenedFile(LocalFile):
    """A file that is opened for each read, through the page cache."""

    def __init__(self, directory: LocalDirectory, name: str, *, follow_links: bool) -> None:
        super().__init__(directory.path / name, follow_links=follow_links, directory=directory._fd)
        # The status and the size remain; the descriptor does not.
        super().close()
        self._directory = directory
        self._follow_links = follow_links

    @property
    def fd_path(self) -> str:
        return f"{self._directory.stable_path}/{self.path.name}"

    def read_into(self, offset: int, out: Bytes) -> None:
        try:
            with self._directory.open(self.path.name, follow_links=self._follow_links) as file:
                file.read_into(offset, out)
        # A file that vanished has two reasons: the checkpoint was replaced as a whole, or it is damaged.
        except NotACheckpointError as error:
            if self._directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self._directory.path, remedy="read it again"
                ) from error
            raise CorruptCheckpointError("the file has been removed", path=self.path) from error


# Error numbers of paths without anything to read (ENXIO: a socket, ELOOP: links that lead to one another).
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO, errno.ELOOP))


def _raise_unless_absent(error: OSError, path: Path) -> None:
    # A path that the system refuses to read does not count as missing.
    if error.errno not in _ABSENT:
        raise store_error(error, path, "inspect it") from error


class LocalStorage(Storage):
    def mode(self, path: Path, *, follow_links: bool = True) -> int:
        try:
            return os.stat(path, follow_symlinks=follow_links).st_mode
        except OSError as error:
            _raise_unless_absent(error, path)
            return 0

    def names(self, directory: Path) -> list[str]:
        try:
            with os.scandir(directory) as entries:
                return sorted(entry.name for entry in entries)
        except OSError as error:
            _raise_unless_absent(error, directory)
            return []

    def folders(self, directory: Path) -> list[str]:
        return [name for name in self.names(directory) if stat.S_ISDIR(self.mode(directory / name))]

    def first_bytes(self, path: Path, count: int) -> bytes | None:
        try:
            # O_NONBLOCK: opening a pipe would wait for its writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return os.read(fd, count) if stat.S_ISREG(os.fstat(fd).st_mode) else None
            finally:
                close(fd)
        except OSError as error:
            _raise_unless_absent(error, path)
            return None

    def is_taken(self, path: Path) -> bool:
        return os.path.lexists(path)

    def open_file(self, path: Path) -> SourceFile:
        return LocalFile(path)

    def open_directory(self, path: Path) -> Directory:
        return LocalDirectory(path)

    def write_small(self, path: Path, content: bytes) -> None:
        write_small(path, content)

    def append_lines(self, path: Path, lines: bytes) -> None:
        append_lines(path, lines)

    def create(
        self, path: Path, pool: BufferPool, cancellation: Cancellation, **options: Unpack[OutputOptions]
    ) -> OutputFile:
        return DirectFile(path, **options)

    def check_writable(self, path: Path) -> None: ...

    def commit(self, destination: Path, *, directory: bool, **options: Unpack[CommitOptions]) -> PendingCommit:
        return Commit(destination, directory=directory, **options)
