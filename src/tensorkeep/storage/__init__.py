"""Where checkpoints lie: one interface for disks and object stores, and the functions that choose by the path."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorkeep.errors import TensorkeepError
from tensorkeep.paths import StorePath
from tensorkeep.storage.base import Directory, SourceFile, Storage
from tensorkeep.storage.local import LocalStorage

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORAGES: dict[type[Path], Storage] = {type(Path()): LocalStorage()}
"""The storage for each class of paths. `StorePath` joins at its first use, because its requests take long to import."""


def storage_of(path: Path) -> Storage:
    """Return the storage that a path leads to."""
    kind = type(path)
    if kind not in STORAGES:
        if not issubclass(kind, StorePath):
            return STORAGES[type(Path())]
        from tensorkeep.storage.object_store import ObjectStorage

        STORAGES[kind] = ObjectStorage()
    return STORAGES[kind]


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    """Return the mode bits of a path; see `Storage.mode`."""
    return storage_of(path).mode(path, follow_links=follow_links)


def exists(path: Path) -> bool:
    """Return whether something is at a path, be it a link to nothing."""
    return storage_of(path).mode(path, follow_links=False) != 0


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; see `Storage.names`."""
    return storage_of(directory).names(directory)


def folders_in(directory: Path) -> list[str]:
    """Return the names of the directories in a directory; see `Storage.folders`."""
    return storage_of(directory).folders(directory)


def first_bytes(path: Path, count: int) -> bytes | None:
    """Return the first bytes of a file; see `Storage.first_bytes`."""
    return storage_of(path).first_bytes(path, count)


def open_file(path: Path) -> SourceFile:
    """Open a file; see `Storage.open_file`."""
    return storage_of(path).open_file(path)


def open_directory(path: Path) -> Directory:
    """Open a directory; see `Storage.open_directory`."""
    return storage_of(path).open_directory(path)


def write_file(path: Path, content: bytes) -> None:
    """Create a small file with this content, durably."""
    storage_of(path).write_small(path, content)


def read_directory(path: Path, read: Callable[[Directory], T]) -> T:
    """Call a function with an open directory, again if it failed because the directory was replaced meanwhile.

    The directory remains open unless the function raises; what the function returns must close it.
    """
    storage = storage_of(path)
    for attempt in itertools.count(1):
        directory = storage.open_directory(path)
        try:
            return read(directory)
        except BaseException as error:
            retry = isinstance(error, TensorkeepError) and storage.reads_again(attempt) and directory.was_replaced()
            directory.close()
            if not retry:
                raise
            logger.info("%s was replaced while it was opened; reading the new one", path)
    raise AssertionError
