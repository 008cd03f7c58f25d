"""How arrays are stored: their keys, their dtypes, and the specs that open and create them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from tensorkeep.errors import UsageError
from tensorkeep.ext import parse_bytes
from tensorkeep.ext.formats import FormatOptions, checksummed_json, grow, sidecar
from tensorkeep.ext.state import BY_NAME, DType
from tensorkeep.ext.storage import Bytes
from tensorkeep_formats.tensorstore.library import ArrayDirectory

Shape = tuple[int, ...]
Algorithm = Literal["halving", "divisors"]


def chunk_shape(shape: Sequence[int], itemsize: int, chunk: int | str | None, algorithm: Algorithm) -> Shape:
    """Return the shape of an array's chunks, which has no length of 0; see `ArrayOptions`.

    ``halving`` need not divide the array, so chunks at the edges are padded. ``divisors``, as in T5X, never pads, but a
    dimension of prime length goes from full to 1 in one step.

    >>> chunk_shape((32000, 3200), 4, "64MiB", "halving"), chunk_shape((32000, 3), 4, "64", "halving")
    ((4000, 3200), (64, 3))
    """
    # A chunk has no length 0, not even in an empty array.
    full = tuple(max(1, length) for length in shape)
    if chunk is None:
        return full
    if isinstance(chunk, str) and re.fullmatch(r"[1-9]\d{0,17}", chunk):
        return tuple(min(int(chunk), length) for length in full)
    try:
        limit = parse_bytes(chunk)
    except UsageError:
        limit = 0
    if limit < 1:
        raise UsageError(
            f"the option chunk is {chunk!r}",
            remedy='give a number of elements (262144), a size ("64MiB"), a length for each dimension ("64"), or None',
        )
    limit = max(1, limit if isinstance(chunk, int) else limit // itemsize)
    # Divisors are found by trial division, and an empty array may have a dimension of any length.
    to_divisor = algorithm == "divisors" and 0 not in shape
    lengths = list(full)
    while prod(lengths) > limit and max(lengths) > 1:
        longest = max(lengths)
        axis = lengths.index(longest)
        smaller = max(each for each in divisors(full[axis]) if each < longest) if to_divisor else longest // 2
        lengths[axis] = smaller
    return tuple(lengths)


@lru_cache(maxsize=256)
def divisors(number: int) -> list[int]:
    """Return every divisor of a positive number, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# "as-documented" leaves ``compressor`` out of zarr v2 metadata: TensorStore then compresses with Blosc-LZ4.
AS_DOCUMENTED = "as-documented"
_BLOSC = tuple(f"blosc-{name}" for name in ("lz4", "lz4hc", "zstd", "zlib", "snappy", "blosclz"))
_LEVELS = {
    "gzip": range(10),
    "zlib": range(10),
    "zstd": range(-131072, 23),
    "bz2": range(1, 10),
    **dict.fromkeys(_BLOSC, range(10)),
}
# The names of compressors by zarr version.
KNOWN = {2: ("gzip", "zlib", "zstd", "bz2", *_BLOSC), 3: ("gzip", "zstd", *_BLOSC)}
_CHECKS = {"gzip": "CRC-32 of every chunk", "zlib": "Adler-32 of every chunk", "bz2": "CRC-32 of every chunk"}


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressor: a name in `KNOWN`, and a level, or None for TensorStore's default."""

    name: str
    level: int | None = None

    def zarr2(self) -> dict[str, Any]:
        return {"id": self.name.partition("-")[0]} | self._configuration()

    def zarr3(self) -> dict[str, Any]:
        configuration = self._configuration()
        return {"name": self.name.partition("-")[0]} | ({"configuration": configuration} if configuration else {})

    def _configuration(self) -> dict[str, Any]:
        inner = self.name.partition("-")[2]
        level = {} if self.level is None else {"clevel" if inner else "level": self.level}
        return {"cname": inner} | level if inner else level


def parse_compressor(compressor: str | None, zarr: int) -> Compressor | str | None:
    """Return the meaning of the option ``compressor``: a `Compressor`, `AS_DOCUMENTED`, or None for raw chunks."""
    if compressor is None or compressor == "none":
        return None
    known = ", ".join(["None", *([AS_DOCUMENTED] if zarr == 2 else []), *KNOWN[zarr]])
    if compressor == AS_DOCUMENTED:
        if zarr == 2:
            return AS_DOCUMENTED
        raise UsageError(
            f"compressor={AS_DOCUMENTED!r} exists for zarr v2 only", remedy=f"give zarr=2, or choose one of: {known}"
        )
    # "zstd:1" is a name and a level.
    name, colon, level = compressor.partition(":")
    if name not in KNOWN[zarr]:
        raise UsageError(
            f"zarr v{zarr} arrays have no compressor {compressor!r}",
            remedy=f'choose one of: {known}; some with a level, as in "zstd:1"',
        )
    return Compressor(name, _parse_level(name, level) if colon else None)


def _parse_level(name: str, text: str) -> int:
    allowed = _LEVELS[name]
    try:
        level = int(text)
    except ValueError:
        level = allowed.start - 1
    if level not in allowed:
        raise UsageError(
            f"compressor {name} has no level {text!r}", remedy=f"give {allowed.start} to {allowed.stop - 1}"
        )
    return level


def checksum_of(metadata: dict[str, Any]) -> str | None:
    if "codecs" not in metadata:
        return _CHECKS.get((metadata.get("compressor") or {}).get("id", ""))
    codecs = dict(_codecs(metadata["codecs"]))
    if "crc32c" in codecs:
        return "CRC-32C of every chunk"
    if codecs.get("zstd", {}).get("checksum"):
        return "XXH64 of every chunk"
    return _CHECKS["gzip"] if "gzip" in codecs else None


def codec_of(metadata: dict[str, Any]) -> str:
    """Return the codec that the zarr metadata declares, in one word; ``"raw"`` without compression."""
    compressor = metadata.get("compressor")
    found = {compressor["id"]: compressor} if compressor else dict(_codecs(metadata.get("codecs") or []))
    for name in found.keys() & {"blosc", "bz2", "gzip", "zlib", "zstd"}:
        inner = found[name].get("cname")
        return f"{name}-{inner}" if inner else name
    return "raw"


def _codecs(codecs: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for codec in codecs:
        configuration = codec.get("configuration") or {}
        yield codec["name"], configuration
        if codec["name"] == "sharding_indexed":
            # The codecs of chunks are inside the codec of their shard.
            yield from _codecs(configuration.get("codecs") or [])


Limit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class ArrayOptions(FormatOptions, frozen=True):
    """Options of the formats ``tensorstore`` and ``t5x``.

    Attributes
    ----------
    chunk : int, str or None
        Elements per chunk (``262144``), bytes of the stored dtype per chunk (``"64MiB"``), the length along each
        dimension (``"64"``), or None for one chunk per array.
    chunking : str
        ``"halving"``: the largest dimension is halved until a chunk is small enough. ``"divisors"``: it shrinks to its
        next smaller divisor instead.
    compressor : str or None
        A name in `KNOWN`, with a level after a colon (``"zstd:1"``); for zarr 2 also ``"as-documented"``.
        None stores raw chunks.
    concurrency, copy_concurrency : int or None
        TensorStore's limits on concurrent file operations, and on concurrent encoding and decoding; None for its own.
    dtype : str
        ``"keep"``, or ``"float32"``: floating-point arrays are stored as float32.
    in_flight : str
        ``"all"`` writes arrays at once, as far as the memory budget allows; ``"one"`` writes one after the other.
    sync : bool
        Whether every file is made durable.
    """

    chunk: int | str | None = "32MiB"
    chunking: Algorithm = "halving"
    compressor: str | None = None
    concurrency: Limit | None = None
    copy_concurrency: Limit | None = None
    dtype: Literal["keep", "float32"] = "keep"
    in_flight: Literal["all", "one"] = "all"
    sync: bool = True

    def non_default(self) -> dict[str, Any]:
        defaults = msgspec.structs.asdict(type(self)())
        given = msgspec.structs.asdict(self)
        return {name: value for name, value in sorted(given.items()) if value != defaults[name]}


class TensorStoreOptions(ArrayOptions, frozen=True):
    """Options of ``tensorkeep.save(..., format="tensorstore")``.

    Attributes
    ----------
    zarr : int
        3 or 2.
    checksum : str or None
        ``"crc32c"`` of every chunk (zarr 3 only, its default), or None.
    shard_bytes : int, str or None
        Bytes of a shard, one file of many chunks (zarr 3 only); None for a file per chunk.
    kvstore : str
        ``"file"``: a directory of files for each array. ``"ocdbt"``: one database for all arrays.
    """

    zarr: Literal[2, 3] = 3
    checksum: Literal["crc32c"] | UnsetType | None = UNSET
    shard_bytes: int | str | None = None
    kvstore: Literal["file", "ocdbt"] = "file"

    def __post_init__(self) -> None:
        # Reports a malformed option before the save starts.
        chunk_shape((1,), 1, self.chunk, self.chunking)
        parse_compressor(self.compressor, self.zarr)
        if self.zarr == 2 and self.checksum == "crc32c":
            raise UsageError("zarr v2 arrays have no checksum", remedy="give zarr=3, or checksum=None")
        if self.zarr == 2 and self.shard_limit is not None:
            raise UsageError("zarr v2 arrays have no shards", remedy="give zarr=3, or leave shard_bytes out")

    @property
    def has_checksum(self) -> bool:
        return self.zarr == 3 and self.checksum is not None

    @property
    def encodes(self) -> bool:
        return self.has_checksum or parse_compressor(self.compressor, self.zarr) is not None

    @property
    def shard_limit(self) -> int | None:
        return None if self.shard_bytes is None else max(1, parse_bytes(self.shard_bytes))


class T5XOptions(ArrayOptions, frozen=True):
    """Options of ``tensorkeep.save(..., format="t5x")``; the defaults are T5X's.

    ``dtype="float32"`` converts only narrower floats, so no value is lost, but the bits of a NaN may change.
    """

    chunk: int | str | None = "64MiB"
    chunking: Algorithm = "divisors"
    compressor: str | None = "gzip"
    concurrency: Limit | None = 128
    dtype: Literal["keep", "float32"] = "float32"

    def __post_init__(self) -> None:
        self.as_arrays()

    def as_arrays(self) -> TensorStoreOptions:
        return TensorStoreOptions(zarr=2, **msgspec.structs.asdict(self))


DRIVER = {2: "zarr", 3: "zarr3"}
_MAX_KEY = 200
MAX_DIMENSIONS = 32  # TensorStore's limit
# An attribute of the group. It shows that a sidecar is missing.
MARK = f'"tensorkeep":"{sidecar.FILE_NAME}"'
# The files that make the directory a group, by version of zarr: zarr-python then opens all arrays at once.
GROUP_FILES = {
    2: {".zgroup": b'{"zarr_format":2}', ".zattrs": b"{%s}" % MARK.encode()},
    3: {"zarr.json": b'{"zarr_format":3,"node_type":"group","attributes":{%s}}' % MARK.encode()},
}
_RESERVED = frozenset((sidecar.FILE_NAME, "zarr.json", "c", "d", "manifest.ocdbt", "checkpoint"))
# TensorStore 0.1.86 lacks these dtypes; a test compares.
UNSUPPORTED_DTYPES = frozenset(
    ("complex32", "float4_e2m1fn_x2", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn", "uint4", "uint2")
)
_SAME_SIZE = {1: "uint8", 2: "uint16", 4: "uint32"}


def is_key(key: str) -> bool:
    """Return whether a name can be the key of an array: one plain file name, not hidden, not reserved."""
    return re.fullmatch(r"[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}", key) is not None and key not in _RESERVED


def array_keys(names: Iterable[str]) -> dict[str, str]:
    """Return the keys of tensors: their names, percent-encoded, unique on file systems that ignore case.

    >>> array_keys(["layer.0.w", "a/b"])
    {'layer.0.w': 'layer.0.w', 'a/b': 'a%2Fb'}
    """
    keys = {name: _encode(name) for name in names}
    # Keys that differ only in case are one file on some file systems.
    counts = Counter(key.lower() for key in keys.values())
    for name, key in keys.items():
        if counts[key.lower()] > 1 or len(key) > _MAX_KEY:
            # A dash and 16 digits of the digest. A cut percent sign would not decode.
            keys[name] = f"{key[: _MAX_KEY - 17].rstrip('%')}-{checksummed_json.digest(name.encode())}"
    return keys


def _encode(name: str) -> str:
    key = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    if not key or key[0] == "." or key.lower() in _RESERVED:
        # A key must be neither hidden nor the name of one of zarr's own files.
        return f"%{ord(key[0]):02X}{key[1:]}" if key else "%"
    return key


@dataclass(frozen=True, slots=True)
class StoredType:
    dtype: DType
    stored: DType

    @property
    def converts(self) -> bool:
        """Whether values are converted; otherwise the bits are kept."""
        return self.dtype is not self.stored and self.stored.name == "float32"

    @property
    def is_valid(self) -> bool:
        return self in (stored_type(self.dtype), stored_type(self.dtype, "float32"))

    def to_stored(self, data: Bytes) -> npt.NDArray[Any]:
        """Return elements in their stored form; a view of the same memory unless values are converted."""
        if not self.converts:
            return data.view(self.stored.numpy)
        # Values beyond the range become infinite, as in torch, and numpy would warn.
        with np.errstate(over="ignore", invalid="ignore"):
            return data.view(self.dtype.numpy).astype(np.float32)

    def from_stored(self, array: npt.NDArray[Any]) -> Bytes:
        flat = array.reshape(-1)
        if self.converts:
            with np.errstate(over="ignore", invalid="ignore"):
                flat = flat.astype(self.dtype.numpy)
        return flat.view(np.uint8)


def stored_type(dtype: DType, option: str = "keep") -> StoredType:
    """Return the stored form of a dtype; ``option`` is ``"keep"`` or ``"float32"``."""
    if option == "float32" and dtype.kind == "float" and dtype.has_numpy:
        return StoredType(dtype, BY_NAME["float32"])
    # Unsigned integers of the same size keep the bits.
    if dtype.name in UNSUPPORTED_DTYPES:
        return StoredType(dtype, BY_NAME[_SAME_SIZE[dtype.itemsize]])
    return StoredType(dtype, dtype)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """How an array is stored: its dtypes, and the shapes of the array, of a chunk and of a shard (one file)."""

    types: StoredType
    shape: Shape
    chunk: Shape
    shard: Shape


def layout_of(dtype: DType, shape: Sequence[int], options: TensorStoreOptions) -> ArrayLayout:
    types = stored_type(dtype, options.dtype)
    chunk = shard = chunk_shape(shape, types.stored.itemsize, options.chunk, options.chunking)
    if options.shard_limit is not None:
        shard = grow(shape, chunk, options.shard_limit // types.stored.itemsize)
    return ArrayLayout(types, tuple(shape), chunk, shard)


def create_spec(
    directory: ArrayDirectory, key: str, layout: ArrayLayout, options: TensorStoreOptions
) -> dict[str, Any]:
    compressor = parse_compressor(options.compressor, options.zarr)
    return {
        "driver": DRIVER[options.zarr],
        "kvstore": directory.spec(key),
        "metadata": _zarr2(layout, compressor) if options.zarr == 2 else _zarr3(layout, compressor, options),
        # TensorStore would leave out chunks of zeros, and a lost chunk would read as zeros.
        "store_data_equal_to_fill_value": True,
    }


def _zarr2(layout: ArrayLayout, compressor: Compressor | str | None) -> dict[str, Any]:
    numpy = layout.types.stored.numpy
    # Zarr v2 has numpy's type codes; for bfloat16 and the like, TensorStore writes the name of the dtype.
    dtype = numpy.str if numpy.kind in "biufc" and numpy.isbuiltin == 1 else layout.types.stored.name
    metadata: dict[str, Any] = {"shape": list(layout.shape), "chunks": list(layout.chunk), "dtype": dtype}
    if compressor != AS_DOCUMENTED:
        metadata["compressor"] = compressor.zarr2() if isinstance(compressor, Compressor) else None
    return metadata


def _zarr3(layout: ArrayLayout, compressor: Compressor | str | None, options: TensorStoreOptions) -> dict[str, Any]:
    little_endian = {"configuration": {"endian": "little"}}
    # Single bytes have no byte order.
    codecs: list[dict[str, Any]] = [{"name": "bytes"} | (little_endian if layout.types.stored.itemsize > 1 else {})]
    if isinstance(compressor, Compressor):
        codecs.append(compressor.zarr3())
    if options.has_checksum:
        codecs.append({"name": "crc32c"})
    # An array without dimensions has one chunk, which is its shard.
    if options.shard_limit is not None and layout.shape:
        inner = {"chunk_shape": list(layout.chunk), "codecs": codecs}
        # The index of a shard has a checksum in any case: a wrong offset would give the bytes of another chunk.
        index = [{"name": "bytes"} | little_endian, {"name": "crc32c"}]
        codecs = [{"name": "sharding_indexed", "configuration": inner | {"index_codecs": index}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": list(layout.shard)}}
    return {"shape": list(layout.shape), "data_type": layout.types.stored.name, "chunk_grid": grid, "codecs": codecs}
