"""One writer for a folder: a lock that the kernel drops with the process, so that none is ever stale.

The lock (``flock``) lies on the folder itself; there is no lock file to be left behind. It holds on one host, and
between hosts on network file systems that pass such locks on.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.errors import BusyError
from holdfast.io.commit import make_durable
from holdfast.io.files import store_error

_owned: set[Ownership] = set()


class Ownership:
    """The right to write in a folder, which one process has at a time.

    Raises
    ------
    BusyError
        If another process, or another owner in this one, has it.
    StoreError
        If the folder cannot be made or opened.
    """

    def __init__(self, folder: Path) -> None:
        try:
            make_durable(folder)
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise store_error(error, folder, "save here") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise BusyError(
                f"another CheckpointManager writes here{holder}",
                path=folder,
                remedy="wait for it to end, close it, or use a folder of its own for each run",
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise store_error(error, folder, "lock the folder") from error
        _owned.add(self)

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if self in _owned:
            # A child that was just forked still has the descriptor, and with it the lock, until it gets to close it.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        _owned.discard(self)
        os.close(self._fd)


def _holder(fd: int) -> str:
    """Return which process has the lock, in words, where the kernel tells."""
    status = os.fstat(fd)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
            own = " (this one)" if int(fields[4]) == os.getpid() else ""
            return f": process {fields[4]}{own}"
    return ""


def _release_in_child() -> None:
    # A child keeps what it inherits for as long as it lives, and with it the lock of a writer that was killed.
    for ownership in list(_owned):
        ownership._close()


os.register_at_fork(after_in_child=_release_in_child)
