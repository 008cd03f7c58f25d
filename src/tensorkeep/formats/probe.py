"""How files and folders are looked at before their format is known, without taking a refusal for an absence."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tensorkeep.errors import StoreError

_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO))
"""What the operating system says of a path where nothing is that could be read (ENXIO: a socket)."""


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    """Return the mode bits of what is at a path, for the functions of `stat`; 0 if nothing is there.

    Raises
    ------
    StoreError
        If the operating system does not let one look.
    """
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise _refused(error, path) from error


def names_in(directory: Path) -> list[str]:
    """Return what lies in a directory, sorted; nothing if it is none.

    Raises
    ------
    StoreError
        If the operating system does not let one look.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        raise _refused(error, directory) from error


def first_bytes(path: Path, count: int) -> bytes | None:
    """Return how a file begins; None where there is no regular file.

    Raises
    ------
    StoreError
        If there may be one that the operating system does not let one read.
    """
    try:
        # A pipe without a writer would be waited for.
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
    return StoreError(f"cannot look at it: {error.strerror or error}", path=path, remedy=remedy)
