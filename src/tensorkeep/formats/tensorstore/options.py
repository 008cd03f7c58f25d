"""The options of the formats ``tensorstore`` and ``t5x``: how arrays are written."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tensorkeep.errors import UsageError
from tensorkeep.formats.tensorstore.chunking import Algorithm, chunk_shape
from tensorkeep.formats.tensorstore.compressors import parse_compressor
from tensorkeep.formats.write import FormatOptions
from tensorkeep.units import parse_bytes

Limit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class ArrayOptions(FormatOptions, frozen=True):
    """Options that both formats share.

    Attributes
    ----------
    chunk : int, str or None
        Elements per chunk (``262144``), bytes of the stored dtype per chunk (``"64MiB"``), the length along each
        dimension (``"64"``), or None for one chunk per array.
    chunking : str
        ``"halving"``: the largest dimension is halved until a chunk is small enough. ``"divisors"``: it shrinks to its
        next smaller divisor instead.
    compressor : str or None
        A name of `compressors.KNOWN`, with a level after a colon (``"zstd:1"``); for zarr 2 also ``"as-documented"``.
        None stores raw chunks.
    concurrency, copy_concurrency : int or None
        TensorStore's limits on concurrent file operations, and on concurrent encoding and decoding; None for its own.
    dtype : str
        ``"keep"``, or ``"float32"``: floating-point arrays are stored as that.
    in_flight : str
        ``"all"`` arrays are written at once, as far as the memory budget allows, or ``"one"`` after the other.
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
        """Return the options that differ from their defaults, by name."""
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

    Raises
    ------
    UsageError
        If a value is malformed, or zarr 2 does not support it.

    Examples
    --------
    >>> options = TensorStoreOptions(compressor="zstd:1", chunk="4MiB")
    >>> options.zarr, options.has_checksum, options.shard_limit
    (3, True, None)
    """

    zarr: Literal[2, 3] = 3
    checksum: Literal["crc32c"] | UnsetType | None = UNSET
    shard_bytes: int | str | None = None
    kvstore: Literal["file", "ocdbt"] = "file"

    def __post_init__(self) -> None:
        chunk_shape((1,), 1, self.chunk, self.chunking)
        parse_compressor(self.compressor, self.zarr)
        if self.zarr == 2 and self.checksum == "crc32c":
            raise UsageError("zarr v2 arrays have no checksum", remedy="give zarr=3, or checksum=None")
        if self.zarr == 2 and self.shard_limit is not None:
            raise UsageError("zarr v2 arrays have no shards", remedy="give zarr=3, or leave shard_bytes out")

    @property
    def has_checksum(self) -> bool:
        """Whether each chunk gets a CRC-32C."""
        return self.zarr == 3 and self.checksum is not None

    @property
    def encodes(self) -> bool:
        """Whether a chunk is not stored as its bytes alone."""
        return self.has_checksum or parse_compressor(self.compressor, self.zarr) is not None

    @property
    def shard_limit(self) -> int | None:
        """``shard_bytes`` as a number."""
        return None if self.shard_bytes is None else max(1, parse_bytes(self.shard_bytes))


class T5XOptions(ArrayOptions, frozen=True):
    """Options of ``tensorkeep.save(..., format="t5x")``; the defaults are T5X's.

    ``dtype="float32"`` converts only narrower floats, so no value is lost, but the bits of a NaN may change.

    Examples
    --------
    >>> T5XOptions(dtype="keep").chunking
    'divisors'
    """

    chunk: int | str | None = "64MiB"
    chunking: Algorithm = "divisors"
    compressor: str | None = "gzip"
    concurrency: Limit | None = 128
    dtype: Literal["keep", "float32"] = "float32"

    def __post_init__(self) -> None:
        self.as_arrays()

    def as_arrays(self) -> TensorStoreOptions:
        """Return the same options for the arrays of a checkpoint, which are zarr v2."""
        return TensorStoreOptions(zarr=2, **msgspec.structs.asdict(self))
