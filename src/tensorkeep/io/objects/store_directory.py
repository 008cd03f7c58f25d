"""Checkpoints in object stores, read as directories and files are: a prefix is a directory, an object a file."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import NoReturn

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, UnsupportedError
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects import stores
from tensorkeep.io.source_file import SourceFile
from tensorkeep.paths import StorePath

_FIRST_BYTES = 64 * 1024
_MOST_OBJECTS = 8
_first: dict[StorePath, tuple[str, bytes]] = {}
"""Tags and first bytes of the objects that `first_bytes` read last."""


def first_bytes(path: StorePath, count: int) -> bytes:
    """Return the first bytes of an object, as many as it has; NotFoundError if it does not exist.

    They are kept, for as long as the object has the same tag: opening a checkpoint reads its manifest several times.
    """
    if count > _FIRST_BYTES:
        return stores.read(path, count)[0]
    known = _first.get(path)
    if not known or stores.head(path).tag != known[0]:
        content, status = stores.read(path, _FIRST_BYTES)
        known = status.tag or "", content
        # Listed by one call of C code: other threads change the dictionary, which must not happen within an iteration.
        for oldest in list(_first)[: 1 - _MOST_OBJECTS]:
            _first.pop(oldest, None)
        _first[path] = known
    return known[1][:count]


@dataclass
class _Window:
    """A range of an object, and its bytes, once they were read."""

    start: int
    stop: int
    content: memoryview | None = None


class StoreFile(SourceFile):
    """An object that many threads read at once, one request for each range; see `SourceFile`.

    It is read as it was when it was opened, or was ``found`` before: if it is replaced meanwhile, reading raises
    StoreError. With ``content``, all that it has, no request is made.
    """

    def __init__(self, path: StorePath, found: stores.ObjectStatus | None = None, content: bytes | None = None) -> None:
        self.path = path
        self._content = content
        self._url = path
        found = found or stores.head(path)
        self.size = found.size
        self.status = found.as_stat()
        self._tag = found.tag
        self._windows: dict[int, list[_Window]] = {}  # by thread

    @property
    def fd_path(self) -> str:
        raise _on_disks_only(self._url)

    @contextmanager
    def ahead(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """In this context, what this thread reads of one of these ranges is read with all of it, by one request."""
        self._windows[get_ident()] = [_Window(start, stop) for start, stop in ranges]
        try:
            yield
        finally:
            del self._windows[get_ident()]

    def read_into(self, offset: int, out: Bytes) -> None:
        out[:] = self.fetch(offset, len(out), out)

    def bypasses_cache(self, offset: int, count: int) -> bool:
        # One request for a whole range, not one for each piece.
        return True

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the object, in memory of their own."""
        if not count:
            return scratch[:0]
        for window in self._windows.get(get_ident(), ()):
            if window.start <= offset and offset + count <= window.stop:
                if window.content is None:
                    window.content = self._get(window.start, window.stop)
                found = window.content[offset - window.start :][:count]
                break
        else:
            found = self._get(offset, offset + count)
        if len(found) != count:
            raise CorruptCheckpointError(
                f"the object ends at byte {offset + len(found):,}, inside the data", path=self.path
            )
        return np.frombuffer(found, np.uint8)

    def _get(self, start: int, stop: int) -> memoryview:
        if self._content is not None:
            return memoryview(self._content)[start:stop]
        tag, known = _first.get(self._url, ("", b""))
        if tag and tag == self._tag and stop <= len(known):
            return memoryview(known)[start:stop]
        # A range that begins at the end or later is an error of the request, one that ends later is cut short.
        return stores.get(self._url, start, stop, tag=self._tag) if start < self.size else memoryview(b"")

    def map_private(self) -> NoReturn:
        raise _on_disks_only(self._url)

    def close(self) -> None:
        """Do nothing: an object is not held open."""


class StoreDirectory(Directory):
    """The objects below a prefix; see `Directory`.

    Its files never change: a checkpoint is replaced by another manifest, which names other objects. The name
    ``../NAME/FILE`` is that of an object of another checkpoint of the same run. With ``known``, the objects of a
    listing by their keys, no request is made for their status.
    """

    def __init__(self, path: StorePath, known: Mapping[str, stores.ObjectStatus] | None = None) -> None:
        self.path = path
        self._url = path
        self._known = known
        self._seen: dict[str, stores.ObjectStatus] = {}
        self._contents: dict[str, bytes] = {}

    @property
    def fd_path(self) -> str:
        raise _on_disks_only(self._url)

    @property
    def stable_path(self) -> StorePath:
        """The path itself."""
        return self._url

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        # The same object for as long as this directory is open: if it was replaced, reading it is an error.
        found = self._seen.get(name) or self._look_at(name)
        self._seen.setdefault(name, found)
        return StoreFile(self.path_of(name), found, self._contents.get(name))

    def read_once(self, name: str) -> bytes:
        """Return the content of a file, which no other method reads again."""
        file = self.open(name)
        self._contents[name] = file.read(0, file.size)
        return self._contents[name]

    def open_one_of(self, count: int, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        return self.open(name)

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file, when it was opened if it was; FileNotFoundError if it does not exist."""
        try:
            return (self._seen.get(name) or self._look_at(name)).as_stat()
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error

    def path_of(self, name: str) -> StorePath:
        return self._url.parent / name[3:] if name.startswith("../") else self._url / name

    def _look_at(self, name: str) -> stores.ObjectStatus:
        path = self.path_of(name)
        if self._known is None:
            # An object of another checkpoint has that as well.
            return stores.head(path)._replace(links=2 if name.startswith("../") else 1)
        if path.key not in self._known:
            raise NotFoundError("does not exist", path=path)
        return self._known[path.key]

    def changed(self, names: Iterable[str]) -> str | None:
        """Return the first of some files that were opened that has another content now, or is missing."""
        for name in names:
            try:
                if stores.head(self.path_of(name)).tag != self._seen[name].tag:
                    return name
            except NotFoundError:
                return name
        return None

    def was_replaced(self) -> bool:
        """Return whether a file that was opened has another content now, or is missing."""
        try:
            return self.changed(self._seen) is not None
        except StoreError:
            return False  # the error that was raised before says more

    def close(self) -> None:
        """Do nothing: a prefix is not held open."""


def _on_disks_only(path: StorePath) -> UnsupportedError:
    return UnsupportedError(
        "this is not possible in an object store", path=path, remedy="copy the checkpoint to a disk first"
    )
