"""The tensors in the pieces of a distributed checkpoint, as arrays in mapped memory.

A piece that is a tensor is never loaded: its small pickle is read without running it, and the tensor is an array in
the mapped memory, in whatever layout it was saved. The CRC-32 of that memory, which torch writes and does not look at,
is checked before the first byte is handed out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.dcp import inert_pickle
from tensorkeep.formats.dcp.inert_pickle import Global, Made, Persistent
from tensorkeep.formats.dcp.metadata import Chunk, TensorEntry
from tensorkeep.formats.dcp.slice_zip import DAMAGED, MappedFile, SliceZip, crc32
from tensorkeep.formats.torch_file.zip_file import PICKLE
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf

_STORAGES = {
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
_UNTYPED = "UntypedStorage"
_PLAIN, _WITH_DTYPE, _PARAMETER = "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"
_EXPECTED = (
    {("torch._utils", name) for name in (_PLAIN, _WITH_DTYPE, _PARAMETER)}
    | {("torch", name) for name in (*_STORAGES, _UNTYPED)}
    | {("torch.storage", _UNTYPED), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
)


class Piece(NamedTuple):
    """A tensor in mapped memory.

    Attributes
    ----------
    leaf : Leaf
        A numpy array of unsigned integers of the item size.
    storage : uint8 array
        The memory that it lies in, all of it.
    crc : int or None
        What torch wrote down for it; None if it was told not to.
    """

    leaf: Leaf
    storage: Bytes
    crc: int | None


class TensorSlice:
    """One piece of a tensor, looked at when it is first asked for, by whichever thread asks."""

    def __init__(self, tensor: TensorEntry, chunk: Chunk, file: MappedFile) -> None:
        self.chunk = chunk
        self._tensor = tensor
        self._file = file
        self._lock = threading.Lock()
        self._piece: Piece | None = None
        self._sound: bool | None = None

    def piece(self) -> Piece:
        """Return it, unchecked.

        Raises
        ------
        CorruptCheckpointError, UnsupportedError
            If it is not what the metadata says.
        """
        with self._lock:
            if self._piece is None:
                self._piece = self._open()
            return self._piece

    def checked(self) -> Piece:
        """Return it, the CRC-32 of all of its memory having been checked once.

        Raises
        ------
        CorruptCheckpointError
            If that is wrong.
        """
        piece = self.piece()
        with self._lock:
            if self._sound is None:
                self._sound = piece.crc in (None, crc32(piece.storage))
        if not self._sound:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong", path=self._file.path, name=self._tensor.name, remedy=DAMAGED
            )
        return piece

    def _open(self) -> Piece:
        archive = SliceZip(self._file, self.chunk.place)
        try:
            found = _described(inert_pickle.load(archive.record(PICKLE).tobytes(), _EXPECTED, "one of its pieces"))
            return self._fitting(found, archive)
        except UnsupportedError as error:
            raise UnsupportedError(
                error.message, path=self._file.path, name=self._tensor.name, remedy=error.remedy
            ) from error
        except ValueError as error:
            raise CorruptCheckpointError(
                f"a piece of it is not as torch saves a tensor ({error})", path=self._file.path, name=self._tensor.name
            ) from error

    def _fitting(self, found: _Described, archive: SliceZip) -> Piece:
        dtype = self._tensor.dtype
        if found.dtype != dtype.name or found.shape != self.chunk.sizes:
            raise ValueError(
                f"it is {found.dtype} of {list(found.shape)}, the metadata says {dtype} of {list(self.chunk.sizes)}"
            )
        name = f"data/{found.key}"
        storage = archive.record(name)
        if storage.size != found.storage_bytes:
            raise ValueError(f"its storage has {storage.size:,} bytes, not {found.storage_bytes:,}")
        steps = zip(found.shape, found.strides, strict=True)
        end = found.offset + sum((length - 1) * stride for length, stride in steps) + 1
        if 0 not in found.shape and end * dtype.itemsize > storage.size:
            raise ValueError("it reaches beyond its storage")
        if prod(found.shape) * dtype.itemsize > storage.size:
            raise ValueError("it repeats the elements of its storage, which DCP never saves")
        raw = BY_NAME[f"uint{8 * dtype.itemsize}"] if dtype.itemsize <= 8 else BY_NAME["complex128"]
        if 0 in found.shape:
            array: npt.NDArray[Any] = np.empty(found.shape, raw.numpy)
        else:
            strides = tuple(stride * dtype.itemsize for stride in found.strides)
            array = np.ndarray(found.shape, raw.numpy, storage, found.offset * dtype.itemsize, strides)
        return Piece(Leaf(self._tensor.name, "ndarray", raw, array), storage, archive.crc(name))


@dataclass(frozen=True, slots=True)
class _Described:
    """What the pickle of a tensor says; the offset and the strides count elements."""

    dtype: str
    key: str
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _described(value: Any) -> _Described:
    if type(value) is Made and value.by.name == _PARAMETER and value.args:
        value = value.args[0]
    if type(value) is not Made or value.by.name not in (_PLAIN, _WITH_DTYPE) or value.state is not None:
        raise ValueError("it is no plain tensor")
    args = value.args
    # What follows says that the values are to be negated or conjugated.
    plain = 6 if value.by.name == _PLAIN else 7
    if len(args) < plain or (len(args) > plain and args[plain]):
        raise ValueError("it is no plain tensor")
    kind, key, numel = _storage(args[0])
    dtype = _STORAGES.get(kind) if value.by.name == _PLAIN else _name_of(args[6])
    if dtype is None or dtype not in BY_NAME:
        raise ValueError(f"it is made of a {kind}")
    itemsize = BY_NAME[dtype].itemsize
    nbytes = numel * (1 if kind == _UNTYPED else itemsize)
    offset, shape, strides = args[1], _numbers(args[2]), _numbers(args[3])
    if len(shape) != len(strides):
        raise ValueError("its shape and its strides do not go together")
    return _Described(dtype, key, nbytes, _numbers((offset,))[0], shape, strides)


def _storage(value: Any) -> tuple[str, str, int]:
    parts = value.key if type(value) is Persistent else ()
    if type(parts) is not tuple or len(parts) != 5 or parts[0] != "storage":
        raise ValueError("it lies in no storage")
    kind, key, numel = parts[1], parts[2], parts[4]
    if type(kind) is not Global or type(key) is not str:
        raise ValueError("it lies in no storage")
    return kind.name, key, _numbers((numel,))[0]


def _name_of(value: Any) -> str | None:
    return value.name if type(value) is Global else None


def _numbers(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64 or any(type(n) is not int or not 0 <= n < 2**62 for n in value):
        raise ValueError("a number in it makes no sense")
    return value
