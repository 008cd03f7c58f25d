"""The temporaries in which checkpoints are written: their names, their locks, and those that dead writers left."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from tensorkeep.errors import BusyError
from tensorkeep.io.files import store_error, sync_directory

SUFFIX = ".tensorkeep-tmp"

_OURS = re.compile(rf"\..*\.[0-9a-f]{{8}}\.[0-9a-f]{{8,}}{re.escape(SUFFIX)}", re.DOTALL)


def remove_stale(destination: Path, *, besides: Path | None = None) -> list[Path]:
    """Remove the temporaries that dead writers left beside a destination, and return them.

    Parameters
    ----------
    destination : Path
    besides : Path, optional
        The caller's own.

    Raises
    ------
    BusyError
        If the writer of one is alive.
    StoreError
        If the operating system does not let us see whether it is, or refuses otherwise.
    """
    removed = []
    for holder in _found(destination):
        if holder == besides:
            continue
        try:
            gone = _remove_unless_held(holder)
        except OSError as error:
            raise store_error(error, holder, "clear away what another save left here") from error
        if not gone:
            raise BusyError(
                f"another process is saving here (see {holder.name})",
                path=destination,
                remedy="wait for it to end, or save elsewhere",
            )
        removed.append(holder)
    return removed


def remove_abandoned(folder: Path) -> None:
    """Remove all temporaries in a folder whose writers are dead, as far as the operating system lets us.

    Raises
    ------
    StoreError
        If it does not let us look into the folder.
    """
    try:
        found = list(_in(folder, "."))
    except OSError as error:
        raise store_error(error, folder, "look into the folder") from error
    for holder in found:
        # What another user left is in nobody's way.
        with suppress(OSError):
            _remove_unless_held(holder)


def _found(destination: Path) -> Iterator[Path]:
    return _in(destination.parent, prefix(destination))


def _in(folder: Path, start: str) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(start) and _OURS.fullmatch(entry.name):
            yield Path(entry.path)


def lock(holder: Path) -> int | None:
    """Return a descriptor that holds a temporary; None if another writer took it for a dead one's and removed it."""
    try:
        fd = _open_directory(holder)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(holder):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_unless_held(holder: Path) -> bool:
    # No writer holds a link or a file: they lie here if they took a destination's place while it was exchanged.
    if holder.is_symlink() or not holder.is_dir():
        _take_away(holder)
        return True
    try:
        fd = _open_directory(holder)
    except FileNotFoundError:
        return True
    try:
        # Held until it is gone, so that a writer which just made it sees that it lost it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _take_away(holder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _take_away(holder: Path) -> None:
    """Remove a temporary, having made sure that nobody needs it.

    It may be what a checkpoint was exchanged for, so that the exchange must be durable first. And between hosts that
    share a file system without sharing its locks, its writer may be alive: the first of the two that renames it has it.
    A writer that comes second is told; one that comes first keeps what it has made visible.
    """
    sync_directory(holder.parent)
    own = holder.with_name(f"{holder.name[: -len(SUFFIX)].rpartition('.')[0]}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        os.rename(holder, own)
    # Another user's, in a folder where only the owner may rename: it is in nobody's way.
    except (FileNotFoundError, PermissionError):
        return
    remove(own)


def remove(holder: Path) -> None:
    """Remove a temporary, as far as the operating system lets us."""
    if holder.is_symlink() or not holder.is_dir():
        with suppress(OSError):
            holder.unlink()
    else:
        shutil.rmtree(holder, ignore_errors=True)


def prefix(destination: Path) -> str:
    """Return how the names of a destination's temporaries begin."""
    # The hash keeps `a.b` and `a` apart, and long names within what a file name may hold.
    name = os.fsencode(destination.name)
    return f".{name[:80].decode(errors='ignore')}.{xxhash.xxh3_64_hexdigest(name)[:8]}."
