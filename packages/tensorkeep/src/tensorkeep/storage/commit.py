"""The commit of a checkpoint on a disk: atomic, durable, one writer at a time.

Everything is written under a temporary name, synced, then made visible by one rename. A process killed at any
instruction leaves the old content or the complete new checkpoint.
"""

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self, Unpack

import xxhash

from tensorkeep import machine
from tensorkeep.errors import BusyError, DestinationExistsError, StoreError
from tensorkeep.machine import libc
from tensorkeep.paths import absolute
from tensorkeep.storage.base import CHOOSE, MANIFEST_NAME, CommitOptions, PendingCommit
from tensorkeep.storage.clock import clock
from tensorkeep.storage.direct_io import sync_directory, write_small
from tensorkeep.storage.parallel import reset_in_child
from tensorkeep.storage.system_errors import close, store_error, store_errors

# Temporaries. Each is a directory beside its destination that its writer locks (``flock``). The kernel releases the
# lock when the writer dies, so a temporary without a lock is abandoned.

logger = logging.getLogger(__name__)
SUFFIX = ".tensorkeep-tmp"
_NAME = re.compile(rf"\..*\.[0-9a-f]{{8}}\.[0-9a-f]{{8,}}{re.escape(SUFFIX)}", re.DOTALL)


def new_name(destination: Path) -> Path:
    return destination.parent / f"{prefix(destination)}{secrets.token_hex(4)}{SUFFIX}"


def prefix(destination: Path) -> str:
    # The hash distinguishes `a.b` from `a`, and keeps long names within the limit of a file name.
    name = os.fsencode(destination.name)
    # Without half a character, whatever the locale's encoding is.
    start = os.fsdecode(name[:80].decode(errors="ignore").encode())
    return f".{start}.{xxhash.xxh3_64_hexdigest(name)[:8]}."


def _lock_temporary(temporary: Path, mode: int, absent: type[OSError]) -> int | None:
    """Lock a temporary; None after an error of the kind ``absent``, or if another directory is at its path by then."""
    try:
        fd = _open_directory(temporary)
    except absent:
        return None
    try:
        fcntl.flock(fd, mode)
        # Another process may have removed or replaced the directory before we held the lock.
        if os.path.samestat(os.fstat(fd), temporary.lstat()):
            return fd
    except absent:
        pass
    except BaseException:
        close(fd)
        raise
    close(fd)
    return None


def remove_stale(destination: Path, *, besides: Path | None = None) -> None:
    """Remove abandoned temporaries of a destination. Raises BusyError if a writer is alive; StoreError if refused."""
    for temporary in _list(destination.parent, prefix(destination)):
        if temporary == besides:
            continue
        with store_errors(temporary, "remove what another save left here"):
            removed = _remove_unless_locked(temporary)
        if not removed:
            raise BusyError(
                f"another process is saving here (see {temporary.name})",
                path=destination,
                remedy="wait for it to end, or save elsewhere",
            )


def remove_abandoned(folder: Path) -> None:
    """Remove abandoned temporaries in a folder. Raises StoreError if the folder cannot be listed."""
    for temporary in list_temporaries(folder):
        # One that belongs to another user does no harm.
        with suppress(OSError):
            _remove_unless_locked(temporary)


def remove(temporary: Path) -> None:
    try:
        os.unlink(temporary)
    except OSError:  # it is a folder, perhaps
        with suppress(OSError):  # which ignore_errors does not for all calls
            shutil.rmtree(temporary, ignore_errors=True)


def list_temporaries(folder: Path) -> list[Path]:
    """Return temporaries of dead and live writers. Raises StoreError if the folder cannot be listed."""
    with store_errors(folder, "look into the folder"):
        return _list(folder, ".")


def _list(folder: Path, start: str) -> list[Path]:
    # The full pattern: a user's own file may begin like a temporary.
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if e.name.startswith(start) and _NAME.fullmatch(e.name))


def _open_directory(path: Path) -> int:
    # O_NOFOLLOW: a link with the name of a temporary must not make us lock or remove a foreign directory.
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_unless_locked(temporary: Path) -> bool:
    # No writer locks a link or a file: one gets such a name if it took a destination's place during an exchange.
    if temporary.is_symlink() or not temporary.is_dir():
        _rename_and_remove(temporary)
        return True
    try:
        fd = _open_directory(temporary)
    except FileNotFoundError:
        return True
    try:
        # Locked until it is gone, so that a writer which has just created it notices.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _rename_and_remove(temporary)
    except BlockingIOError:
        return False
    finally:
        close(fd)
    return True


def _rename_and_remove(temporary: Path) -> None:
    """Remove a temporary that seems abandoned, in a way that is safe if it is not."""
    # The temporary may be the old checkpoint of an exchange. Removing it before the exchange is durable could lose
    # both.
    sync_directory(temporary.parent)
    start = temporary.name[: -len(SUFFIX)].rpartition(".")[0]
    renamed = temporary.with_name(f"{start}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        # Hosts may share the file system but not its locks, so the writer may be alive. The first rename wins: a writer
        # that comes second gets an error, a writer that comes first keeps the checkpoint that it made visible.
        temporary.rename(renamed)
    # Permission: it belongs to another user, in a folder where only owners may rename, and does no harm.
    except (FileNotFoundError, PermissionError):
        return
    logger.info("removing %s, which a save that did not finish left", temporary)
    remove(renamed)


# The commit. The next save to the same destination removes the temporaries of dead writers; if a writer is alive, it
# raises `BusyError`.

# Values of <fcntl.h> and <linux/fs.h>; Python does not have them.
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


class Commit(PendingCommit):
    """The commit of a folder or a file. It creates missing parents; it never replaces a symbolic link.

    ``path`` is an empty directory, or, for a single file, a name that does not exist yet. If an abandoned temporary of
    the destination is given to ``adopt``, ``path`` is that directory, with what its dead writer left there. Raises
    BusyError if a live process is saving there.
    """

    def __init__(
        self, destination: Path, *, directory: bool, adopt: Path | None = None, **options: Unpack[CommitOptions]
    ) -> None:
        # As the kernel resolves it; only the last component may be a symbolic link.
        if destination.name in ("", ".."):
            destination = absolute(destination, follow_links=True)
        else:
            destination = absolute(destination.parent, follow_links=True) / destination.name
        super().__init__(destination, **options)
        self._directory = directory
        self._adopted = adopt
        self._checked: os.stat_result | None = None
        self._lock_fd = -1
        self._temporary = destination
        # Otherwise a forked child would keep the lock of a writer that was killed for as long as it lives.
        reset_in_child(self, Commit._release)

    def __enter__(self) -> Self:
        with store_errors(self.destination, "save here"):
            # `__exit__` is not called if this raises: the temporary is the last thing that is created.
            make_directory(self.destination.parent)
            self._check_destination()
            self._create_temporary()
        return self

    def _check_destination(self) -> None:
        try:
            status = self.destination.lstat()
        except FileNotFoundError:
            return
        # It was looked into before, and is the same directory. `replaceable` may read many files.
        if self._checked is not None and os.path.samestat(self._checked, status):
            return
        if self.overwrite and stat.S_ISLNK(status.st_mode):
            raise DestinationExistsError(
                f"is a symbolic link to {self.destination.readlink()}, and a link is not replaced",
                path=self.destination,
                remedy="save to its target, or remove the link",
            )
        self._check_replaceable()
        # The old directory is emptied after the exchange, which needs the permission to write in it.
        if self._directory and not os.access(self.destination, os.W_OK | os.X_OK, effective_ids=True):
            raise StoreError(
                "cannot replace it: its folder does not let you remove its files",
                path=self.destination,
                remedy="check its owner and permissions, or save elsewhere",
            )
        self._checked = status

    def _create_temporary(self) -> None:
        if self._adopted is None:
            temporary, fd = self._new_temporary()
        elif (locked := _lock_temporary(self._adopted, fcntl.LOCK_EX | fcntl.LOCK_NB, OSError)) is not None:
            temporary, fd = self._adopted, locked
        else:
            raise BusyError("its writer is alive", path=self._adopted, remedy="wait for it to end")
        self._lock_fd, self._temporary = fd, temporary
        self.path = temporary if self._directory else temporary / self.destination.name

    def _new_temporary(self) -> tuple[Path, int]:
        while True:
            remove_stale(self.destination)
            # A single file gets a directory, too: the lock must not be renamed with the file.
            temporary, fd = new_name(self.destination), None
            os.mkdir(temporary)
            try:
                # None: another writer took it for abandoned, and removed it.
                fd = _lock_temporary(temporary, fcntl.LOCK_EX, FileNotFoundError)
                if fd is None:
                    continue
                # Of two writers that begin at once, at least one sees the other's lock here.
                remove_stale(self.destination, besides=temporary)
                return temporary, fd
            except BaseException as error:
                remove(temporary)
                if fd is not None:
                    close(fd)
                if not isinstance(error, BusyError):
                    raise
                # A random pause, so that two writers that met do not meet again.
                clock().sleep(secrets.randbelow(50) / 1000)

    def publish(self, manifest: bytes | None = None) -> None:
        """Raises DestinationExistsError if something else has appeared; StoreError, also if the last sync fails."""
        # The manifest is written last: a directory without it is not a checkpoint.
        if manifest is not None:
            write_small(self.path / MANIFEST_NAME, manifest)
        with store_errors(self.destination, "make the checkpoint visible"):
            if self.overwrite:
                # Something else may have taken the place of the destination during the save.
                self._check_destination()
            try:
                if self._directory:
                    # The names inside must be durable before the directory becomes visible.
                    sync_directory(self.path)
                    self._publish_directory()
                else:
                    self._publish_file()
            except FileExistsError as error:
                raise DestinationExistsError(
                    "another file was created here during the save", path=self.destination, remedy=CHOOSE
                ) from error
        self._sync_name()

    def _publish_file(self) -> None:
        if self.overwrite:
            # A rename over a file is atomic, and readers that have the old file open keep it.
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
            # Nothing is left to remove in `__exit__`.
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
        if self._lock_fd < 0:  # in a forked child: the parent is still saving
            return
        try:
            if self._temporary != self.destination:
                remove(self._temporary)
        finally:
            # Also if the removal is interrupted: otherwise this process would block its own next save.
            self._release()

    def _release(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically and durably, with the old permissions; a link is followed. Raises StoreError."""
    target = absolute(path, follow_links=True)
    with Commit(target, directory=False, overwrite=True, replaceable=lambda path: True) as commit:
        with store_errors(path, "write the file"):
            write_small(commit.path, content)
            if target.exists():
                shutil.copymode(target, commit.path)
        commit.publish()


def make_directory(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        # Another process may create the same parent meanwhile.
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_directory(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Make a checkpoint invisible by one rename, durably, then remove it."""
    temporary = new_name(path)
    os.rename(path, temporary)
    # Nothing was removed yet: after a power failure before this sync, the checkpoint may be back, complete.
    sync_directory(path.parent)
    remove(temporary)


def _rename(source: Path, destination: Path, flag: int) -> None:
    """``renameat2(2)``: without replacing, or exchanging two names in one step."""
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


# The lock of a folder, for one writer; the kernel releases it with the process.
#
# The lock (``flock``) is on the folder itself, so that no lock file is left behind. It holds on one host: file systems
# that hosts share do not pass on locks of folders, so a writer on another host is not detected.


class FolderLock:
    """The exclusive right to write in a folder, until it is collected. Raises BusyError or StoreError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            self._fd = _lock(folder)
            # The finalizer, not `__del__`: it runs once, and also when the interpreter exits.
            self._release = weakref.finalize(self, _unlock, self._fd, os.getpid())
            reset_in_child(self, FolderLock.release)
            try:
                if self.is_valid():
                    return
            except BaseException:
                self.release()  # the traceback may live on, and the lock with it
                raise
            # The folder was removed, and perhaps created again, between the opening and the locking.
            self.release()

    def is_valid(self) -> bool:
        """Return whether the locked folder is still at its path. Raises StoreError if it cannot be looked at."""
        # The folder may have been removed and created again, and another process may hold the new one.
        if not self._release.alive:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise store_error(error, self._folder, "look at the folder") from error

    def release(self) -> None:
        self._release()


def _lock(folder: Path) -> int:
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
