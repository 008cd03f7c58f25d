"""Errors of the operating system as StoreError, with a remedy."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.errors import PathLike, StoreError, TensorkeepError

_REMEDIES = {
    errno.ENOSPC: "free some space, or save elsewhere",
    errno.EDQUOT: "free some of your quota, or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions of the path and of its parent folders"),
    errno.EIO: "the device reports an I/O error: check it (dmesg) before you trust it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "close some files, or raise the limit of open files (ulimit -n)",
}


def store_error(error: OSError, path: PathLike, action: str) -> StoreError:
    """Return a StoreError "cannot <action>". Raises the error itself if it comes from a signal handler."""
    if isinstance(error, TimeoutError) and error.errno is None:  # an error of the system has a number
        raise error
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return StoreError(f"cannot {action}: {reason}", path=path, remedy=remedy, errno=error.errno)


@contextmanager
def store_errors(path: PathLike, action: str) -> Iterator[None]:
    """Raise errors of the operating system as `store_error` does; errors of this package, also OSErrors, pass."""
    try:
        yield
    except TensorkeepError:
        raise
    except OSError as error:
        raise store_error(error, path, action) from error


def close(fd: int) -> None:
    try:
        # What was written was synced before, or is given up: a late error of the system changes nothing.
        os.close(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise  # a bug: the descriptor was closed before, and its number may belong to another file now
