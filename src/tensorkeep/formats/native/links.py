"""Hard links from a new checkpoint to the files of an earlier one.

A link is made by name. The name may stand for another file than the one that was opened, if that was replaced
meanwhile, and the file may not be durable yet, if it was copied there a moment ago: both are checked.
"""

import os
import re
from collections.abc import Container
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats.blockfile.plan import coded_name
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.formats.native.records import FILE_NAME_PATTERN, FileRecord
from tensorkeep.io.files import store_errors

_PREFIX = "from-"
_LONGEST_ORIGIN = 100


class Links:
    """Links in a new checkpoint's directory to the files of an open earlier one.

    ``names`` are their names there, by their numbers in the earlier manifest. If it is ``shared``, other ranks link
    files into the directory at the same time, by the same names; links that are not used then remain.
    """

    def __init__(self, opened: OpenFiles, directory: Path, *, shared: bool = False) -> None:
        self.names: dict[int, str] = {}
        self._opened = opened
        self._directory = directory
        self._origin = _origin(opened.path)
        self._shared = shared
        self._taken: set[str] = set()
        # Of all files, so that every rank finds the same names.
        self._names = [self._name(record) for record in opened.records]

    def add(self, number: int) -> str | None:
        """Link a file; return None, or the reason why it cannot be linked."""
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

    def finish(self, used: Container[int], first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Remove the links that are not used, and make the other files durable.

        Return the records of these files, and their new numbers, from ``first`` on, by those in the earlier manifest.

        Raises CorruptCheckpointError if a file has changed its size; StoreError if the operating system refuses access.
        """
        records: list[FileRecord] = []
        numbers: dict[int, int] = {}
        for number, name in self.names.items():
            if number not in used:
                if not self._shared:
                    _remove(self._directory / name)
                continue
            old = self._opened.records[number]
            _make_durable(self._directory / name, old.bytes)
            numbers[number] = first + len(records)
            records.append(FileRecord(name, old.bytes, old.head_bytes, old.head, old.origin or self._origin))
        return records, numbers


def _origin(path: Path) -> str:
    """Return a checkpoint's name in the characters that file names may have; never empty."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", os.path.basename(os.path.abspath(path)))[:_LONGEST_ORIGIN] or "root"


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
            os.close(fd)
    if found != size:
        raise CorruptCheckpointError(
            f"the file of an earlier checkpoint was changed while it was linked: it has {found:,} bytes, not {size:,}",
            path=link,
            remedy="find the program that writes into checkpoints, and save again",
        )
