"""Probing files and folders of an unknown format, on a file system or in an object store.

A path that the operating system refuses to read does not count as missing: every function raises StoreError.
"""

import errno
import os
import stat
from pathlib import Path

from tensorkeep.io.files import store_error
from tensorkeep.io.places import store_first_bytes, store_folders, store_mode, store_names
from tensorkeep.paths import StorePath

_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO))
"""Error numbers of paths without anything to read (ENXIO: a socket)."""


def _raise_unless_absent(error: OSError, path: Path) -> None:
    if error.errno not in _ABSENT:
        raise store_error(error, path, "inspect it") from error


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    """Return the mode bits of a path, for the functions of `stat`; 0 if nothing is there."""
    if isinstance(path, StorePath):
        return store_mode(path)
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except OSError as error:
        _raise_unless_absent(error, path)
        return 0


def exists(path: Path) -> bool:
    """Return whether something is at a path, be it a link to nothing."""
    return file_mode(path, follow_links=False) != 0


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; an empty list if it is not a directory."""
    if isinstance(directory, StorePath):
        return store_names(directory)
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        _raise_unless_absent(error, directory)
        return []


def folders_in(directory: Path) -> list[str]:
    """Return the names of the directories in a directory, sorted."""
    if isinstance(directory, StorePath):
        return store_folders(directory)
    return [name for name in names_in(directory) if stat.S_ISDIR(file_mode(directory / name))]


def first_bytes(path: Path, count: int) -> bytes | None:
    """Return the first bytes of a file; None if it is not a regular file."""
    if isinstance(path, StorePath):
        return store_first_bytes(path, count)
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, count) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)
    except OSError as error:
        _raise_unless_absent(error, path)
        return None
