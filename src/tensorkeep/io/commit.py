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
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorkeep.errors import BusyError, DestinationExistsError, StoreError, TensorkeepError
from tensorkeep.io.files import store_error, store_errors, sync_directory
from tensorkeep.io.temporaries import SUFFIX, lock, prefix, remove, remove_stale

_CHOOSE = "choose another path, or ask to overwrite it (overwrite=True, --overwrite)"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2

_held: set[Commit] = set()


class Commit:
    """A checkpoint that is being written: a context manager that removes what was not published.

    Parameters
    ----------
    destination : Path
        Where the checkpoint shall appear; missing parents are created. A symbolic link is never replaced.
    directory : bool
        Whether the checkpoint is a directory or a single file.
    overwrite : bool
        Whether something that is there already may be replaced.
    replaceable : callable
        Says of an existing path whether it is a checkpoint of this format; nothing else is ever replaced. It may raise
        `DestinationExistsError` itself, to say more.

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
        self.destination = _without_links(destination)
        self.overwrite = overwrite
        self._directory = directory
        self._replaceable = replaceable
        self._checked: tuple[int, int] | None = None
        self._lock = -1
        self._holder = self.destination
        self.path = self.destination

    def __enter__(self) -> Self:
        with store_errors(self.destination, "save here"):
            make_directory(self.destination.parent)
            self._check_destination()
            self._hold()
        return self

    def _check_destination(self) -> None:
        """Refuse what may not be replaced; remember what may, so that it is looked at once."""
        try:
            status = self.destination.lstat()
        except FileNotFoundError:
            return
        if not self.overwrite:
            raise DestinationExistsError("exists already", path=self.destination, remedy=_CHOOSE)
        if self._checked == (status.st_dev, status.st_ino):
            return
        if stat.S_ISLNK(status.st_mode):
            raise DestinationExistsError(
                f"is a symbolic link to {self.destination.readlink()}, and a link is not replaced",
                path=self.destination,
                remedy="save to what it points to, or remove the link",
            )
        if not self._replaceable(self.destination):
            raise DestinationExistsError(
                "is not a checkpoint of this format, so it is not replaced",
                path=self.destination,
                remedy="choose another path, or remove it yourself",
            )
        # The old directory is emptied after the exchange; only who may write in it can do that.
        if self._directory and not os.access(self.destination, os.W_OK | os.X_OK, effective_ids=True):
            raise StoreError(
                "cannot replace it: its folder does not let you remove what is in it",
                path=self.destination,
                remedy="check its owner and permissions, or save elsewhere",
            )
        self._checked = (status.st_dev, status.st_ino)

    def _hold(self) -> None:
        """Make a temporary and lock it, as the only one who saves here.

        The lock lies on a directory, also for a single file: the file itself is renamed, and with it the lock.
        """
        while True:
            remove_stale(self.destination)
            holder = self.destination.parent / f"{prefix(self.destination)}{secrets.token_hex(4)}{SUFFIX}"
            os.mkdir(holder)
            fd = lock(holder)
            if fd is None:
                continue
            try:
                # Whoever began at the same time sees this lock, or is seen here.
                remove_stale(self.destination, besides=holder)
            except BusyError:
                remove(holder)
                os.close(fd)
                time.sleep(secrets.randbelow(50) / 1000)
                continue
            except BaseException:
                os.close(fd)
                raise
            break
        self._lock, self._holder = fd, holder
        self.path = holder if self._directory else holder / self.destination.name
        _held.add(self)

    def publish(self) -> None:
        """Make what lies at `path`, whose files are durable already, visible at the destination, and that durable.

        Raises
        ------
        DestinationExistsError
            If something else has come there meanwhile.
        StoreError
            If the operating system refuses. If only the new name could not be made durable, the message says that it is
            visible; what was replaced is then kept until the next save.
        """
        try:
            if self.overwrite:
                self._check_destination()
            if self._directory:
                sync_directory(self.path)
                self._publish_directory()
            else:
                self._publish_file()
        except TensorkeepError:
            raise
        except FileExistsError as error:
            raise DestinationExistsError(
                "something appeared here while it was being saved",
                path=self.destination,
                remedy=_CHOOSE,
            ) from error
        except OSError as error:
            raise store_error(error, self.destination, "make the checkpoint visible") from error
        self._make_visibility_durable()

    def _make_visibility_durable(self) -> None:
        holder = self._holder
        if self._directory:
            # After an exchange the old checkpoint lies there, which a loss of power may bring back until this is over.
            self._holder = self.destination
        try:
            sync_directory(self.destination.parent)
        except OSError as error:
            raise StoreError(
                f"the checkpoint is visible and can be read, but perhaps not durable: {error.strerror or error}",
                path=self.destination,
                remedy="check the device, then save it again with overwrite=True, or elsewhere",
            ) from error
        self._holder = holder

    def _publish_file(self) -> None:
        if self.overwrite:
            os.replace(self.path, self.destination)
        else:
            # Unlike a rename, a link refuses to replace, on every file system that has links.
            try:
                os.link(self.path, self.destination)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
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
        if self not in _held:  # a forked child, whose parent is still saving
            return
        try:
            if self._holder != self.destination:
                remove(self._holder)
        finally:
            # Also when the removal is interrupted: a lock that stays would make this process its own rival.
            self._release()

    def _release(self) -> None:
        _held.discard(self)
        os.close(self._lock)


def _release_in_child() -> None:
    # A child keeps what it inherits for as long as it lives, and with it the lock of a writer that was killed.
    for commit in list(_held):
        commit._release()


os.register_at_fork(after_in_child=_release_in_child)


def _without_links(destination: Path) -> Path:
    """Return the absolute path, as the kernel would walk it; only the last component may be a symbolic link."""
    if destination.name in ("", ".."):
        return Path(os.path.realpath(destination))
    return Path(os.path.realpath(destination.parent), destination.name)


def make_directory(folder: Path) -> None:
    """Create the folders that are missing on the way to one, each durable before the next."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(made)
        sync_directory(made.parent)


def remove_checkpoint(path: Path) -> None:
    """Make a checkpoint invisible by one rename, durably, then remove it.

    Killed on the way, it is there whole or not at all; what is left of it goes with the next save in that place.
    """
    gone = path.parent / f"{prefix(path)}{secrets.token_hex(4)}{SUFFIX}"
    os.rename(path, gone)
    sync_directory(path.parent)
    remove(gone)


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
    # A plain rename replaces: what appears between this look and the rename is lost, and nothing here can prevent it.
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    os.rename(source, destination)
