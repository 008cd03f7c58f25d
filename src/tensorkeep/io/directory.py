"""A directory held open, so that its files are its own whatever happens to its name.

A save exchanges the old checkpoint for the new one and removes the old. Opened by their paths, a manifest and the files
that it lists could be of different checkpoints; opened in a directory that is held, they cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, NotFoundError, StoreError, TensorkeepError
from tensorkeep.io.files import Bytes, store_error
from tensorkeep.io.source_file import SourceFile

MAX_OPEN_FILES = 200
"""Files that one checkpoint keeps open: two descriptors each, and two checkpoints, within the usual limit of 1024."""

T = TypeVar("T")


class Readable(Protocol):
    """A file that many threads read at once; see `tensorkeep.io.files.SourceFile`."""

    path: Path
    size: int

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` from the file."""

    def bypasses_cache(self, offset: int, count: int) -> bool:
        """Say whether `fetch` would go around the page cache for a range."""

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the file, in a part of ``scratch``."""

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the file."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class Directory:
    """A directory that is read.

    Raises
    ------
    NotACheckpointError
        If there is none at the path.
    StoreError
        If the operating system refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError("there is no such directory", path=path) from error
        except OSError as error:
            raise store_error(error, path, "open the directory") from error

    @property
    def fd_path(self) -> str:
        """A path that stays this directory's, whatever its name becomes; for libraries that open by path."""
        return f"/proc/self/fd/{self._fd}"

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        """Open one of its files; see `SourceFile`, whose errors are raised."""
        return SourceFile(self.path / name, follow_links=follow_links, page_cache=page_cache, directory=self._fd)

    def open_one_of(self, count: int, name: str, *, follow_links: bool = True, page_cache: bool = True) -> Readable:
        """Open a file for as long as the checkpoint is open, or for each read where it has too many files for that."""
        if count <= MAX_OPEN_FILES:
            return self.open(name, follow_links=follow_links, page_cache=page_cache)
        return _ReopenedFile(self, name, follow_links=follow_links)

    def was_replaced(self) -> bool:
        """Say whether something else, or nothing, is at the path by now."""
        here = os.fstat(self._fd)
        try:
            there = os.stat(self.path)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Close the directory, but for the files that are open; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _ReopenedFile:
    """A file that is opened for each read, through the page cache."""

    def __init__(self, directory: Directory, name: str, *, follow_links: bool) -> None:
        self._directory = directory
        self._follow_links = follow_links
        self.path = directory.path / name
        with directory.open(name, follow_links=follow_links) as file:
            self.size = file.size

    def read_into(self, offset: int, out: Bytes) -> None:
        try:
            with self._directory.open(self.path.name, follow_links=self._follow_links) as file:
                file.read_into(offset, out)
        except NotACheckpointError as error:
            if self._directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self._directory.path, remedy="read it again"
                ) from error
            raise CorruptCheckpointError("the file has been removed", path=self.path) from error

    def bypasses_cache(self, offset: int, count: int) -> bool:
        return False

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        self.read_into(offset, scratch[:count])
        return scratch[:count]

    def read(self, offset: int, count: int) -> bytes:
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def close(self) -> None:
        pass


def read_directory(path: Path, read: Callable[[Directory], T]) -> T:
    """Call a function with a directory held open; once more, if that failed because another took its place meanwhile.

    What the function returns must close the directory, which stays open unless it raises.
    """
    while True:
        directory = Directory(path)
        try:
            return read(directory)
        except BaseException as error:
            again = isinstance(error, TensorkeepError) and directory.was_replaced()
            directory.close()
            if not again:
                raise
