"""Listing the files of a checkpoint; links to folders and unreadable folders are refused.

Links to files are followed: the Hugging Face cache consists of them.
"""

import os
import stat
from pathlib import Path

from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.probe import file_mode
from tensorkeep.formats.tensorstore.library import ArrayDirectory
from tensorkeep.formats.tensorstore.specs import METADATA_FILE
from tensorkeep.io.files import store_errors, sync_directory

MAX_METADATA_BYTES = 16 * 1024**2
"""Of the largest metadata file that is read."""

_METADATA_FILES = frozenset(METADATA_FILE.values())


def scan_folder(folder: str, shown: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their names; StoreError if it cannot be listed."""
    with store_errors(shown, "list the directory"), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def linked_mode(entry: os.DirEntry[str]) -> int:
    """Return the mode of what a link leads to; 0 if it is another entry, or leads to nothing, such as to itself."""
    return file_mode(Path(entry.path)) if entry.is_symlink() else 0


def list_tree(top: str, shown: Path) -> tuple[dict[str, int], list[str]]:
    """Return the size in bytes of each file below a directory, and all folders, by their relative paths.

    Each folder has a slash at its end; parents come first, at the front the directory itself (empty). ``shown`` is the
    directory's path in errors.

    Raises UnsupportedError if there is a link to a folder or to nothing, a pipe or a device, or if an array's metadata
    file has more than 16 MiB; StoreError if the operating system refuses access.
    """
    files: dict[str, int] = {}
    folders = [""]
    for inside in folders:  # grows while it is read
        path = shown / inside
        for entry in scan_folder(f"{top}/{inside}", path):
            # Chunks of 64 elements make tens of thousands of files: their paths are made for errors only.
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{inside}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) or stat.S_ISREG(linked_mode(entry)):
                with store_errors(path, f"read the size of {entry.name}"):
                    size = entry.stat().st_size
                if entry.name in _METADATA_FILES:
                    check_metadata_size(size, path / entry.name)
                files[inside + entry.name] = size
            elif entry.is_symlink():
                raise link_error(path / entry.name)
            else:
                raise UnsupportedError("is neither a file nor a folder", path=path / entry.name, remedy="remove it")
    return files, folders


def list_array(directory: ArrayDirectory, key: str) -> dict[str, int]:
    """Return the size of each file of an array; see `list_tree`. Nothing if the array is missing.

    The directory itself (an empty key) may be reached through a link, the array may not.
    """
    if directory.listing is not None:
        found = directory.listing.below(key)
        for name, size in found.items():
            if name.rpartition("/")[2] in _METADATA_FILES:
                check_metadata_size(size, directory.path / name)
        return found
    top = directory.root + key
    if key and os.path.islink(top):
        raise link_error(directory.path / key)
    return list_tree(top, directory.path / key)[0] if os.path.isdir(top) else {}


def sync_directories(path: Path) -> None:
    """Make the names in a directory, and in all those below it, durable; StoreError if that fails."""
    for folder in reversed(list_tree(str(path), path)[1]):
        with store_errors(path / folder, "make the directories durable"):
            sync_directory(path / folder)


def check_metadata_size(size: int, shown: Path) -> None:
    """Raise UnsupportedError if a metadata file of so many bytes is larger than 16 MiB."""
    if size > MAX_METADATA_BYTES:
        limit = f"more than the {MAX_METADATA_BYTES:,} that are read"
        raise UnsupportedError(f"has {size:,} bytes of metadata, {limit}", path=shown)


def link_error(shown: Path) -> UnsupportedError:
    """Return the error for a symbolic link to a folder, or to nothing."""
    return UnsupportedError(
        "is a symbolic link to a folder or to nothing, which is not followed",
        path=shown,
        remedy="copy the checkpoint with what its links point to: cp -rL FOLDER COPY",
    )
