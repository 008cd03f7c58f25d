"""Where checkpoints are read from: the directories of a file system, or the prefixes of an object store."""

import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorkeep.errors import NotFoundError, TensorkeepError
from tensorkeep.io.directory import Directory
from tensorkeep.paths import StorePath

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WELL_KNOWN = ("manifest.json", "model.safetensors.index.json", "model.safetensors")
"""Names that are tried on a web server, which lists none."""


def open_directory(path: Path) -> Directory:
    """Open a directory; raises as `Directory`."""
    if not isinstance(path, StorePath):
        return Directory(path)
    from tensorkeep.io.store_directory import StoreDirectory

    return StoreDirectory(path)


def read_directory(path: Path, read: Callable[[Directory], T]) -> T:
    """Call a function with an open directory, again if it failed because the directory was replaced meanwhile.

    The directory remains open unless the function raises; what the function returns must close it.
    """
    while True:
        directory = open_directory(path)
        try:
            return read(directory)
        except BaseException as error:
            retry = isinstance(error, TensorkeepError) and directory.was_replaced()
            directory.close()
            if not retry:
                raise
            logger.info("%s was replaced while it was opened; reading the new one", path)


def store_mode(path: StorePath) -> int:
    """Return the mode bits of an object, or of a prefix with objects; 0 if nothing is there."""
    from tensorkeep.io import stores

    if path.key:
        try:
            stores.head(path)
            return stat.S_IFREG
        except NotFoundError:
            pass
    return stat.S_IFDIR if store_names(path) else 0


def store_names(path: StorePath) -> list[str]:
    """Return the names below a prefix, one level deep, sorted; without those that a web server cannot list."""
    from tensorkeep.io import stores

    if stores.lists(path):
        return sorted({name for name, _ in stores.children(path)})
    return [name for name in _WELL_KNOWN if store_first_bytes(path / name, 1) is not None]


def store_first_bytes(path: StorePath, count: int) -> bytes | None:
    """Return the first bytes of an object; None if it does not exist."""
    from tensorkeep.io import stores

    try:
        return bytes(stores.get(path, 0, count))
    except NotFoundError:
        return None
