"""The zip container of a ``torch.save`` file: directory, checksums, and loading its pickle."""

import errno
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats.mapped_file import stream_of
from tensorkeep.formats.probe import first_bytes
from tensorkeep.io.files import store_error
from tensorkeep.io.places import open_file

PICKLE = "data.pkl"

_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_DATA_FOLDER = "data/"


class TorchZip:
    """The directory of a ``torch.save`` file of ``size`` bytes; checks it and all records except the tensors' storages.

    ``records`` are by name below the archive's root folder, ``storages`` are the length in bytes and the CRC-32 of each
    storage. The file is ``checksummed`` unless ``torch.serialization.set_crc32_options(False)`` wrote zeros instead.

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
            # `zipfile` takes a failing read for damage; a seek to where damaged bytes point is EINVAL.
            for cause in (error, error.__context__):
                if isinstance(cause, TensorkeepError):
                    raise cause from None
                if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                    raise store_error(cause, path, "read") from error
            raise CorruptCheckpointError(
                f"the zip container is damaged ({error})",
                path=path,
                remedy="the file was cut short or written over: take another copy",
            ) from error

    def local_headers(self) -> Iterator[tuple[int, int]]:
        """Yield where in the file the header before each record is."""
        for info in self.records.values():
            yield info.header_offset, info.header_offset + _LOCAL_HEADER_BYTES

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
        with open_file(path) as source, stream_of(source) as stream, zipfile.ZipFile(stream) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    # A damaged zip directory can make `zipfile` raise almost anything.
    except Exception:
        return False


def is_old_pickle(path: Path) -> bool:
    """Return whether a file is a bare pickle, as ``torch.save`` wrote before version 1.6."""
    return begins_like_old_pickle(first_bytes(path, 2) or b"")


def begins_like_old_pickle(start: bytes) -> bool:
    """Return whether these are the first bytes of a bare pickle."""
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5
