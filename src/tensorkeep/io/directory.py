"""A directory read through one descriptor, so that all its files are of one checkpoint.

A save exchanges the old checkpoint for the new one and removes the old. Files opened by their paths could be of
different checkpoints: the manifest of the old one and data of the new one. Files opened in an open directory cannot.
"""

import os
from pathlib import Path

from tensorkeep.closing import Closing
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, NotFoundError, StoreError
from tensorkeep.io.files import Bytes, close, store_error
from tensorkeep.io.source_file import SourceFile

MAX_OPEN_FILES = 200
"""Files that one checkpoint keeps open: with two descriptors each, two checkpoints fit the usual limit of 1024."""


class Directory(Closing):
    """An open directory; a context manager.

    Raises NotFoundError if the path does not exist; StoreError if the operating system refuses to open it.
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
        """A path of this very directory, whatever its name becomes; for libraries that open by path."""
        return f"/proc/self/fd/{self._fd}"

    @property
    def stable_path(self) -> Path:
        """The same as a `Path`, for functions that take paths."""
        return Path(self.fd_path)

    def path_of(self, name: str) -> Path:
        """Return the path of a file of the directory."""
        return self.path / name

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        """Open a file of the directory; for the parameters and errors see `SourceFile`."""
        return SourceFile(self.path / name, follow_links=follow_links, page_cache=page_cache, directory=self._fd)

    def open_one_of(self, count: int, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        """Open one of ``count`` files; if these are more than `MAX_OPEN_FILES`, it is opened for each read instead."""
        if count <= MAX_OPEN_FILES:
            return self.open(name, follow_links=follow_links, page_cache=page_cache)
        return _ReopenedFile(self, name, follow_links=follow_links)

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file, not of what a link points to; raises OSError."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def was_replaced(self) -> bool:
        """Return whether something else, or nothing, is at the path now."""
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return True

    def close(self) -> None:
        """Close the directory, but not its open files; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            close(fd)


class _ReopenedFile(SourceFile):
    """A file that is opened for each read, through the page cache."""

    def __init__(self, directory: Directory, name: str, *, follow_links: bool) -> None:
        super().__init__(directory.path / name, follow_links=follow_links, directory=directory._fd)
        super().close()
        self._directory = directory
        self._follow_links = follow_links

    @property
    def fd_path(self) -> str:
        return f"{self._directory.fd_path}/{self.path.name}"

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
