"""Where checkpoints are read from and written to: directories of a file system, or prefixes of an object store."""

import itertools
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorkeep.errors import NotFoundError, TensorkeepError, UnsupportedError
from tensorkeep.paths import StorePath
from tensorkeep.storage.base import WELL_KNOWN, Directory, SourceFile
from tensorkeep.storage.direct_io import write_small

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 5

T = TypeVar("T")


def open_directory(path: Path) -> Directory:
    """Open a directory; raises as `Directory`."""
    if not isinstance(path, StorePath):
        return Directory(path)
    from tensorkeep.storage.store_files import StoreDirectory

    return StoreDirectory(path)


def open_file(path: Path) -> SourceFile:
    """Open a file; raises as `SourceFile`."""
    if not isinstance(path, StorePath):
        return SourceFile(path)
    from tensorkeep.storage.store_files import StoreFile

    return StoreFile(path)


def read_directory(path: Path, read: Callable[[Directory], T]) -> T:
    """Call a function with an open directory, again if it failed because the directory was replaced meanwhile.

    The directory remains open unless the function raises; what the function returns must close it.
    """
    for attempt in itertools.count(1):
        directory = open_directory(path)
        try:
            return read(directory)
        except BaseException as error:
            # Behind one name of the web there may be servers whose tags of a file differ for ever.
            left = attempt < _MOST_ATTEMPTS or not isinstance(path, StorePath)
            retry = left and isinstance(error, TensorkeepError) and directory.was_replaced()
            directory.close()
            if not retry:
                raise
            logger.info("%s was replaced while it was opened; reading the new one", path)
    raise AssertionError


def write_file(path: Path, content: bytes) -> None:
    """Create a small file with this content and make it durable; in a store, an object."""
    if not isinstance(path, StorePath):
        write_small(path, content)
        return
    from tensorkeep.storage import store_requests

    store_requests.put(path, content)


def store_mode(path: StorePath) -> int:
    """Return the mode bits of an object, or of a prefix with objects; 0 if nothing is there."""
    from tensorkeep.storage import store_requests

    if path.key:
        try:
            store_requests.head(path)
            return stat.S_IFREG
        except NotFoundError:
            pass
    try:
        return stat.S_IFDIR if store_names(path) else 0
    except UnsupportedError:
        if not path.has_listing:
            raise
        return stat.S_IFDIR  # with an object that cannot be listed


def store_names(path: StorePath) -> list[str]:
    """Return the names below a prefix, one level deep, sorted; without those that a web server cannot list."""
    from tensorkeep.storage import store_requests

    if path.has_listing:
        return sorted({name for name, _ in store_requests.children(path)})
    return [name for name in sorted(WELL_KNOWN) if store_first_bytes(path / name, 1) is not None]


def store_folders(path: StorePath) -> list[str]:
    """Return the names of the prefixes below a prefix, one level deep, sorted; none of a web server's."""
    from tensorkeep.storage import store_requests

    return sorted(name for name, status in store_requests.children(path) if status is None) if path.has_listing else []


def store_first_bytes(path: StorePath, count: int) -> bytes | None:
    """Return the first bytes of an object; None if it does not exist, or is a page that a web server makes."""
    from tensorkeep.storage import store_requests
    from tensorkeep.storage.store_files import first_bytes

    # A bucket itself is not an object.
    if not path.key:
        return None
    try:
        return first_bytes(path, count)
    except NotFoundError:
        return None
    except UnsupportedError:
        if store_requests.begins_as(path, b"<"):
            return None
        raise
