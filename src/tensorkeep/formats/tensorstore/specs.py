"""How arrays are stored: their keys, their dtypes, and the specs that open and create them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.formats.boxes import grow
from tensorkeep.formats.sealed import digest
from tensorkeep.formats.sidecar import FILE_NAME
from tensorkeep.formats.tensorstore.chunking import Shape, chunk_shape
from tensorkeep.formats.tensorstore.compressors import AS_DOCUMENTED, Compressor, parse_compressor
from tensorkeep.formats.tensorstore.library import ArrayDirectory
from tensorkeep.formats.tensorstore.options import TensorStoreOptions
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME, DType

METADATA_FILE = {2: ".zarray", 3: "zarr.json"}
_DRIVER = {2: "zarr", 3: "zarr3"}
_MAX_KEY = 200

MAX_DIMENSIONS = 32
"""TensorStore's limit."""

MARK = f'"tensorkeep":"{FILE_NAME}"'
"""An attribute of the group, so that a missing sidecar is noticed."""

GROUP_FILES = {
    2: {".zgroup": b'{"zarr_format":2}', ".zattrs": b"{%s}" % MARK.encode()},
    3: {"zarr.json": b'{"zarr_format":3,"node_type":"group","attributes":{%s}}' % MARK.encode()},
}
"""By version of zarr: the files that make the directory a group, so that zarr-python opens all arrays at once."""

_RESERVED = frozenset((FILE_NAME, "zarr.json", "c", "d", "manifest.ocdbt", "checkpoint"))

UNSUPPORTED_DTYPES = frozenset(
    ("complex32", "float4_e2m1fn_x2", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn", "uint4", "uint2")
)
"""Of TensorStore 0.1.86; a test compares."""
_SAME_SIZE = {1: "uint8", 2: "uint16", 4: "uint32"}


def is_key(key: str) -> bool:
    """Return whether a name can be the key of an array: one plain file name, not hidden, not reserved."""
    return re.fullmatch(r"[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}", key) is not None and key not in _RESERVED


def array_keys(names: Iterable[str]) -> dict[str, str]:
    """Return the key of each tensor: its name, with other than plain characters percent-encoded.

    Keys have at most 200 characters, and are unique on file systems that ignore case.

    Examples
    --------
    >>> array_keys(["layer.0.w", "a/b"])
    {'layer.0.w': 'layer.0.w', 'a/b': 'a%2Fb'}
    """
    keys = {name: _encode(name) for name in names}
    counts = Counter(key.lower() for key in keys.values())
    return {
        name: key if counts[key.lower()] == 1 and len(key) <= _MAX_KEY else _add_digest(key, name)
        for name, key in keys.items()
    }


def _encode(name: str) -> str:
    key = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    if not key or key[0] == "." or key.lower() in _RESERVED:
        return f"%{ord(key[0]):02X}{key[1:]}" if key else "%"
    return key


def _add_digest(key: str, name: str) -> str:
    return f"{key[: _MAX_KEY - 17].rstrip('%')}-{digest(name.encode())}"


@dataclass(frozen=True, slots=True)
class StoredType:
    """The dtype of a tensor in the state, and that in the files.

    The latter is the same, or float32, or, if TensorStore lacks the dtype, unsigned integers with the same bits.
    """

    dtype: DType
    stored: DType

    @property
    def converts(self) -> bool:
        """Whether values are converted; otherwise the bits are kept."""
        return self.dtype is not self.stored and self.stored.name == "float32"

    @property
    def is_valid(self) -> bool:
        """Whether some option stores the one dtype as the other."""
        return self in (stored_type(self.dtype), stored_type(self.dtype, "float32"))

    def to_stored(self, data: Bytes) -> npt.NDArray[Any]:
        """Return elements as they are stored; a view of the same memory unless values are converted."""
        if not self.converts:
            return data.view(self.stored.numpy)
        # Values beyond the range become infinite, as in torch.
        with np.errstate(over="ignore", invalid="ignore"):
            return data.view(self.dtype.numpy).astype(np.float32)

    def from_stored(self, array: npt.NDArray[Any]) -> Bytes:
        """Return the bytes of the state's elements for a C-contiguous array of stored ones."""
        flat = array.reshape(-1)
        if self.converts:
            with np.errstate(over="ignore", invalid="ignore"):
                flat = flat.astype(self.dtype.numpy)
        return flat.view(np.uint8)


def stored_type(dtype: DType, option: str = "keep") -> StoredType:
    """Return the stored form of a dtype; ``option`` is ``"keep"`` or ``"float32"``."""
    if option == "float32" and dtype.kind == "float" and dtype.has_numpy:
        return StoredType(dtype, BY_NAME["float32"])
    if dtype.name in UNSUPPORTED_DTYPES:
        return StoredType(dtype, BY_NAME[_SAME_SIZE[dtype.itemsize]])
    return StoredType(dtype, dtype)


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is stored: its dtypes, its shape, that of a chunk, and that of a shard (one file)."""

    types: StoredType
    shape: Shape
    chunk: Shape
    shard: Shape


def layout_of(dtype: DType, shape: Sequence[int], options: TensorStoreOptions) -> Layout:
    """Return how a tensor is stored with some options."""
    types = stored_type(dtype, options.dtype)
    chunk = shard = chunk_shape(shape, types.stored.itemsize, options.chunk, options.chunking)
    if options.shard_limit is not None:
        shard = grow(shape, chunk, options.shard_limit // types.stored.itemsize)
    return Layout(types, tuple(shape), chunk, shard)


def open_spec(directory: ArrayDirectory, key: str, zarr: int, *, fill_missing: bool) -> dict[str, Any]:
    """Return the spec of an existing array; ``fill_missing`` reads missing chunks as the fill value."""
    return {
        "driver": _DRIVER[zarr],
        "kvstore": directory.spec(key),
        "fill_missing_data_reads": fill_missing,
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }


def create_spec(directory: ArrayDirectory, key: str, layout: Layout, options: TensorStoreOptions) -> dict[str, Any]:
    """Return the spec of a new array that stores all its chunks, also those equal to the fill value."""
    compressor = parse_compressor(options.compressor, options.zarr)
    return {
        "driver": _DRIVER[options.zarr],
        "kvstore": directory.spec(key),
        "metadata": _zarr2(layout, compressor) if options.zarr == 2 else _zarr3(layout, compressor, options),
        "store_data_equal_to_fill_value": True,
    }


def _zarr2(layout: Layout, compressor: Compressor | str | None) -> dict[str, Any]:
    numpy = layout.types.stored.numpy
    dtype = numpy.str if numpy.kind in "biufc" and numpy.isbuiltin == 1 else layout.types.stored.name
    metadata: dict[str, Any] = {"shape": list(layout.shape), "chunks": list(layout.chunk), "dtype": dtype}
    if compressor != AS_DOCUMENTED:
        metadata["compressor"] = compressor.zarr2() if isinstance(compressor, Compressor) else None
    return metadata


def _zarr3(layout: Layout, compressor: Compressor | str | None, options: TensorStoreOptions) -> dict[str, Any]:
    little_endian = {"configuration": {"endian": "little"}}
    codecs: list[dict[str, Any]] = [{"name": "bytes"} | (little_endian if layout.types.stored.itemsize > 1 else {})]
    if isinstance(compressor, Compressor):
        codecs.append(compressor.zarr3())
    if options.has_checksum:
        codecs.append({"name": "crc32c"})
    # An array without dimensions has one chunk, which is its shard.
    if options.shard_limit is not None and layout.shape:
        inner = {"chunk_shape": list(layout.chunk), "codecs": codecs}
        index = [{"name": "bytes"} | little_endian, {"name": "crc32c"}]
        codecs = [{"name": "sharding_indexed", "configuration": inner | {"index_codecs": index}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": list(layout.shard)}}
    return {"shape": list(layout.shape), "data_type": layout.types.stored.name, "chunk_grid": grid, "codecs": codecs}
