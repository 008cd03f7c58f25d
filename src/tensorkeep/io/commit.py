"""The only place that makes a checkpoint visible: atomic, durable, one writer at a time.

Everything is written under a temporary name beside the destination. `Commit.publish` makes that durable, makes it
visible by one rename, and makes the name durable. A process that is killed at any instruction leaves at the destination
either what was there before or the complete new checkpoint.

A temporary is locked (``flock``) by its writer. The next save to the same destination removes the temporaries of dead
writers; if a writer is alive, it raises `BusyError`.
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from tensorkeep.errors import BusyError, DestinationExistsError, StoreError
from tensorkeep.io.clock import clock
from tensorkeep.io.files import close, store_errors, sync_directory, write_small
from tensorkeep.io.temporaries import adopt, lock, new_name, remove, remove_stale
from tensorkeep.machine import libc
from tensorkeep.paths import absolute

_CHOOSE = "choose another path, or ask to overwrite it (overwrite=True)"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2

_active: "set[Commit]" = set()


class Commit:
    """A checkpoint that is being written: a context manager that removes it unless it was published.

    Missing parents of the destination are created; a symbolic link there is never replaced. ``replaceable`` returns
    whether an existing path is a checkpoint of this format, which ``overwrite`` may replace; nothing else is ever
    replaced. It may raise `DestinationExistsError` itself, with a reason. ``path`` is where to write: an empty
    directory, or, for a single file, a name that does not exist yet. If an abandoned temporary of the destination is
    given to ``adopt``, it is that directory, with what its dead writer left there.

    Raises DestinationExistsError if something is there and may not be replaced; BusyError if a live process is saving
    there; StoreError if the operating system refuses.

    Examples
    --------
    >>> import tempfile
    >>> from tensorkeep.io.files import write_small
    >>> destination = Path(tempfile.mkdtemp()) / "hello"
    >>> with Commit(destination, directory=False, overwrite=False, replaceable=Path.is_file) as commit:
    ...     write_small(commit.path, b"hello")
    ...     commit.publish()
    >>> destination.read_bytes()
    b'hello'
    """

    save_id = ""
    """The names of the files have no id: the directory is one of this save."""

    def __init__(
        self,
        destination: Path,
        *,
        directory: bool,
        overwrite: bool,
        replaceable: Callable[[Path], bool],
        adopt: Path | None = None,
    ) -> None:
        # As the kernel resolves it; only the last component may be a symbolic link.
        if destination.name in ("", ".."):
            self.destination = absolute(destination, follow_links=True)
        else:
            self.destination = absolute(destination.parent, follow_links=True) / destination.name
        self.overwrite = overwrite
        self._directory = directory
        self._replaceable = replaceable
        self._adopted = adopt
        self._checked: os.stat_result | None = None
        self._lock_fd = -1
        self._temporary = self.destination
        self.path = self.destination

    def __enter__(self) -> Self:
        with store_errors(self.destination, "save here"):
            make_directory(self.destination.parent)
            self._check_destination()
            self._create_temporary()
        return self

    def _check_destination(self) -> None:
        """Raise unless the destination may be written; one that was replaceable before is not looked into again."""
        try:
            status = self.destination.lstat()
        except FileNotFoundError:
            return
        if not self.overwrite:
            raise DestinationExistsError("exists already", path=self.destination, remedy=_CHOOSE)
        if self._checked is not None and os.path.samestat(self._checked, status):
            return
        if stat.S_ISLNK(status.st_mode):
            raise DestinationExistsError(
                f"is a symbolic link to {self.destination.readlink()}, and a link is not replaced",
                path=self.destination,
                remedy="save to its target, or remove the link",
            )
        if not self._replaceable(self.destination):
            raise DestinationExistsError(
                "is not a checkpoint of this format, so it is not replaced",
                path=self.destination,
                remedy="choose another path, or remove it yourself",
            )
        # The old directory is emptied after the exchange, which needs the permission to write in it.
        if self._directory and not os.access(self.destination, os.W_OK | os.X_OK, effective_ids=True):
            raise StoreError(
                "cannot replace it: its folder does not let you remove its files",
                path=self.destination,
                remedy="check its owner and permissions, or save elsewhere",
            )
        self._checked = status

    def _create_temporary(self) -> None:
        """Create a temporary and lock it, as the only writer to the destination.

        A single file gets a directory, too, because the lock must not be renamed with the file.
        """
        while True:
            if self._adopted is not None:
                temporary = self._adopted
                fd = adopt(temporary)
                if fd is None:
                    raise BusyError("its writer is alive", path=temporary, remedy="wait for it to end")
                break
            remove_stale(self.destination)
            temporary = new_name(self.destination)
            os.mkdir(temporary)
            try:
                fd = lock(temporary)
            except BaseException:
                remove(temporary)
                raise
            if fd is None:
                continue
            try:
                # Of two writers that begin at once, at least one sees the other's lock here.
                remove_stale(self.destination, besides=temporary)
            except BusyError:
                remove(temporary)
                close(fd)
                clock().sleep(secrets.randbelow(50) / 1000)
                continue
            except BaseException:
                remove(temporary)
                close(fd)
                raise
            break
        self._lock_fd, self._temporary = fd, temporary
        self.path = temporary if self._directory else temporary / self.destination.name
        _active.add(self)

    def publish(self) -> None:
        """Make the checkpoint at `path`, whose files are durable already, visible at the destination, durably.

        Raises DestinationExistsError if something else has appeared there; StoreError if the operating system refuses.
        If only the sync of the new name failed, the error states that the checkpoint is visible; the old checkpoint
        is then kept until the next save.
        """
        with store_errors(self.destination, "make the checkpoint visible"):
            if self.overwrite:
                self._check_destination()
            try:
                if self._directory:
                    sync_directory(self.path)
                    self._publish_directory()
                else:
                    self._publish_file()
            except FileExistsError as error:
                raise DestinationExistsError(
                    "another file was created here during the save", path=self.destination, remedy=_CHOOSE
                ) from error
        self._sync_name()

    def _publish_file(self) -> None:
        if self.overwrite:
            os.replace(self.path, self.destination)
        else:
            # Unlike a rename, a link never replaces, on any file system that has links.
            try:
                os.link(self.path, self.destination)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                _rename(self.path, self.destination, _RENAME_NOREPLACE)

    def _publish_directory(self) -> None:
        if not os.path.lexists(self.destination):
            _rename(self.path, self.destination, _RENAME_NOREPLACE)
            self._temporary = self.destination
        elif not self.overwrite:
            raise FileExistsError(errno.EEXIST, "exists", str(self.destination))
        else:
            # The old checkpoint now has the temporary name, and is removed with it.
            _rename(self.path, self.destination, _RENAME_EXCHANGE)

    def _sync_name(self) -> None:
        temporary = self._temporary
        if self._directory:
            # The temporary is now the old checkpoint, which a power failure may bring back until the sync: keep it.
            self._temporary = self.destination
        try:
            sync_directory(self.destination.parent)
        except OSError as error:
            raise StoreError(
                f"the checkpoint is visible and can be read, but perhaps not durable: {error.strerror or error}",
                path=self.destination,
                remedy="check the device, then save it again with overwrite=True, or elsewhere",
                errno=error.errno,
            ) from error
        self._temporary = temporary

    def __exit__(self, *error: object) -> None:
        if self not in _active:  # a forked child, whose parent is still saving
            return
        try:
            if self._temporary != self.destination:
                remove(self._temporary)
        finally:
            # Also if the removal is interrupted: otherwise this process would block its own next save.
            self._release()

    def _release(self) -> None:
        _active.discard(self)
        close(self._lock_fd)


def _release_in_child() -> None:
    # Otherwise the child would keep the lock of a writer that was killed for as long as it lives.
    for commit in list(_active):
        commit._release()


os.register_at_fork(after_in_child=_release_in_child)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically and durably, in place of an older one, whose permissions it keeps.

    A symbolic link is followed. Raises StoreError if the operating system refuses; an older file then remains.
    """
    target = absolute(path, follow_links=True)
    with Commit(target, directory=False, overwrite=True, replaceable=lambda path: True) as commit:
        with store_errors(path, "write the file"):
            write_small(commit.path, content)
            if target.exists():
                shutil.copymode(target, commit.path)
        commit.publish()


def make_directory(folder: Path) -> None:
    """Create a folder and its missing parents, each durable before the next."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_directory(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Make a checkpoint invisible by one rename, durably, then remove it.

    If the process is killed meanwhile, the checkpoint is complete or invisible; the next save there removes the rest.
    """
    temporary = new_name(path)
    os.rename(path, temporary)
    sync_directory(path.parent)
    remove(temporary)


def _rename(source: Path, destination: Path, flag: int) -> None:
    """Rename by ``renameat2(2)``: without replacing, or exchanging two names in one step."""
    code = libc().renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), flag)
    if code == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(destination))
    # The file system, or the kernel, has no flags.
    if flag == _RENAME_EXCHANGE:
        raise StoreError(
            "this file system cannot exchange two names in one step, so a checkpoint on it is never replaced",
            path=destination,
            remedy="save under a new name, then remove the old checkpoint",
        )
    # A plain rename replaces: a file that appears between this check and the rename is lost, which cannot be prevented.
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    os.rename(source, destination)
