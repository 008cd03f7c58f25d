"""Checkpoints in object stores, read as directories and files are: a prefix is a directory, an object a file."""

import os
from typing import NoReturn

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, UnsupportedError
from tensorkeep.io import stores
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.source_file import SourceFile
from tensorkeep.paths import StorePath


class StoreFile(SourceFile):
    """An object that many threads read at once, one request for each range; see `SourceFile`.

    It is read as it was when it was opened: if it is replaced meanwhile, reading raises StoreError.
    """

    def __init__(self, path: StorePath) -> None:
        self.path = path
        self._url = path
        found = stores.head(path)
        self.size = found.size
        self.status = found.as_stat()
        self._tag = found.tag

    @property
    def fd_path(self) -> str:
        raise _on_disks_only(self._url)

    def read_into(self, offset: int, out: Bytes) -> None:
        out[:] = self.fetch(offset, len(out), out)

    def bypasses_cache(self, offset: int, count: int) -> bool:
        # One request for a whole range, not one for each piece.
        return True

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the object, in memory of their own."""
        if not count:
            return scratch[:0]
        # A range that begins at the end or later is an error of the request, one that ends later is cut short.
        found = stores.get(self._url, offset, offset + count, tag=self._tag) if offset < self.size else b""
        if len(found) != count:
            raise CorruptCheckpointError(
                f"the object ends at byte {offset + len(found):,}, inside the data", path=self.path
            )
        return np.frombuffer(found, np.uint8)

    def map_private(self) -> NoReturn:
        raise _on_disks_only(self._url)

    def close(self) -> None:
        """Do nothing: an object is not held open."""


class StoreDirectory(Directory):
    """The objects below a prefix; see `Directory`.

    Its files never change: a checkpoint is replaced by another manifest, which names other objects.
    """

    def __init__(self, path: StorePath) -> None:
        self.path = path
        self._url = path
        self._seen: dict[str, str | None] = {}

    @property
    def fd_path(self) -> str:
        raise _on_disks_only(self._url)

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        file = StoreFile(self._url / name)
        self._seen.setdefault(name, file._tag)
        return file

    def open_one_of(self, count: int, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        return self.open(name)

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file; FileNotFoundError if it does not exist."""
        try:
            return stores.head(self._url / name).as_stat()
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error

    def was_replaced(self) -> bool:
        """Return whether a file that was opened has another content now, or is missing."""
        for name, tag in self._seen.items():
            try:
                if stores.head(self._url / name).tag != tag:
                    return True
            except NotFoundError:
                return True
            except StoreError:
                return False  # the error that was raised before says more
        return False

    def close(self) -> None:
        """Do nothing: a prefix is not held open."""


def _on_disks_only(path: StorePath) -> UnsupportedError:
    return UnsupportedError(
        "this is not possible in an object store", path=path, remedy="copy the checkpoint to a disk first"
    )
