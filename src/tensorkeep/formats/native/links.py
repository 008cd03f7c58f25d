"""The files of an earlier checkpoint in a new one: hard links on a disk, references in an object store.

A link is made by name. The name may stand for another file than the one that was opened, if that was replaced
meanwhile, and the file may not be durable yet, if it was copied there a moment ago: both are checked. A reference is
only a name in the new manifest: the object remains with the earlier step until no step names it.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Container
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, StoreError
from tensorkeep.formats.blockfile.plan import coded_name
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.formats.native.records import FILE_NAME_PATTERN, FileRecord
from tensorkeep.paths import StorePath, absolute
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import MANIFEST_NAME
from tensorkeep.storage.direct_io import close, store_errors

_PREFIX = "from-"
_LONGEST_ORIGIN = 100


class SharedFiles(ABC):
    """Files of an open earlier checkpoint that a new one has as well.

    ``names`` are their names there, by their numbers in the earlier manifest.
    """

    def __init__(self, opened: OpenFiles) -> None:
        self.names: dict[int, str] = {}
        self._opened = opened
        self._origin = _origin(opened.path)

    @abstractmethod
    def add(self, number: int) -> str | None:
        """Share a file; return None, or the reason why it cannot be shared."""

    def finish(self, used: Container[int], first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Forget the files that are not used, and make sure that the others remain.

        Return the records of these files, and their new numbers, from ``first`` on, by those in the earlier manifest.

        Raises CorruptCheckpointError or StoreError if a file was changed or removed meanwhile; StoreError if the
        operating system or the store refuses access.
        """
        self._settle(used)
        records: list[FileRecord] = []
        numbers: dict[int, int] = {}
        for number, name in self.names.items():
            if number in used:
                old = self._opened.records[number]
                numbers[number] = first + len(records)
                records.append(FileRecord(name, old.bytes, old.head_bytes, old.head, old.origin or self._origin))
        return records, numbers

    @abstractmethod
    def _settle(self, used: Container[int]) -> None:
        """Remove what is not used, and check the rest."""


def share_files(opened: OpenFiles, directory: Path, *, shared: bool) -> SharedFiles:
    """Return how the files of an open checkpoint are shared with a new one, which is written to a directory."""
    if storage_of(directory).remote or storage_of(opened.path).remote:
        return References(opened, directory)
    return Links(opened, directory, shared=shared)


class References(SharedFiles):
    """Names of objects of an earlier step, for the manifest of a new step in the same object store.

    Only steps of one run share objects: before an object of one is deleted, the manifests of all others are looked at.
    """

    def __init__(self, opened: OpenFiles, directory: Path) -> None:
        super().__init__(opened)
        self._directory = directory

    def add(self, number: int) -> str | None:
        name = self._opened.records[number].name
        here, there = self._directory, self._opened.path
        steps = [path for path in (here, there) if isinstance(path, StorePath) and path.is_step]
        if len(steps) < 2 or here.parent != there.parent:
            return f"{name} cannot be shared: in an object store, only steps of one run share objects"
        self.names[number] = name if "/" in name or here == there else f"../{there.name}/{name}"
        return None

    def _settle(self, used: Container[int]) -> None:
        # While the earlier manifest is there, no other process deletes what it names; afterwards, not before the grace
        # period is over.
        names = [MANIFEST_NAME, *(self._opened.records[number].name for number in self.names if number in used)]
        directory = self._opened.directory
        changed = directory.changed(names)
        if changed is not None:
            raise StoreError(
                "was deleted or replaced during a save that shares it",
                path=directory.path_of(changed),
                remedy="save again; a step that is the base of a save must remain until that is over",
            )


class Links(SharedFiles):
    """Hard links in a new checkpoint's directory to the files of an open earlier one.

    If the directory is ``shared``, other ranks link files into it at the same time, by the same names; links that are
    not used then remain.
    """

    def __init__(self, opened: OpenFiles, directory: Path, *, shared: bool = False) -> None:
        super().__init__(opened)
        self._directory = directory
        self._shared = shared
        self._taken: set[str] = set()
        # Of all files, so that every rank finds the same names.
        self._names = [self._name(record) for record in opened.records]

    def add(self, number: int) -> str | None:
        record = self._opened.records[number]
        name = self._names[number]
        if not re.search(FILE_NAME_PATTERN, name):
            return f"{record.name} cannot be linked: its new name would be too long"
        link = self._directory / name
        try:
            os.link(f"{self._opened.directory.fd_path}/{record.name}", link)
            is_own = True
        except FileExistsError:
            is_own = False  # of another rank
        except OSError as error:
            return f"{record.name} cannot be linked: {error.strerror}"
        opened = self._opened.statuses[number]
        with store_errors(link, "look at the link"):
            found = os.lstat(link)
        if (found.st_dev, found.st_ino, found.st_size) != (opened.st_dev, opened.st_ino, opened.st_size):
            if is_own:
                _remove(link)
            return f"{record.name} cannot be linked: it was replaced or changed meanwhile"
        self.names[number] = name
        return None

    def _name(self, record: FileRecord) -> str:
        """Return a name that is unique among the links, also where the file system ignores case."""
        name = record.name if record.name.startswith(_PREFIX) else f"{_PREFIX}{self._origin}-{record.name}"
        # Other tools must not take the tensors of an earlier step for those of this one.
        name = coded_name(name)
        stem, _, suffix = name.rpartition(".")
        tried, count = name, 1
        while tried.casefold() in self._taken:
            count += 1
            tried = f"{stem}-{count}.{suffix}"
        self._taken.add(tried.casefold())
        return tried

    def _settle(self, used: Container[int]) -> None:
        for number, name in self.names.items():
            if number in used:
                _make_durable(self._directory / name, self._opened.records[number].bytes)
            elif not self._shared:
                _remove(self._directory / name)


def _origin(path: Path) -> str:
    """Return a checkpoint's name in the characters that file names may have; never empty."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", absolute(path).name)[:_LONGEST_ORIGIN] or "root"


def _remove(link: Path) -> None:
    with store_errors(link, "remove the link"):
        os.unlink(link)


def _make_durable(link: Path, size: int) -> None:
    with store_errors(link, "make the linked file durable"):
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            found = os.fstat(fd).st_size
        finally:
            close(fd)
    if found != size:
        raise CorruptCheckpointError(
            f"the file of an earlier checkpoint was changed while it was linked: it has {found:,} bytes, not {size:,}",
            path=link,
            remedy="find the program that writes into checkpoints, and save again",
        )
