"""Probing files and folders of an unknown format; an unreadable path is an error.

If the operating system refuses to read a path, that is an error; the path does not count as missing.
"""

import errno
import os
import stat
from pathlib import Path

from tensorkeep.errors import StoreError

_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO))
"""Error numbers of paths without anything to read (ENXIO: a socket)."""


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    """Return the mode bits of a path, for the functions of `stat`; 0 if nothing is there.

    Raises StoreError if the operating system refuses access.
    """
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise _refused(error, path) from error


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; an empty list if it is not a directory.

    Raises StoreError if the operating system refuses access.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        raise _refused(error, directory) from error


def first_bytes(path: Path, count: int) -> bytes | None:
    """Return the first bytes of a file; None if it is not a regular file.

    Raises StoreError if the operating system refuses access.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _refused(error, path) from error
    try:
        return os.read(fd, count) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError as error:
        raise _refused(error, path) from error
    finally:
        os.close(fd)


def _refused(error: OSError, path: Path) -> StoreError:
    denied = error.errno in (errno.EACCES, errno.EPERM)
    remedy = "check its permissions, and those of the folders that it lies in" if denied else None
    return StoreError(f"cannot inspect it: {error.strerror or error}", path=path, remedy=remedy)
