"""One writer for a folder: a lock that the kernel drops with the process, so that none is ever stale.

The lock (``flock``) lies on the folder itself; there is no lock file to be left behind. It holds on one host: file
systems that hosts share do not pass on the locks of folders, so that a writer on another host is not seen.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from tensorkeep.errors import BusyError
from tensorkeep.io.commit import make_directory
from tensorkeep.io.files import store_error

# Weak, so that an owner that is dropped without a word lets go of its folder.
_owned: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The right to write in a folder, which one process has at a time; an owner that is collected loses it.

    Raises
    ------
    BusyError
        If another process, or another owner in this one, has it.
    StoreError
        If the folder cannot be made or opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            self._fd = _locked(folder)
            self._release = weakref.finalize(self, _unlock, self._fd, os.getpid())
            _owned.add(self)
            if self.is_held():
                return
            # The folder was removed, and perhaps made again, between the opening and the locking.
            self.release()

    def is_held(self) -> bool:
        """Say whether the folder that is owned is still the one at its path.

        It may have been removed and made again, by hand for example; somebody else may own the new one.

        Raises
        ------
        StoreError
            If the operating system does not let us look.
        """
        if not self._release.alive:
            return False
        try:
            here, there = os.fstat(self._fd), os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise store_error(error, self._folder, "look at the folder") from error
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        _owned.discard(self)
        self._release()


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder, which is made if it is missing."""
    try:
        make_directory(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise store_error(error, folder, "save here") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(fd)
        os.close(fd)
        raise BusyError(
            f"another CheckpointManager writes here{holder}",
            path=folder,
            remedy="wait for it to end, close it, or use a folder of its own for each run",
        ) from error
    except OSError as error:
        os.close(fd)
        raise store_error(error, folder, "lock the folder") from error
    return fd


def _unlock(fd: int, owner: int) -> None:
    # A child that was just forked still has the descriptor, and with it the lock, until it gets to close it; the lock
    # itself is the parent's, which alone may give it up.
    if os.getpid() == owner:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


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
        ownership.release()


os.register_at_fork(after_in_child=_release_in_child)
