"""Temporaries of checkpoints: names, locks, and the removal of abandoned ones.

Each temporary is a directory beside its destination that its writer locks (``flock``). The kernel releases the lock
when the writer dies, so a temporary without a lock is abandoned.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import xxhash

from tensorkeep.errors import BusyError
from tensorkeep.io.files import close, store_errors, sync_directory

logger = logging.getLogger(__name__)

SUFFIX = ".tensorkeep-tmp"

_NAME = re.compile(rf"\..*\.[0-9a-f]{{8}}\.[0-9a-f]{{8,}}{re.escape(SUFFIX)}", re.DOTALL)


def new_name(destination: Path) -> Path:
    """Return a path for a new temporary beside a destination."""
    return destination.parent / f"{prefix(destination)}{secrets.token_hex(4)}{SUFFIX}"


def prefix(destination: Path) -> str:
    """Return the start of the names of a destination's temporaries."""
    # The hash distinguishes `a.b` from `a`, and keeps long names within the limit of a file name.
    name = os.fsencode(destination.name)
    # Without half a character, whatever the locale's encoding is.
    start = os.fsdecode(name[:80].decode(errors="ignore").encode())
    return f".{start}.{xxhash.xxh3_64_hexdigest(name)[:8]}."


def lock(temporary: Path) -> int | None:
    """Lock a new temporary; return the descriptor, or None if another writer took it for abandoned and removed it."""
    try:
        fd = _open_directory(temporary)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(temporary):
            return fd
    except BaseException:
        close(fd)
        raise
    close(fd)
    return None


def adopt(temporary: Path) -> int | None:
    """Lock an abandoned temporary, to continue with it; return the descriptor, or None if its writer is alive."""
    try:
        fd = _open_directory(temporary)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), temporary.lstat()):
            return fd
    except OSError:
        pass
    close(fd)
    return None


def remove_stale(destination: Path, *, besides: Path | None = None) -> None:
    """Remove the abandoned temporaries of a destination, besides the caller's own.

    Raises BusyError if the writer of one is alive; StoreError if the operating system does not let us see whether it
    is, or refuses to remove it.
    """
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
    """Remove all abandoned temporaries in a folder, except those that the operating system does not let us remove.

    Raises StoreError if the folder cannot be listed.
    """
    for temporary in list_temporaries(folder):
        # One that belongs to another user does no harm.
        with suppress(OSError):
            _remove_unless_locked(temporary)


def remove(temporary: Path) -> None:
    """Remove a temporary, as far as the operating system lets us."""
    try:
        os.unlink(temporary)
    except OSError:  # it is a folder, perhaps
        with suppress(OSError):  # which ignore_errors does not for all calls
            shutil.rmtree(temporary, ignore_errors=True)


def list_temporaries(folder: Path) -> list[Path]:
    """Return all temporaries in a folder, of dead writers and live ones.

    Raises StoreError if the folder cannot be listed.
    """
    with store_errors(folder, "look into the folder"):
        return _list(folder, ".")


def _list(folder: Path, start: str) -> list[Path]:
    with os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in entries if e.name.startswith(start) and _NAME.fullmatch(e.name))


def _open_directory(path: Path) -> int:
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
    """Remove a temporary that seems abandoned, in a way that is safe if it is not.

    It may be what a checkpoint was exchanged for, so that exchange must be durable first. Between hosts that share a
    file system but not its locks, its writer may be alive: the first rename wins. A writer that comes second gets an
    error; a writer that comes first keeps the checkpoint that it made visible.
    """
    sync_directory(temporary.parent)
    start = temporary.name[: -len(SUFFIX)].rpartition(".")[0]
    renamed = temporary.with_name(f"{start}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        temporary.rename(renamed)
    # Permission: it belongs to another user, in a folder where only owners may rename, and does no harm.
    except (FileNotFoundError, PermissionError):
        return
    logger.info("removing %s, which a save that did not finish left", temporary)
    remove(renamed)
