"""How arrays are written: the options of the format, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import FormatOptions
from tensorkeep.formats.tensorstore import compressors
from tensorkeep.formats.tensorstore.chunking import DEFAULT_CHUNK, DEFAULT_CHUNKING, Chunking
from tensorkeep.formats.tensorstore.compressors import Compressor
from tensorkeep.units import parse_bytes


class T5XOptions(FormatOptions, frozen=True):
    """The options of the formats ``t5x`` and, with those of `TensorStoreOptions`, ``tensorstore``.

    They mean what they mean in `ArraySettings`, which checks their values.
    """

    chunk: Any = UNSET
    chunking: Any = UNSET
    compressor: Any = UNSET
    concurrency: Any = UNSET
    copy_concurrency: Any = UNSET
    dtype: Any = UNSET
    in_flight: Any = UNSET
    sync: Any = UNSET

    def given(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class TensorStoreOptions(T5XOptions, frozen=True):
    """The options of the format ``tensorstore``."""

    checksum: Any = UNSET
    kvstore: Any = UNSET
    shard_bytes: Any = UNSET
    zarr: Any = UNSET


@dataclass(frozen=True, slots=True)
class ArraySettings:
    """How arrays are written.

    Attributes
    ----------
    zarr : int
        2 or 3.
    chunking : Chunking
    concurrency, copy_concurrency : int or None
        TensorStore's limits on file operations, and on encoding and decoding, at once; None for its defaults.
    compressor : Compressor, str or None
        See `compressors.parse`.
    dtype : str
        ``"keep"``, or ``"float32"``: floating-point arrays are converted to it.
    shard_bytes : int or None
        Bytes of a shard, which is one file of many chunks; None for a file per chunk. Zarr 3 only.
    checksum : str or None
        ``"crc32c"`` of every chunk; zarr 3 only.
    kvstore : str
        ``"file"``: a directory of files per array; ``"ocdbt"``: one database of them all.
    sync : bool
        Whether every file is made durable.
    in_flight : str
        ``"all"`` arrays at once, as far as memory goes, or ``"one"`` after the other.
    """

    zarr: Literal[2, 3] = 3
    chunking: Chunking = DEFAULT_CHUNKING
    concurrency: int | None = None
    copy_concurrency: int | None = None
    compressor: Compressor | str | None = None
    dtype: Literal["keep", "float32"] = "keep"
    shard_bytes: int | None = None
    checksum: Literal["crc32c"] | None = "crc32c"
    kvstore: Literal["file", "ocdbt"] = "file"
    sync: bool = True
    in_flight: Literal["all", "one"] = "all"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ArraySettings:
        """Return the settings that options mean; the missing ones have the defaults above.

        Raises
        ------
        UsageError
            If one means nothing, or two exclude each other.
        """
        zarr = _one_of("zarr", options.get("zarr", 3), (2, 3))
        checksum = _one_of("checksum", options.get("checksum", "crc32c" if zarr == 3 else None), ("crc32c", None))
        if checksum and zarr != 3:
            raise UsageError("zarr v2 arrays have no checksum", remedy="give zarr=3, or checksum=None")
        shard_bytes = options.get("shard_bytes")
        if shard_bytes is not None and zarr != 3:
            raise UsageError("zarr v2 arrays have no shards", remedy="give zarr=3, or leave shard_bytes out")
        return cls(
            zarr=zarr,
            chunking=Chunking.parse(options.get("chunk", DEFAULT_CHUNK), options.get("chunking", "halving")),
            concurrency=limit("concurrency", options.get("concurrency")),
            copy_concurrency=limit("copy_concurrency", options.get("copy_concurrency")),
            compressor=compressors.parse(options.get("compressor"), zarr),
            dtype=_one_of("dtype", options.get("dtype", "keep"), ("keep", "float32")),
            shard_bytes=None if shard_bytes is None else max(1, parse_bytes(shard_bytes)),
            checksum=checksum,
            kvstore=_one_of("kvstore", options.get("kvstore", "file"), ("file", "ocdbt")),
            sync=_one_of("sync", options.get("sync", True), (True, False)),
            in_flight=in_flight(options.get("in_flight", "all")),
        )


def in_flight(value: object) -> Literal["all", "one"]:
    """Return the value if it is one of ``in_flight``; UsageError if it is not."""
    return cast(Literal["all", "one"], _one_of("in_flight", value, ("all", "one")))


def limit(name: str, value: object) -> int | None:
    """Return a limit of the context, at least 1, or None; UsageError if it is neither."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return value
    raise UsageError(f"the option {name} is {value!r}", remedy="give 1 or more, or None for TensorStore's default")


def _one_of(name: str, value: object, known: tuple[Any, ...]) -> Any:
    # Not `in`: True equals 1, and a list is equal to nothing.
    if not any(type(value) is type(other) and value == other for other in known):
        raise UsageError(f"the option {name} is {value!r}", remedy=f"choose one of: {', '.join(map(repr, known))}")
    return value
