"""Pieces of a distributed checkpoint: ``torch.save`` files inside a file that is memory.

A piece that is a tensor is never unpickled: its small pickle is decoded without executing it, and the tensor becomes a
numpy array over the mapped memory, in the layout that was saved. Torch writes the CRC-32 of that memory and does not
check it; here it is checked before the first byte is returned.
"""

import threading
import zlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats.boxes import box_shape
from tensorkeep.formats.dcp.metadata import Chunk, Location, TensorEntry
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import MappedFile
from tensorkeep.formats.pickles.inert_pickle import Call, Global, PersistentId, decode
from tensorkeep.formats.pickles.tensors import STORAGES
from tensorkeep.formats.torch_file.unpickle import Unpickled, load_untrusted, storage_of
from tensorkeep.formats.torch_file.zip_file import PICKLE, TorchZip
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME

_DAMAGED = "the stored bytes have changed since the save: take another checkpoint or copy"
_LOCAL_HEADER_BYTES = 30


class PieceZip:
    """The zip container of a piece; all records but the storages of tensors are checked on opening.

    Raises the errors of `TorchZip`.
    """

    def __init__(self, file: MappedFile, location: Location) -> None:
        self._file = file
        stop = location.offset + location.length
        self.content = file.content[location.offset : stop]
        with file.stream(location.offset, stop) as stream:
            self.archive = TorchZip(stream, location.length, file.path)

    def record(self, name: str) -> Bytes:
        """Return the bytes of a record, not copied; they are used as `MappedFile` says.

        Raises ValueError if it is missing, or reaches beyond the piece.
        """
        info = self.archive.records.get(name)
        if info is None:
            raise ValueError(f"it has no record {name!r}")
        header = self.content[max(0, info.header_offset) : info.header_offset + _LOCAL_HEADER_BYTES]
        if len(header) < _LOCAL_HEADER_BYTES:
            raise ValueError(f"the record {name!r} reaches beyond its end")
        with self._file.needed_by(header):
            name_length, extra_length = header[26:30].view("<u2")
        start = info.header_offset + _LOCAL_HEADER_BYTES + int(name_length) + int(extra_length)
        content = self.content[start : start + info.file_size]
        if content.size != info.file_size:
            raise ValueError(f"the record {name!r} reaches beyond its end")
        return content

    def crc(self, name: str) -> int | None:
        """Return the stored CRC-32 of a record; None if torch was configured not to write one."""
        return int(self.archive.records[name].CRC) if self.archive.checksummed else None

    def check(self) -> None:
        """Check every record; raises CorruptCheckpointError if one is damaged."""
        for name in self.archive.records:
            with decoding(self._file.path, what="a piece is malformed"):
                content = self.record(name)
            with self._file.needed_by(content):
                found = zlib.crc32(content)
            if self.crc(name) not in (None, found):
                raise CorruptCheckpointError(
                    f"the CRC-32 of the record {name!r} is wrong", path=self._file.path, remedy=_DAMAGED
                )


def load_value(name: str, location: Location, file: MappedFile, allow: Collection[str]) -> tuple[Unpickled, int]:
    """Return a plain value, and the length of its pickle.

    Raises CorruptCheckpointError if it is damaged; UnsupportedError if it names what runs programs or code.
    """
    piece = PieceZip(file, location)
    with decoding(file.path, name):
        piece.check()
        with file.needed_by(piece.content):
            content = storage_of(piece.content)
        value = load_untrusted(content, piece.archive, file.path, allow)
    return value, piece.archive.pickle_bytes


class TensorPiece:
    """One chunk of a tensor; opened and checked once, by the thread that asks first.

    Once it was opened, ``array`` has the bits of its elements as unsigned integers (complex128 for 16 bytes), and
    ``crc`` the stored CRC-32 of its storage if there is one.
    """

    array: npt.NDArray[Any]
    crc: int | None

    def __init__(self, tensor: TensorEntry, chunk: Chunk, file: MappedFile) -> None:
        self.chunk = chunk
        self._tensor = tensor
        self._file = file
        self._lock = threading.Lock()
        self._storage: Bytes | None = None
        self._is_intact: bool | None = None

    def open(self, *, verify: bool) -> npt.NDArray[Any]:
        """Return the elements of the tensor, after its CRC-32 was checked if ``verify``.

        Raises CorruptCheckpointError, UnsupportedError if it is damaged or not what the metadata describes.
        """
        with self._lock:
            if self._storage is None:
                what = "a piece of it is not a tensor as torch saves it"
                with decoding(self._file.path, self._tensor.name, what=what):
                    self._storage = self._open()
            storage = self._storage
        if verify and self._is_intact is None:
            # Outside the lock: threads that wait for it share the requests of a piece in a store.
            with self._file.needed_by(storage):
                self._check(storage)
        if verify and not self._is_intact:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong", path=self._file.path, name=self._tensor.name, remedy=_DAMAGED
            )
        return self.array

    def needed(self, elements: npt.NDArray[Any]) -> AbstractContextManager[None]:
        """Use a view of the array in a block."""
        return self._file.needed_by(elements)

    def _check(self, storage: Bytes) -> None:
        with self._lock:
            if self._is_intact is None:
                self._is_intact = self.crc in (None, zlib.crc32(storage))

    def _open(self) -> Bytes:
        """Set ``array`` and ``crc``; return all memory of the storage."""
        archive = PieceZip(self._file, self.chunk.location)
        content = archive.record(PICKLE)
        with self._file.needed_by(content):
            found = _decode_tensor(decode(content.tobytes(), _ALLOWED, "one of its pieces"))
        dtype, shape = self._tensor.dtype, box_shape(self.chunk.box)
        if found.dtype != dtype.name or found.shape != shape:
            raise ValueError(
                f"it is {found.dtype} of {list(found.shape)}, the metadata declares {dtype} of {list(shape)}"
            )
        record = f"data/{found.key}"
        storage = archive.record(record)
        if storage.size != found.storage_bytes:
            raise ValueError(f"its storage has {storage.size:,} bytes, not {found.storage_bytes:,}")
        steps = zip(shape, found.strides, strict=True)
        end = found.offset + sum((length - 1) * stride for length, stride in steps) + 1
        if 0 not in shape and end * dtype.itemsize > storage.size:
            raise ValueError("it reaches beyond its storage")
        if prod(shape) * dtype.itemsize > storage.size:
            raise ValueError("its strides overlap, which DCP never saves")
        bits = np.dtype(f"u{dtype.itemsize}" if dtype.itemsize <= 8 else "c16")
        if 0 in shape:
            self.array = np.empty(shape, bits)
        else:
            strides = tuple(stride * dtype.itemsize for stride in found.strides)
            self.array = np.ndarray(shape, bits, storage, found.offset * dtype.itemsize, strides)
        self.crc = archive.crc(record)
        return storage


_UNTYPED = "UntypedStorage"
_REBUILD, _REBUILD_WITH_DTYPE, _REBUILD_PARAMETER = "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"
_ALLOWED = (
    {("torch._utils", name) for name in (_REBUILD, _REBUILD_WITH_DTYPE, _REBUILD_PARAMETER)}
    | {("torch", name) for name in (*STORAGES, _UNTYPED)}
    | {("torch.storage", _UNTYPED), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
)


@dataclass(frozen=True, slots=True)
class _PickledTensor:
    """The fields of a tensor's pickle; offset and strides in elements."""

    dtype: str
    key: str
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _decode_tensor(value: Any) -> _PickledTensor:
    if type(value) is Call and value.function.name == _REBUILD_PARAMETER and value.args:
        value = value.args[0]
    if type(value) is not Call or value.function.name not in (_REBUILD, _REBUILD_WITH_DTYPE) or value.state is not None:
        raise ValueError("it is not a plain tensor")
    args = value.args
    # A true argument after these means that the values are lazily negated or conjugated.
    count = 6 if value.function.name == _REBUILD else 7
    if len(args) < count or (len(args) > count and args[count]):
        raise ValueError("it is not a plain tensor")
    kind, key, numel = _decode_storage(args[0])
    dtype = STORAGES.get(kind) if count == 6 else args[6].name if type(args[6]) is Global else None
    if dtype is None or dtype not in BY_NAME:
        raise ValueError(f"its storage is a {kind}")
    nbytes = numel * (1 if kind == _UNTYPED else BY_NAME[dtype].itemsize)
    (offset,), shape, strides = _integers((args[1],)), _integers(args[2]), _integers(args[3])
    if len(shape) != len(strides):
        raise ValueError("its shape and its strides differ in length")
    return _PickledTensor(dtype, key, nbytes, offset, shape, strides)


def _decode_storage(value: Any) -> tuple[str, str, int]:
    """Return the class name, the record and the length in elements of a storage."""
    fields = value.key if type(value) is PersistentId else ()
    if type(fields) is not tuple or len(fields) != 5 or fields[0] != "storage":
        raise ValueError("it has no storage")
    _, kind, key, _, numel = fields
    if type(kind) is not Global or type(key) is not str:
        raise ValueError("it has no storage")
    return kind.name, key, _integers((numel,))[0]


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64 or any(type(n) is not int or not 0 <= n < 2**62 for n in value):
        raise ValueError("an offset, length or stride is impossible")
    return value
