"""The zip container of a ``torch.save`` file: directory, checksums, and loading its pickle."""

import errno
import io
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    OutOfMemoryError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats.mapped_file import stream_of
from tensorkeep.formats.pickles import Recorder
from tensorkeep.formats.probe import check_is_no_other
from tensorkeep.machine import available_bytes, memory_file
from tensorkeep.storage import first_bytes, open_file
from tensorkeep.storage.direct_io import Bytes, store_error, store_errors

PICKLE = "data.pkl"

_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_DATA_FOLDER = "data/"
_ENCRYPTED = 1

_END, _END_BYTES = b"PK\5\6", 22
"""How the last record of an archive begins, and its length; torch writes no comment after it."""

_PADDING, _ALIGNMENT = b"FB", 64
"""Torch aligns the data of its records with a field of this name."""

_UNPACKED_BYTES, _MOST_TIMES, _COPY_BYTES = 256 * 1024**2, 64, 1024**2
"""A compressed archive may take so many bytes unpacked, and so many times its own; and the unit of copying."""
# Of TorchScript: `torch.jit.freeze` makes all weights constants of the code.
_CODE_FOLDER, _CONSTANTS, _CONSTANTS_FOLDER = "code/", "constants.pkl", "constants/"


class TorchZip:
    """The directory of a ``torch.save`` file of ``size`` bytes; checks it and all records except the tensors' storages.

    ``records`` are by name below the archive's root folder, ``storages`` are the length in bytes and the CRC-32 of each
    storage. The file is ``checksummed`` unless ``torch.serialization.set_crc32_options(False)`` wrote zeros instead.

    Of a TorchScript archive (``is_script``), the code, which is compressed, and ``constants`` are not read, and so not
    checked. If a tool has compressed the archive again, ``is_compressed`` is true, and no record is checked: `unpacked`
    is to be read.

    Raises CorruptCheckpointError if the container is damaged or breaks the rules of what torch writes; UnsupportedError
    if it is encrypted, holds several saves or comes from a big-endian machine; NotACheckpointError if it is another
    kind of file.
    """

    pickle: bytes

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(file) as archive:
                self._read(archive, size)
        except TensorkeepError:
            raise
        # Hostile bytes make `zipfile` raise a dozen types.
        except Exception as error:
            # `zipfile` takes a failing read for damage; a seek to where damaged bytes point is EINVAL.
            for cause in (error, error.__context__):
                if isinstance(cause, TensorkeepError):
                    raise cause from None
                if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                    raise store_error(cause, path, "read") from error
            file.seek(0)
            if file.read(len(_MAGIC)) != _MAGIC:
                check_is_no_other(path, error)
            raise CorruptCheckpointError(
                f"the zip container is damaged ({error})",
                path=path,
                remedy="the file was cut short or written over: take another copy",
            ) from error

    @property
    def pickle_bytes(self) -> int:
        """The length of the pickle."""
        return len(self.pickle)

    def pickled(self) -> tuple[Any, Recorder]:
        """Return what the pickle records, and the recorder; ValueError if it is malformed."""
        recorder = Recorder(io.BytesIO(self.pickle))
        return recorder.load(), recorder

    def storage_at(self, key: str, content: Bytes) -> int:
        """Return where a storage begins in ``content``, the file; ValueError if it does not exist."""
        info = self.records.get(_DATA_FOLDER + key)
        if info is None:
            raise ValueError(f"it has no storage {key!r:.50}")
        header = content[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
        if len(header) < _LOCAL_HEADER_BYTES:
            raise ValueError(f"the storage {key!r:.50} lies beyond the end")
        name, extra = header[26:30].view("<u2")
        return info.header_offset + _LOCAL_HEADER_BYTES + int(name) + int(extra)

    def storage_keys(self) -> list[str]:
        """Return the keys of all storages."""
        return [name.removeprefix(_DATA_FOLDER) for name in self.records if name.startswith(_DATA_FOLDER)]

    def local_headers(self) -> Iterator[tuple[int, int]]:
        """Yield where in the file the header before each record is."""
        for info in self.records.values():
            yield info.header_offset, info.header_offset + _LOCAL_HEADER_BYTES

    def _read(self, file: zipfile.ZipFile, size: int) -> None:
        infos = file.infolist()
        root = self._root(infos)
        self.is_script = any(info.filename == f"{root}{_CONSTANTS}" for info in infos)
        self._check_is_one_save(file, infos)
        self._check_directory(infos, size)
        if self.is_script:
            infos = [info for info in infos if not info.filename.startswith(f"{root}{_CODE_FOLDER}")]
        self.checksummed = any(info.CRC for info in infos)
        self.storages: set[tuple[int, int]] = set()
        self.records = {info.filename.removeprefix(root): info for info in infos}
        self.constants = sum(name.startswith(_CONSTANTS_FOLDER) for name in self.records) if self.is_script else 0
        self.is_compressed = any(info.compress_type == zipfile.ZIP_DEFLATED for info in infos)
        if self.is_compressed:
            return
        for info in infos:
            name = info.filename.removeprefix(root)
            if name.startswith(_DATA_FOLDER):
                self.storages.add((info.file_size, info.CRC))
            elif not self.is_script or name in (PICKLE, "byteorder"):
                self._check_small(file, info, name)

    def _check_small(self, file: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
        if not self.checksummed:
            info.CRC = None  # type: ignore[assignment]  # `zipfile` then reads it without checking
        with file.open(info) as record:
            content = record.read()
        if name == PICKLE:
            self.pickle = content
        if name == "byteorder" and content != b"little":
            raise UnsupportedError(
                "comes from a big-endian machine", path=self._path, remedy="save it again on a little-endian one"
            )

    def _check_is_one_save(self, file: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> None:
        """Refuse a file with several archives: its end describes the last one, which begins where another ends."""
        start = min(info.header_offset for info in infos)
        if start >= _END_BYTES and file.fp is not None:
            file.fp.seek(start - _END_BYTES)
            if file.fp.read(len(_END)) == _END:
                raise UnsupportedError(
                    "holds several files of torch.save, one after another, which torch.load does not read either",
                    path=self._path,
                    remedy="save each value to a file of its own, or all in one dict",
                )

    def unpacked(self, file: BinaryIO) -> BinaryIO:
        """Return a copy of a compressed archive in memory, as torch writes it: uncompressed, with aligned records.

        Raises UnsupportedError if the copy would be too large, OutOfMemoryError if there is no memory for it, and
        CorruptCheckpointError if a record is damaged.
        """
        needed = sum(info.file_size for info in self.records.values())
        size = sum(info.compress_size for info in self.records.values())
        most = _UNPACKED_BYTES + _MOST_TIMES * size
        if needed > most:
            raise UnsupportedError(
                f"its records take {needed:,} bytes unpacked, of which {most:,} at most are read from {size:,}",
                path=self._path,
                remedy="pack it again without compression: unzip FILE -d FOLDER; cd FOLDER; zip -0 -r FILE .",
            )
        if needed > available_bytes() // 2:
            raise OutOfMemoryError(f"takes {needed:,} bytes of memory to unpack", path=self._path)
        with store_errors(self._path, "unpack it in memory"):
            copy = os.fdopen(memory_file(), "w+b")
        try:
            with zipfile.ZipFile(file) as old, zipfile.ZipFile(copy, "w") as new:
                for info in self.records.values():
                    with old.open(info) as source, new.open(_aligned(info, copy.tell()), "w") as target:
                        shutil.copyfileobj(source, target, _COPY_BYTES)
        except BaseException as error:
            copy.close()
            if isinstance(error, TensorkeepError) or not isinstance(error, Exception):
                raise
            raise CorruptCheckpointError(f"a compressed record is damaged ({error})", path=self._path) from error
        return copy

    def _root(self, infos: Iterable[zipfile.ZipInfo]) -> str:
        split = (info.filename.partition("/") for info in infos)
        roots = dict.fromkeys(f"{root}/" for root, slash, name in split if slash and name == PICKLE)
        if len(roots) > 1:
            raise UnsupportedError(
                f"holds several files of torch.save, in the folders {', '.join(roots):.200}",
                path=self._path,
                remedy="unpack it, and pack each folder into a file of its own without compression: zip -0 -r",
            )
        if roots:
            return next(iter(roots))
        raise NotACheckpointError(
            f"is a zip archive without a folder that holds {PICKLE}, so torch.save did not write it",
            path=self._path,
            remedy="unpack it if a checkpoint is in it",
        )

    def _check_directory(self, infos: list[zipfile.ZipInfo], size: int) -> None:
        """Refuse zip files that torch never writes: duplicate names, more bytes than the file has."""
        seen: set[str] = set()
        for info in infos:
            if info.filename in seen:
                raise CorruptCheckpointError(f"the record {info.filename!r} occurs twice", path=self._path)
            seen.add(info.filename)
            if self.is_script and info.filename.partition("/")[2].startswith(_CODE_FOLDER):
                continue  # compressed, and never read
            if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UnsupportedError(
                    f"the record {info.filename!r} is encrypted, or compressed by method {info.compress_type}",
                    path=self._path,
                    remedy="unpack it with the program that packed it, and pack it again without either",
                )
            if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
                raise CorruptCheckpointError(
                    f"the record {info.filename!r} of {info.file_size:,} bytes takes {info.compress_size:,}",
                    path=self._path,
                )
        total = sum(info.compress_size + _LOCAL_HEADER_BYTES for info in infos)
        if total > size:
            raise CorruptCheckpointError(f"its records claim {total:,} bytes, the file has {size:,}", path=self._path)


def _aligned(info: zipfile.ZipInfo, offset: int) -> zipfile.ZipInfo:
    """Return a new record, uncompressed, whose data is aligned in a file that is written up to an offset."""
    record = zipfile.ZipInfo(info.filename)
    record.file_size = info.file_size
    # For a large record, `zipfile` adds a field with its length.
    large = 20 if info.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0
    start = offset + _LOCAL_HEADER_BYTES + len(info.filename.encode()) + large + len(_PADDING) + 2
    record.extra = _PADDING + (-start % _ALIGNMENT).to_bytes(2, "little") + bytes(-start % _ALIGNMENT)
    return record


def is_torch_zip(path: Path) -> bool:
    """Return whether a file begins like those of ``torch.save``, or is a zip file with such a pickle in it."""
    start = first_bytes(path, 512)
    if start is None or not start.startswith(_MAGIC):
        return False
    name_end = _LOCAL_HEADER_BYTES + int.from_bytes(start[26:28], "little")
    return start[_LOCAL_HEADER_BYTES:name_end].endswith(b"/data.pkl") or _lists_pickle(path)


def _lists_pickle(path: Path) -> bool:
    try:
        with open_file(path) as source, stream_of(source) as stream, zipfile.ZipFile(stream) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    # A damaged zip directory can make `zipfile` raise almost anything.
    except Exception:
        return False


def is_old_pickle(path: Path) -> bool:
    """Return whether a file begins with a pickle, as what ``torch.save`` wrote before version 1.6 does."""
    return begins_like_old_pickle(first_bytes(path, 2) or b"")


def begins_like_old_pickle(start: bytes) -> bool:
    """Return whether these are the first bytes of a bare pickle."""
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5
