"""What lies below a directory: nothing that cannot be listed is passed over, and no link is followed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.tensorstore.specs import METADATA_FILE
from tensorkeep.io.files import store_error

MOST_METADATA = 16 * 1024**2
"""Bytes of the largest metadata file that is read."""

_METADATA = frozenset(METADATA_FILE.values())


def walk(
    path: Path, shown: Path | None = None, *, bottom_up: bool = False
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Do what `os.walk` does, but raise for a folder that cannot be listed.

    Parameters
    ----------
    path : Path
    shown : Path, optional
        What errors call it, if not that.
    bottom_up : bool
        Whether a folder comes after those in it.

    Raises
    ------
    StoreError
    """

    def refuse(error: OSError) -> NoReturn:
        inside = os.path.relpath(error.filename or path, path)
        raise store_error(error, (shown or path) / inside, "list the directory") from error

    return os.walk(path, topdown=not bottom_up, onerror=refuse)


def files_below(path: Path, shown: Path | None = None) -> dict[str, int]:
    """Return the size of every file below a directory, by its path from there.

    Raises
    ------
    StoreError
    """
    # Chunks of 64 elements make tens of thousands of files: no `Path` for each.
    found = {}
    for folder, _, files in walk(path, shown):
        inside = folder[len(str(path)) + 1 :]
        for name in files:
            file = f"{inside}/{name}" if inside else name
            try:
                found[file] = os.lstat(f"{folder}/{name}").st_size
            except OSError as error:
                raise store_error(error, (shown or path) / file, "look at the file") from error
    return found


def check_folders(root: str, keys: Iterable[str], path: Path) -> None:
    """Refuse arrays that are, or hold, anything but files and folders, or whose metadata is too large to be read.

    Parameters
    ----------
    root : str
        A path of the directory that they lie in, with a slash at its end.
    keys : iterable of str
        Empty for the directory itself, which may have been reached through a link.
    path : Path
        What errors call it.

    Raises
    ------
    CorruptCheckpointError
        If there is a link, a pipe or a device.
    UnsupportedError
        If there is a metadata file of more than 16 MiB.
    StoreError
        If the operating system refuses.
    """
    for key in keys:
        if key and os.path.islink(f"{root}{key}"):
            raise _link(path / key)
        # What is missing, opening says.
        if os.path.isdir(f"{root}{key}"):
            _check_below(f"{root}{key}", path / key)


def _check_below(top: str, shown: Path) -> None:
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(f"{top}/{inside}") as entries:
                for entry in entries:
                    _check_entry(entry, shown / inside / entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{inside}{entry.name}/")
        except OSError as error:
            raise store_error(error, shown / inside, "list the directory") from error


def _check_entry(entry: os.DirEntry[str], shown: Path) -> None:
    if entry.is_symlink():
        raise _link(shown)
    if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
        raise CorruptCheckpointError("is neither a file nor a folder", path=shown)
    if entry.name in _METADATA:
        check_size(entry.stat(follow_symlinks=False).st_size, shown)


def check_size(size: int, shown: Path) -> None:
    """Refuse metadata of so many bytes, if they are too many.

    Raises
    ------
    UnsupportedError
    """
    if size > MOST_METADATA:
        raise UnsupportedError(
            f"has {size:,} bytes of metadata, more than the {MOST_METADATA:,} that are read", path=shown
        )


def _link(shown: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError("is a symbolic link, which a checkpoint never holds", path=shown)
