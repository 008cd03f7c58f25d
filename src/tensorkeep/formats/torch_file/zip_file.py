"""The zip container of a ``torch.save`` file: directory, checksums, and loading its pickle."""

import io
import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats.probe import first_bytes
from tensorkeep.io.files import store_error

PICKLE = "data.pkl"

_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_DATA_FOLDER = "data/"


class _File(io.FileIO):
    """A file that remembers a failing read: `zipfile` takes any `OSError` for damage."""

    failure: StoreError | None = None

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.failure = store_error(error, os.fspath(self.name), "read")
            raise self.failure from error

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            self.failure = store_error(error, os.fspath(self.name), "read")
            raise self.failure from error


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for `TorchZip`; failures of this call and of reads are StoreErrors."""
    # O_NONBLOCK: opening a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        if path.is_dir():
            raise NotACheckpointError("is a directory, not a file of torch.save", path=path)
        raw = _File(path, opener=lambda name, _: os.open(name, flags))
    except FileNotFoundError as error:
        raise NotFoundError("the file does not exist", path=path) from error
    except OSError as error:
        raise store_error(error, path, "open the file") from error
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise NotACheckpointError("is not a regular file, as torch.save writes", path=path)
    return io.BufferedReader(raw)


class TorchZip:
    """The directory of a ``torch.save`` file; checks it and all records except the tensors' storages.

    Parameters
    ----------
    file : binary file
        As `open_file` returns it.
    size : int
        Its length in bytes.
    path : Path
        For errors.

    Attributes
    ----------
    checksummed : bool
        Whether CRC-32s were written: ``torch.serialization.set_crc32_options(False)`` writes zeros instead.
    storages : set of (int, int)
        Length in bytes and CRC-32 of each storage.
    pickle_bytes : int
        Length of the pickle.
    records : dict of str to ZipInfo
        Each record by its name below the archive's root folder.

    Raises CorruptCheckpointError if the container is damaged or breaks the rules of what torch writes; UnsupportedError
    if it is a TorchScript archive or comes from a big-endian machine.
    """

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(file) as archive:
                self._read(archive, size)
        except TensorkeepError:
            raise
        # Hostile bytes make `zipfile` raise a dozen types.
        except Exception as error:
            raw = file.raw if isinstance(file, io.BufferedReader) else None
            if isinstance(raw, _File) and raw.failure is not None:
                raise raw.failure from error
            raise CorruptCheckpointError(
                f"the zip container is damaged ({error})",
                path=path,
                remedy="the file was cut short or written over: take another copy",
            ) from error

    def _read(self, file: zipfile.ZipFile, size: int) -> None:
        infos = file.infolist()
        self._check_directory(infos, size)
        root = self._root(infos)
        self.checksummed = any(info.CRC for info in infos)
        self.storages: set[tuple[int, int]] = set()
        self.records = {info.filename.removeprefix(root): info for info in infos}
        if "constants.pkl" in self.records:
            raise UnsupportedError(
                "is a TorchScript archive, which holds code besides tensors",
                path=self._path,
                remedy="if you trust it, load it with torch.jit.load and save its state_dict()",
            )
        for info in infos:
            name = info.filename.removeprefix(root)
            if name.startswith(_DATA_FOLDER):
                self.storages.add((info.file_size, info.CRC))
            else:
                self._check_small(file, info, name)

    def _check_small(self, file: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
        if not self.checksummed:
            info.CRC = None  # type: ignore[assignment]  # `zipfile` then reads it without checking
        with file.open(info) as record:
            content = record.read()
        if name == PICKLE:
            self.pickle_bytes = len(content)
        if name == "byteorder" and content != b"little":
            raise UnsupportedError(
                "comes from a big-endian machine", path=self._path, remedy="save it again on a little-endian one"
            )

    def _root(self, infos: Iterable[zipfile.ZipInfo]) -> str:
        for info in infos:
            root, slash, name = info.filename.partition("/")
            if slash and name == PICKLE:
                return f"{root}/"
        raise CorruptCheckpointError(f"holds no {PICKLE}, so torch did not save it", path=self._path)

    def _check_directory(self, infos: list[zipfile.ZipInfo], size: int) -> None:
        """Refuse zip files that torch never writes: duplicate names, compression, more bytes than the file has."""
        seen: set[str] = set()
        for info in infos:
            if info.filename in seen:
                raise CorruptCheckpointError(f"the record {info.filename!r} occurs twice", path=self._path)
            seen.add(info.filename)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise CorruptCheckpointError(
                    f"the record {info.filename!r} is compressed, which torch never does", path=self._path
                )
        total = sum(info.file_size + _LOCAL_HEADER_BYTES for info in infos)
        if total > size:
            raise CorruptCheckpointError(f"its records claim {total:,} bytes, the file has {size:,}", path=self._path)


def is_torch_zip(path: Path) -> bool:
    """Return whether a file begins like those of ``torch.save``, or is a zip file with such a pickle in it."""
    start = first_bytes(path, 512)
    if start is None or not start.startswith(_MAGIC):
        return False
    name_end = _LOCAL_HEADER_BYTES + int.from_bytes(start[26:28], "little")
    return start[_LOCAL_HEADER_BYTES:name_end].endswith(b"/data.pkl") or _lists_pickle(path)


def _lists_pickle(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    # A damaged zip directory can make `zipfile` raise almost anything.
    except Exception:
        return False


def is_old_pickle(path: Path) -> bool:
    """Return whether a file is a bare pickle, as ``torch.save`` wrote before version 1.6."""
    start = first_bytes(path, 2)
    return start is not None and begins_like_old_pickle(start)


def begins_like_old_pickle(start: bytes) -> bool:
    """Return whether these are the first bytes of a bare pickle."""
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5
