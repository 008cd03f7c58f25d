"""The only place that makes a checkpoint visible.

Everything is written under a temporary name beside the destination. `Commit.publish` makes that durable, then one
rename makes it visible, and the parent directory is made durable in turn. Whatever kills the process, at any
instruction, the destination holds what it held before or the new checkpoint, whole.

A temporary name is held by a lock (``flock``) on the temporary itself, which the kernel drops with the process. The
next save to the same destination removes the temporaries whose lock is free, so what a killed writer left behind goes
and what a live one writes stays. Two writers that save to one destination at the same time: the second is told.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from holdfast.errors import BusyError, DestinationExistsError, StoreError
from holdfast.io.files import store_error, sync_directory

SUFFIX = ".holdfast-tmp"

_CHOOSE = "choose another path, or ask to overwrite it (overwrite=True, --overwrite)"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


class Commit:
    """A checkpoint that is being written: a context manager that removes what was not published.

    Parameters
    ----------
    destination : Path
        Where the checkpoint shall appear; missing parents are created.
    directory : bool
        Whether the checkpoint is a directory or a single file.
    overwrite : bool
        Whether something that is there already may be replaced.
    replaceable : callable
        Says of an existing path whether it is a checkpoint of this format; nothing else is ever replaced.

    Attributes
    ----------
    path : Path
        The temporary: an existing empty directory, or the name of a file that does not exist yet.

    Raises
    ------
    DestinationExistsError
        If something is there and may not be replaced.
    BusyError
        If a live process is saving there.
    StoreError
        If the operating system refuses.
    """

    def __init__(
        self, destination: Path, *, directory: bool, overwrite: bool, replaceable: Callable[[Path], bool]
    ) -> None:
        self.destination = Path(os.path.abspath(destination))
        self.overwrite = overwrite
        self._directory = directory
        self._replaceable = replaceable
        self._lock = -1
        self._holder = self.destination
        self.path = self.destination

    def __enter__(self) -> Self:
        self._check_destination()
        parent = self.destination.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.destination)
            self._hold(parent)
        except OSError as error:
            raise store_error(error, self.destination, "save here") from error
        return self

    def _check_destination(self) -> None:
        if not os.path.lexists(self.destination):
            return
        if not self.overwrite:
            raise DestinationExistsError("exists already", path=self.destination, remedy=_CHOOSE)
        if not self._replaceable(self.destination):
            raise DestinationExistsError(
                "is not a checkpoint of this format, so it is not replaced",
                path=self.destination,
                remedy="choose another path, or remove it yourself",
            )

    def _hold(self, parent: Path) -> None:
        # The lock lies on a directory, also for a single file: the file itself is renamed, and with it the lock.
        while True:
            holder = parent / f"{_prefix(self.destination)}{secrets.token_hex(4)}{SUFFIX}"
            holder.mkdir()
            lock = os.open(holder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Between mkdir and flock another writer may have taken it for a dead one's, and removed it.
            if os.path.lexists(holder):
                break
            os.close(lock)
        self._lock, self._holder = lock, holder
        self.path = holder if self._directory else holder / self.destination.name

    def publish(self) -> None:
        """Make what lies at `path`, whose files are durable already, visible at the destination."""
        try:
            if self._directory:
                sync_directory(self.path)
                self._publish_directory()
            else:
                self._publish_file()
            sync_directory(self.destination.parent)
        except FileExistsError as error:
            raise DestinationExistsError(
                "something appeared here while it was being saved",
                path=self.destination,
                remedy=_CHOOSE,
            ) from error
        except OSError as error:
            raise store_error(error, self.destination, "make the checkpoint visible") from error

    def _publish_file(self) -> None:
        if self.overwrite:
            os.replace(self.path, self.destination)
        else:
            # Unlike a rename, a link refuses to replace, on every file system that has links.
            try:
                os.link(self.path, self.destination)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
                _rename(self.path, self.destination, _RENAME_NOREPLACE)

    def _publish_directory(self) -> None:
        if not os.path.lexists(self.destination):
            _rename(self.path, self.destination, _RENAME_NOREPLACE)
            self._holder = self.destination
        elif not self.overwrite:
            raise FileExistsError(errno.EEXIST, "exists", str(self.destination))
        else:
            # After the exchange the old checkpoint lies under the temporary name, and goes with it.
            _rename(self.path, self.destination, _RENAME_EXCHANGE)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._holder != self.destination:
                shutil.rmtree(self._holder, ignore_errors=True)
        finally:
            # Also when the removal is interrupted: a lock that stays would make this process its own rival.
            os.close(self._lock)


def remove_stale(destination: Path) -> list[Path]:
    """Remove the temporaries that dead writers left beside a destination, and return them.

    Raises
    ------
    BusyError
        If the writer of one is alive.
    """
    removed = []
    prefix = _prefix(destination)
    for entry in sorted(os.scandir(destination.parent), key=lambda entry: entry.name):
        if not (entry.name.startswith(prefix) and entry.name.endswith(SUFFIX) and entry.is_dir(follow_symlinks=False)):
            continue
        if not _remove_unless_held(Path(entry.path)):
            raise BusyError(
                f"another process is saving here (see {entry.name})",
                path=destination,
                remedy="wait for it to end, or save elsewhere",
            )
        removed.append(Path(entry.path))
    return removed


def _remove_unless_held(holder: Path) -> bool:
    try:
        fd = os.open(holder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        # Held until it is gone, so that a writer which just made it sees that it lost it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(holder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _prefix(destination: Path) -> str:
    # The hash keeps `a.b` and `a` apart, and long names within what a file name may hold.
    name = destination.name
    readable = name.encode()[:80].decode(errors="ignore")
    return f".{readable}.{xxhash.xxh3_64_hexdigest(name.encode())[:8]}."


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _rename(source: Path, destination: Path, flag: int) -> None:
    """Rename as ``renameat2(2)`` does: without replacing, or exchanging two names in one step."""
    code = _libc().renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flag)
    if code == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        _rename_without_flags(source, destination, flag)
    elif number == errno.EEXIST:
        raise FileExistsError(number, os.strerror(number), str(destination))
    else:
        raise OSError(number, os.strerror(number), str(destination))


def _rename_without_flags(source: Path, destination: Path, flag: int) -> None:
    if flag == _RENAME_EXCHANGE:
        raise StoreError(
            "this file system cannot exchange two names in one step, so a checkpoint is never replaced on it",
            path=destination,
            remedy="save under a new name, then remove the old checkpoint",
        )
    # A directory renamed onto an existing one that is not empty fails, and `lexists` was just false.
    os.rename(source, destination)
