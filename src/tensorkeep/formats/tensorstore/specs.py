"""What TensorStore is told: contexts, where an array lies, and the metadata of a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorkeep.formats.tensorstore.compressors import AS_DOCUMENTED, Compressor
from tensorkeep.formats.tensorstore.failures import tensorstore
from tensorkeep.formats.tensorstore.regions import grown
from tensorkeep.formats.tensorstore.settings import ArraySettings
from tensorkeep.state.dtypes import DType

METADATA_FILE = {2: ".zarray", 3: "zarr.json"}
DRIVER = {2: "zarr", 3: "zarr3"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A directory in which arrays lie, each under a key.

    Attributes
    ----------
    root : str
        The directory's path for TensorStore, with a slash at its end.
    kvstore : str
        ``"file"`` or ``"ocdbt"``.
    """

    root: str
    kvstore: str = "file"

    def store(self, key: str = "") -> dict[str, Any]:
        """Return the key-value store of the array at a key; of all of them for an empty key."""
        inner = f"{key}/" if key else ""
        if self.kvstore == "ocdbt":
            return {"driver": "ocdbt", "base": {"driver": "file", "path": self.root}, "path": inner}
        return {"driver": "file", "path": self.root + inner}


def context(
    *, concurrency: int | None = None, copy_concurrency: int | None = None, sync: bool = True, cache_bytes: int = 0
) -> Any:
    """Return a context of its own: nothing that another one has cached is ever seen through it."""
    limits: dict[str, Any] = {"cache_pool": {"total_bytes_limit": cache_bytes}, "file_io_sync": sync}
    if concurrency is not None:
        limits["file_io_concurrency"] = {"limit": concurrency}
    if copy_concurrency is not None:
        limits["data_copy_concurrency"] = {"limit": copy_concurrency}
    return tensorstore().Context(limits)


def open_spec(place: Place, key: str, zarr: int, *, fill_missing: bool) -> dict[str, Any]:
    """Return the spec of an array that exists."""
    return {
        "driver": DRIVER[zarr],
        "kvstore": place.store(key),
        "fill_missing_data_reads": fill_missing,
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }


def create_spec(place: Place, key: str, layout: Layout, settings: ArraySettings) -> dict[str, Any]:
    """Return the spec of a new array, all of whose chunks will be stored."""
    metadata = _zarr2(layout, settings) if settings.zarr == 2 else _zarr3(layout, settings)
    return {
        "driver": DRIVER[settings.zarr],
        "kvstore": place.store(key),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is cut: its dtype in the files, shape, chunk, and the shard of whole chunks that is one file."""

    dtype: DType
    shape: Shape
    chunk: Shape
    shard: Shape


def layout_of(dtype: DType, shape: Sequence[int], settings: ArraySettings) -> Layout:
    """Return how an array of a stored dtype is cut."""
    chunk = settings.chunking.shape_of(shape, dtype.itemsize)
    shard = chunk
    if settings.shard_bytes is not None:
        shard = grown(shape, chunk, settings.shard_bytes // dtype.itemsize)
    return Layout(dtype, tuple(shape), chunk, shard)


def _zarr2(layout: Layout, settings: ArraySettings) -> dict[str, Any]:
    dtype = layout.dtype
    native = dtype.numpy.str if dtype.numpy.kind in "biufc" and dtype.numpy.isbuiltin == 1 else dtype.name
    found: dict[str, Any] = {"shape": list(layout.shape), "chunks": list(layout.chunk), "dtype": native}
    if settings.compressor != AS_DOCUMENTED:
        chosen = settings.compressor
        found["compressor"] = chosen.zarr2() if isinstance(chosen, Compressor) else None
    return found


def _zarr3(layout: Layout, settings: ArraySettings) -> dict[str, Any]:
    chosen = settings.compressor
    codecs: list[dict[str, Any]] = [{"name": "bytes"} | _endian(layout.dtype)]
    if isinstance(chosen, Compressor):
        codecs.append(chosen.zarr3())
    if settings.checksum:
        codecs.append({"name": settings.checksum})
    # An array without dimensions has one chunk, which is its shard.
    if settings.shard_bytes is not None and layout.shape:
        inner = {"chunk_shape": list(layout.chunk), "codecs": codecs}
        index = [{"name": "bytes"} | {"configuration": {"endian": "little"}}, {"name": "crc32c"}]
        codecs = [{"name": "sharding_indexed", "configuration": inner | {"index_codecs": index}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": list(layout.shard)}}
    return {"shape": list(layout.shape), "data_type": layout.dtype.name, "chunk_grid": grid, "codecs": codecs}


def _endian(dtype: DType) -> dict[str, Any]:
    return {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
