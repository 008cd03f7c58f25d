"""Where checkpoints lie: one interface for disks and object stores, and the functions that choose by the path."""

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

# The storage for each class of paths. `StorePath` joins at its first use, because its requests take long to import.
STORAGES: dict[type[Path], Storage] = {type(Path()): LocalStorage()}


def storage_of(path: Path) -> Storage:
    kind = type(path)
    if kind not in STORAGES:
        if not issubclass(kind, StorePath):
            return STORAGES[type(Path())]
        from tensorkeep.storage.object_store import ObjectStorage

        STORAGES[kind] = ObjectStorage()
    return STORAGES[kind]


def file_mode(path: Path, *, follow_links: bool = True) -> int:
    return storage_of(path).mode(path, follow_links=follow_links)


def exists(path: Path) -> bool:
    """True for a dangling link, too."""
    return storage_of(path).mode(path, follow_links=False) != 0


def names_in(directory: Path) -> list[str]:
    return storage_of(directory).names(directory)


def folders_in(directory: Path) -> list[str]:
    return storage_of(directory).folders(directory)


def first_bytes(path: Path, count: int) -> bytes | None:
    return storage_of(path).first_bytes(path, count)


def open_file(path: Path) -> SourceFile:
    return storage_of(path).open_file(path)


def open_directory(path: Path) -> Directory:
    return storage_of(path).open_directory(path)


def write_file(path: Path, content: bytes) -> None:
    storage_of(path).write_small(path, content)


def append_lines(path: Path, lines: bytes) -> None:
    storage_of(path).append_lines(path, lines)


def read_directory(path: Path, read: Callable[[Directory], T]) -> T:
    """Call a function with an open directory, again if a save replaced it. The result must close the directory."""
    storage = storage_of(path)
    # A save may replace the directory between two opens. An error that this explains is not reported to the caller.
    attempts = 0
    while True:
        directory = storage.open_directory(path)
        attempts += 1
        try:
            return read(directory)
        except BaseException as error:
            is_ours = isinstance(error, TensorkeepError)
            retry = is_ours and attempts < storage.read_attempts and directory.was_replaced()
            directory.close()
            if not retry:
                raise
            logger.info("%s was replaced while it was opened; reading the new one", path)
