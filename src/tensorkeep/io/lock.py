"""The lock of a folder, for one writer; the kernel releases it with the process.

The lock (``flock``) is on the folder itself, so that no lock file is left behind. It holds on one host: file systems
that hosts share do not pass on locks of folders, so a writer on another host is not detected.
"""

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from tensorkeep import machine
from tensorkeep.errors import BusyError
from tensorkeep.io.commit import make_directory
from tensorkeep.io.files import close, store_error, store_errors

# Weak, so that a lock without references releases its folder.
_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class FolderLock:
    """The exclusive right to write in a folder, created if it is missing; released when the object is collected.

    Raises BusyError if another process, or another lock in this one, holds the folder; StoreError if the folder cannot
    be created or opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            self._fd = _lock(folder)
            self._release = weakref.finalize(self, _unlock, self._fd, os.getpid())
            _locks.add(self)
            try:
                if self.is_valid():
                    return
            except BaseException:
                self.release()  # the traceback may live on, and the lock with it
                raise
            # The folder was removed, and perhaps created again, between the opening and the locking.
            self.release()

    def is_valid(self) -> bool:
        """Return whether the locked folder is still the one at its path.

        It may have been removed and created again, by hand for example, and another process may hold the new one.

        Raises StoreError if the operating system refuses to look.
        """
        if not self._release.alive:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise store_error(error, self._folder, "look at the folder") from error

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        _locks.discard(self)
        self._release()


def _lock(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder, which is created if it is missing."""
    with store_errors(folder, "save here"):
        make_directory(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = None
        with suppress(OSError):  # its number is for the message only
            holder = machine.lock_holder(fd)
        close(fd)
        own = " (this one)" if holder == os.getpid() else ""
        raise BusyError(
            "another CheckpointManager writes here" + (f": process {holder}{own}" if holder else ""),
            path=folder,
            remedy="wait for it to end, close it, or use a folder of its own for each run",
        ) from error
    except OSError as error:
        close(fd)
        raise store_error(error, folder, "lock the folder") from error
    return fd


def _unlock(fd: int, owner: int) -> None:
    # A forked child inherits the descriptor, but the lock is the parent's, which alone may release it.
    if os.getpid() == owner:
        with suppress(OSError):  # to close it releases it, too
            fcntl.flock(fd, fcntl.LOCK_UN)
    close(fd)


def _release_in_child() -> None:
    # Otherwise the child would keep the lock of a writer that was killed for as long as it lives.
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
