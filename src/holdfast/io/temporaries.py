"""The temporaries in which checkpoints are written: their names, their locks, and those that dead writers left."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.errors import BusyError

SUFFIX = ".holdfast-tmp"


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
    """
    removed = []
    for holder in _found(destination):
        if holder == besides:
            continue
        if not _remove_unless_held(holder):
            raise BusyError(
                f"another process is saving here (see {holder.name})",
                path=destination,
                remedy="wait for it to end, or save elsewhere",
            )
        removed.append(holder)
    return removed


def remove_abandoned(folder: Path) -> None:
    """Remove all temporaries in a folder whose writers are dead."""
    for holder in _in(folder, "."):
        _remove_unless_held(holder)


def _found(destination: Path) -> Iterator[Path]:
    return _in(destination.parent, prefix(destination))


def _in(folder: Path, start: str) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        ours = entry.name.startswith(start) and entry.name.endswith(SUFFIX)
        if ours and (entry.is_symlink() or entry.is_dir(follow_symlinks=False)):
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
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _remove_unless_held(holder: Path) -> bool:
    if holder.is_symlink():
        remove(holder)
        return True
    try:
        fd = _open_directory(holder)
    except FileNotFoundError:
        return True
    try:
        # Held until it is gone, so that a writer which just made it sees that it lost it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(holder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def remove(holder: Path) -> None:
    """Remove a temporary, as far as the operating system lets us."""
    # A link lies here if one took the place of the destination while a checkpoint was exchanged for it.
    if holder.is_symlink():
        with suppress(OSError):
            holder.unlink()
    else:
        shutil.rmtree(holder, ignore_errors=True)


def prefix(destination: Path) -> str:
    """Return how the names of a destination's temporaries begin."""
    # The hash keeps `a.b` and `a` apart, and long names within what a file name may hold.
    name = os.fsencode(destination.name)
    return f".{name[:80].decode(errors='ignore')}.{xxhash.xxh3_64_hexdigest(name)[:8]}."
