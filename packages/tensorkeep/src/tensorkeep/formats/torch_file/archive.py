"""The two containers of ``torch.save``, zip archives and the older plain files, and the dtypes of their storages."""

import errno
import io
import pickle
import shutil
import threading
import zipfile
import zlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    OutOfMemoryError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats.finding import check_not_other
from tensorkeep.formats.mapped_file import MappedFile, stream_of
from tensorkeep.formats.torch_file.pickles import Bounded, Global, Pairs, Recorder
from tensorkeep.machine import available_bytes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import first_bytes, open_file
from tensorkeep.storage.system_errors import store_error

# The dtypes of storage classes in pickles.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}

DAMAGED = "the stored bytes have changed since the save: take another checkpoint or copy"

_PICKLE = "data.pkl"
_DATA_FOLDER = "data/"
_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30  # before the name and the extra field of a record
_ENCRYPTED = 1
# The last record of an archive. Torch writes no comment after it.
_END, _END_BYTES = b"PK\5\6", 22
# Torch pads the extra field of every record with this tag, so that the data starts at a multiple of 64.
_PADDING, _ALIGNMENT = b"FB", 64
# An unpacked archive may take 256 MiB and 64 times the bytes of the file: a zip bomb takes more.
_UNPACKED_BYTES, _MOST_TIMES, _COPY_BYTES = 256 * 1024**2, 64, 1024**2
# TorchScript: `torch.jit.freeze` turns all weights into constants of the code.
_CODE_FOLDER, _CONSTANTS, _CONSTANTS_FOLDER = "code/", "constants.pkl", "constants/"


class TorchZip:
    """The directory of a zip archive that ``torch.save`` wrote, with the CRC-32 of all records except storages checked.

    If ``is_compressed``, another tool packed the archive, no record is checked, and the caller reads `unpacked`.
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
            # `zipfile` reports a failing read as damage. A seek to an offset in damaged bytes is EINVAL.
            for cause in (error, error.__context__):
                if isinstance(cause, TensorkeepError):
                    raise cause from None
                if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                    raise store_error(cause, path, "read") from error
            file.seek(0)
            if file.read(len(_MAGIC)) != _MAGIC:
                check_not_other(path, error)
            raise CorruptCheckpointError(
                f"the zip container is damaged ({error})",
                path=path,
                remedy="the file was cut short or written over: take another copy",
            ) from error

    @property
    def pickle_bytes(self) -> int:
        return len(self.pickle)

    def recorded(self) -> tuple[Any, Recorder]:
        """Decode the pickle without executing it; ValueError if it is malformed."""
        recorder = Recorder(io.BytesIO(self.pickle))
        return recorder.load(), recorder

    def record_start(self, name: str, content: Bytes) -> int:
        """Return the offset of a record's data in ``content``, the file; ValueError if it lies beyond the end."""
        info = self.records[name]
        # The local header decides: torch's alignment field is not in the zip directory.
        header = content[max(0, info.header_offset) : info.header_offset + _LOCAL_HEADER_BYTES]
        if len(header) < _LOCAL_HEADER_BYTES:
            raise ValueError(f"the record {name!r:.50} lies beyond the end")
        name_bytes, extra_bytes = header[26:30].view("<u2")
        start = info.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
        if start + info.file_size > len(content):
            raise ValueError(f"the record {name!r:.50} reaches beyond the end")
        return start

    def storage_start(self, key: str, content: Bytes) -> int:
        """Return the offset of a storage in ``content``, the file; ValueError if the storage does not exist."""
        if _DATA_FOLDER + key not in self.records:
            raise ValueError(f"it has no storage {key!r:.50}")
        return self.record_start(_DATA_FOLDER + key, content)

    def storage_keys(self) -> list[str]:
        return [name.removeprefix(_DATA_FOLDER) for name in self.records if name.startswith(_DATA_FOLDER)]

    def local_headers(self) -> list[tuple[int, int]]:
        # Only fixed parts of the headers are read: the lengths of name and extra field, not their contents.
        starts = [self.records[_DATA_FOLDER + key].header_offset for key in self.storage_keys()]
        return [(start, start + _LOCAL_HEADER_BYTES) for start in starts]

    def crc_differs(self, name: str, data: Bytes) -> bool:
        return self.checksummed and zlib.crc32(data) != self.records[name].CRC

    def _read(self, file: zipfile.ZipFile, size: int) -> None:
        infos = file.infolist()
        root = self._root(infos)
        # A TorchScript archive also holds compressed code and constants. Neither is read nor checked.
        self.is_script = any(info.filename == f"{root}{_CONSTANTS}" for info in infos)
        self._check_is_one_save(file, infos)
        self._check_directory(infos, size)
        if self.is_script:
            infos = [info for info in infos if not info.filename.startswith(f"{root}{_CODE_FOLDER}")]
        # Torch writes 0 for all records or for none. An empty record has the CRC-32 0 in any case.
        self.checksummed = any(info.CRC for info in infos)
        self.storages: set[tuple[int, int]] = set()
        self.records = {info.filename.removeprefix(root): info for info in infos}
        self.constants = sum(name.startswith(_CONSTANTS_FOLDER) for name in self.records) if self.is_script else 0
        self.is_compressed = any(info.compress_type == zipfile.ZIP_DEFLATED for info in infos)
        # Offsets into a compressed archive are useless for mapping.
        if self.is_compressed:
            return
        for name, info in self.records.items():
            if name.startswith(_DATA_FOLDER):
                # Storages are large, and are checked when they are read.
                self.storages.add((info.file_size, info.CRC))
            elif not self.is_script or name in (_PICKLE, "byteorder"):
                self._check_small(file, info, name)

    def _check_small(self, file: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> None:
        if not self.checksummed:
            info.CRC = None  # type: ignore[assignment]  # `zipfile` then skips its check
        with file.open(info) as record:
            content = record.read()
        if name == _PICKLE:
            self.pickle = content
        if name == "byteorder" and content != b"little":
            raise _big_endian(self._path)

    def _root(self, infos: Iterable[zipfile.ZipInfo]) -> str:
        split = (info.filename.partition("/") for info in infos)
        roots = dict.fromkeys(f"{root}/" for root, slash, name in split if slash and name == _PICKLE)
        if len(roots) > 1:
            raise UnsupportedError(
                f"holds several files of torch.save, in the folders {', '.join(roots):.200}",
                path=self._path,
                remedy="unpack it, and pack each folder into a file of its own without compression: zip -0 -r",
            )
        if roots:
            return next(iter(roots))
        raise NotACheckpointError(
            f"is a zip archive without a folder that holds {_PICKLE}, so torch.save did not write it",
            path=self._path,
            remedy="unpack it if a checkpoint is in it",
        )

    def _check_is_one_save(self, file: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> None:
        # The end of a file with several archives describes the last one, which starts where another ends.
        start = min(info.header_offset for info in infos)
        # `zipfile` adds the bytes before the last archive to all offsets, so the first record of a single save is at 0.
        if start >= _END_BYTES and file.fp is not None:
            file.fp.seek(start - _END_BYTES)
            if file.fp.read(len(_END)) == _END:
                raise UnsupportedError(
                    "holds several files of torch.save, one after another, which torch.load does not read either",
                    path=self._path,
                    remedy="save each value to a file of its own, or all in one dict",
                )

    def _check_directory(self, infos: list[zipfile.ZipInfo], size: int) -> None:
        # Torch never writes these: duplicate names, or more bytes than the file has.
        names: set[str] = set()
        for info in infos:
            if info.filename in names:
                raise CorruptCheckpointError(f"the record {info.filename!r} occurs twice", path=self._path)
            names.add(info.filename)
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
        # Overlapping records would let a small file claim more memory than it has.
        total = sum(info.compress_size + _LOCAL_HEADER_BYTES for info in infos)
        if total > size:
            raise CorruptCheckpointError(f"its records claim {total:,} bytes, the file has {size:,}", path=self._path)

    def unpacked(self, file: BinaryIO) -> io.BytesIO:
        """Return a copy of a compressed archive in memory, as torch writes it: uncompressed, aligned."""
        # The directory is untrusted, so the sizes that it claims are compared with limits before anything is inflated.
        needed = sum(info.file_size for info in self.records.values())
        size = sum(info.compress_size for info in self.records.values())
        most = _UNPACKED_BYTES + _MOST_TIMES * size
        if needed > most:
            raise UnsupportedError(
                f"its records take {needed:,} bytes unpacked; at most {most:,} are read from {size:,}",
                path=self._path,
                remedy="pack it again without compression: unzip FILE -d FOLDER; cd FOLDER; zip -0 -r FILE .",
            )
        # Half of the memory is left for the tensors of the load.
        too_large = OutOfMemoryError(f"takes {needed:,} bytes of memory to unpack", path=self._path)
        if needed > available_bytes() // 2:
            raise too_large
        copy = io.BytesIO()
        try:
            with zipfile.ZipFile(file) as old, zipfile.ZipFile(copy, "w") as new:
                for info in self.records.values():
                    with old.open(info) as source, new.open(_aligned(info, copy.tell()), "w") as target:
                        shutil.copyfileobj(source, target, _COPY_BYTES)
        except MemoryError as error:
            raise too_large from error
        except TensorkeepError:
            raise
        # Hostile bytes make `zipfile` raise a dozen types.
        except Exception as error:
            raise CorruptCheckpointError(f"a compressed record is damaged ({error})", path=self._path) from error
        return copy


def _aligned(info: zipfile.ZipInfo, offset: int) -> zipfile.ZipInfo:
    record = zipfile.ZipInfo(info.filename)
    # `zipfile` decides with this size whether the record needs 64-bit lengths.
    record.file_size = info.file_size
    # For a large record, `zipfile` adds a field of 20 bytes with the 64-bit length.
    large = 20 if info.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0
    start = offset + _LOCAL_HEADER_BYTES + len(info.filename.encode()) + large + len(_PADDING) + 2
    record.extra = _PADDING + (-start % _ALIGNMENT).to_bytes(2, "little") + bytes(-start % _ALIGNMENT)
    return record


_MAGIC_NUMBER, _START_BYTES = 0x1950A86A20F9469CFC6C.to_bytes(10, "little"), 32
_VERSION = 1001
_COUNT_BYTES = 8
# Bytes per element of the storages of quantised tensors; all others have 1.
_QUANTISED = {"QInt32Storage": 4}


class OldFile:
    """A file as torch before version 1.6 wrote it; has the methods of `TorchZip`."""

    # A row of pickles (magic number, version, system, state, keys of storages), then the storages one after another,
    # each behind its number of elements. There are no checksums and no alignment.
    checksummed = is_script = False
    constants = 0

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._size = size
        self.storages: set[tuple[int, int]] = set()
        self._counts: dict[str, int] = {}
        file.seek(0)
        # The recorder trusts lengths in a pickle, so the stream has to limit reads.
        recorder = Recorder(Bounded(file, size))
        try:
            first = file.read(_START_BYTES)
            if _MAGIC_NUMBER not in first and (size > _START_BYTES or first.endswith(pickle.STOP)):
                raise UnsupportedError(
                    "is a bare Python pickle, which torch.save did not write; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it with pickle, and save tensors and plain values",
                )
            # The first pickle is the magic number, which was found above.
            file.seek(0)
            recorder.load()
            if recorder.load() != _VERSION:
                text = f"is of another version of torch's old format than {_VERSION}"
                raise UnsupportedError(text, path=path, remedy="load the file with torch, and save it again")
            system = recorder.load()
            if type(system) is Pairs and any(pair == ("little_endian", False) for pair in system):
                raise _big_endian(path)
            # The system pickle names nothing; what the state names must not mix with it.
            recorder.globals.clear()
            self._state, self._recorder = recorder.load(), recorder
            keys = recorder.load()
            self.pickle_bytes = start = file.tell()
            self._starts = self._find_storages(keys, start)
            file.seek(self._stop)
            if rest := file.read(1):
                what = "another save" if rest == pickle.PROTO else "what no tensor uses"
                raise UnsupportedError(
                    f"holds {what} after the first save, {size - self._stop:,} bytes",
                    path=path,
                    remedy="save each value to a file of its own, or all in one dict",
                )
        except ValueError as error:
            if isinstance(error, UnsupportedError):
                raise
            raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error

    def _find_storages(self, keys: Any, start: int) -> dict[str, int]:
        sizes: dict[str, int] = {}
        # The pickle has the number of elements; the size of one element follows from the storage class.
        for found in self._recorder.references:
            if type(found) is tuple and len(found) == 6 and found[0] == "storage" and type(found[1]) is Global:
                kind, key, _, count = found[1:5]
                dtype = BY_NAME.get(STORAGES.get(kind.name, ""))
                if type(count) is int and count >= 0 and type(key) is str:
                    self._counts[key] = count
                    sizes[key] = count * (dtype.itemsize if dtype else _QUANTISED.get(kind.name, 1))
        starts = {}
        for key in keys if type(keys) is list else ():
            if type(key) is not str or key not in sizes:
                raise ValueError("a storage belongs to no tensor")
            # No padding: the data starts right behind the count, at any offset.
            starts[key] = start + _COUNT_BYTES
            start += _COUNT_BYTES + sizes[key]
        if start > self._size:
            raise ValueError(f"its storages need {start:,} bytes, the file has {self._size:,}")
        self._stop = start
        return starts

    def recorded(self) -> tuple[Any, Recorder]:
        return self._state, self._recorder

    def storage_start(self, key: str, content: Bytes) -> int:
        """Return the offset of a storage in ``content``; ValueError if the pickle contradicts the file."""
        if key not in self._starts:
            raise ValueError(f"it has no storage {key!r:.50}")
        start = self._starts[key]
        # Without checksums, the count is the only redundancy in the file.
        if int.from_bytes(content[start - _COUNT_BYTES : start].tobytes(), "little") != self._counts[key]:
            raise ValueError(f"the storage {key!r:.50} has another length than the pickle says")
        return start

    def storage_keys(self) -> list[str]:
        return [*self._starts]

    def local_headers(self) -> list[tuple[int, int]]:
        return [(start - _COUNT_BYTES, start) for start in self._starts.values()]


Archive = TorchZip | OldFile


class StorageCheck:
    """Compares the CRC-32 of a storage with its archive, once, in the first thread that reads it."""

    def __init__(self, name: str, content: Bytes, known: Container[tuple[int, int]]) -> None:
        self.name = name  # of the first leaf in the storage
        self.content = content
        self._known = known  # length and CRC-32 of the storages in the archive
        self._is_intact: bool | None = None
        self._lock = threading.Lock()

    def run(self, file: MappedFile) -> None:
        """Raise CorruptCheckpointError if the CRC-32 is wrong."""
        if self._is_intact is None:
            # The lock comes second, so that threads that wait for it share the requests for the memory.
            with file.needed_by(self.content), self._lock:
                if self._is_intact is None:
                    # The memory that tensors use is checked, and not the record of some name: a hostile pickle could
                    # name one record and a hostile directory place another one there.
                    self._is_intact = (len(self.content), zlib.crc32(self.content)) in self._known
        if not self._is_intact:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong", path=file.path, name=self.name, remedy=DAMAGED
            )


def _big_endian(path: Path) -> UnsupportedError:
    remedy = "save it again on a little-endian machine"
    return UnsupportedError("comes from a big-endian machine", path=path, remedy=remedy)


def is_torch_file(path: Path) -> bool:
    start = first_bytes(path, 512) or b""
    if begins_like_pickle(start):
        return True
    if not start.startswith(_MAGIC):
        return False
    # Torch writes the pickle first, so the first bytes usually decide.
    name_end = _LOCAL_HEADER_BYTES + int.from_bytes(start[26:28], "little")
    if start[_LOCAL_HEADER_BYTES:name_end].endswith(b"/data.pkl"):
        return True
    try:
        with open_file(path) as source, stream_of(source) as stream, zipfile.ZipFile(stream) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    # A damaged zip directory can make `zipfile` raise almost anything.
    except Exception:
        return False


def begins_like_pickle(start: bytes) -> bool:
    return len(start) >= 2 and start[0] == 0x80 and 2 <= start[1] <= 5
