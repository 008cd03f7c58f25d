"""Opening arrays, refusing chunks too large to decode, and reading byte ranges.

Reading is cheapest in full rows of chunks. If such a row is too large to be read at once, smaller ranges are read
through a cache that holds it, so that a sequential load still decodes each chunk once.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, StoreError, UnsupportedError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.boxes import Box, box_shape, range_to_boxes
from tensorkeep.formats.tensorstore.chunking import Shape
from tensorkeep.formats.tensorstore.compressors import checksum_of, codec_of
from tensorkeep.formats.tensorstore.library import ArrayDirectory, context, tensorstore
from tensorkeep.formats.tensorstore.specs import StoredType, open_spec, stored_type
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.places import read_directory
from tensorkeep.machine import memory_limit
from tensorkeep.state.dtypes import BY_NAME

_THREADS = 4
_LARGE_CHUNK = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class KnownArray:
    """The expected properties of an array, known before it is opened.

    They are its path in the directory, the version of zarr, and the bytes of its files, 0 in a database. If there is a
    sidecar, the array must have the dtypes and the shape in it.
    """

    key: str
    zarr: int
    stored_bytes: int
    types: StoredType | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class OpenArray:
    """An open array, with its zarr metadata as TensorStore decoded it."""

    store: Any
    types: StoredType
    shape: Shape
    chunk: Shape
    metadata: dict[str, Any]
    directory: ArrayDirectory

    def read_box(self, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order and in the state's dtype."""
        lengths = box_shape(box)
        view = None if self.types.converts else out.view(self.types.stored.numpy).reshape(lengths)
        target = view if view is not None and view.flags.aligned else np.empty(lengths, self.types.stored.numpy)
        ts = tensorstore()
        store = self.store
        if lengths != self.shape:
            # The indices of a box start at those of the array, the indices of the target at zero.
            store = store[box][ts.d[:].translate_to[0]]
        self.directory.wait(ts.array(target).write(store))
        if target is not view:
            out[:] = self.types.from_stored(target)

    @property
    def row_bytes(self) -> int:
        """The smallest number of bytes at whose multiples the C-order stream can be split without splitting a chunk."""
        shape, chunk = self.shape, self.chunk
        axis = next((axis for axis, length in enumerate(chunk) if length > 1 and shape[axis] > 1), len(shape))
        if axis == len(shape):
            return self.types.dtype.itemsize
        # A chunk that is cut off at the end of an inner dimension shifts all later rows: only full slices are aligned.
        full = axis > 0 and prod(shape[:axis]) > 1 and shape[axis] % chunk[axis] != 0
        elements = prod(shape[axis:]) if full else min(chunk[axis], shape[axis]) * prod(shape[axis + 1 :])
        return max(1, elements) * self.types.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Cache size at which sequential reads by a few threads decode each chunk once."""
        dtype, stored = self.types.dtype, self.types.stored
        row = self.row_bytes // dtype.itemsize * stored.itemsize
        blocks = _THREADS * BLOCK_BYTES // dtype.itemsize * stored.itemsize
        return row * (blocks // row + 2)


class ArraysReader(Reader):
    """Base of readers whose tensors are arrays of TensorStore.

    The directory is held open by a descriptor: if the checkpoint is replaced while it is read, its old content is
    read, or a StoreError is raised.
    """

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        self.path = path
        # What reading may use besides the tensors; one row of chunks may need more.
        self._max_row = max(BLOCK_BYTES, settings.pool.budget // 8)
        read_directory(path, self._open)

    @abstractmethod
    def _open(self, directory: Directory) -> None:
        """Read the metadata of the directory, and call `_open_arrays` and `_set_state`."""

    def _open_arrays(
        self,
        open_directory: Directory,
        directory: ArrayDirectory,
        known: Mapping[str, KnownArray],
        *,
        fill_missing: bool,
        unread: dict[str, UnsupportedError] | None = None,
    ) -> dict[str, StoredLeaf]:
        """Open arrays and return their tensors.

        A missing chunk is an error, or with ``fill_missing`` read as the fill value, which is how zarr stores chunks of
        zeros. The errors of arrays that are not supported, such as those of strings, are put into ``unread`` if it is
        given. Raises the errors of `check_array`, and those of TensorStore if an array cannot be opened.
        """
        self._open_directory = open_directory
        self._directory = directory
        in_store = directory.in_store
        self._arrays = _open_all(directory, known, context(in_store=in_store), unread, fill_missing=fill_missing)
        large = {name: known[name] for name, array in self._arrays.items() if array.row_bytes > self._max_row}
        if large:
            cache = min(max(self._arrays[name].cache_bytes for name in large), memory_limit() // 4)
            cached = context(cache_bytes=cache, in_store=in_store)
            self._arrays |= _open_all(directory, large, cached, None, fill_missing=fill_missing)
        checksums = {checksum_of(array.metadata) for array in self._arrays.values()}
        self.verifiable = checksums.pop() if len(checksums) == 1 else None
        return {
            name: StoredLeaf(
                self,
                name,
                array.types.dtype,
                array.shape,
                stored_bytes=known[name].stored_bytes,
                codec=codec_of(array.metadata),
                file=known[name].key or ".",
            )
            for name, array in self._arrays.items()
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        array = self._arrays[name]
        size, at = array.types.dtype.itemsize, 0
        try:
            with self._directory.reading(name):
                for box in range_to_boxes(array.shape, start // size, stop // size):
                    nbytes = prod(box_shape(box)) * size
                    array.read_box(box, out[at : at + nbytes])
                    at += nbytes
        except CorruptCheckpointError as error:
            if self._open_directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        # Rows of chunks, if they are not too large.
        row = self._arrays[name].row_bytes
        return BLOCK_BYTES if row > self._max_row else row * max(1, BLOCK_BYTES // row)

    def close(self) -> None:
        self._open_directory.close()


def _open_all(
    directory: ArrayDirectory,
    known: Mapping[str, KnownArray],
    context: Any,
    unread: dict[str, UnsupportedError] | None,
    *,
    fill_missing: bool,
) -> dict[str, OpenArray]:
    """Open all arrays; the errors of those that are not supported are put into ``unread``, or raised without it."""
    futures, arrays = {}, {}
    for name, array in known.items():
        with directory.reading(name):
            futures[name] = start_open(directory, array, context, fill_missing=fill_missing)
    for name, future in futures.items():
        try:
            with directory.reading(name):
                arrays[name] = check_array(name, known[name], directory.wait(future), directory)
        except UnsupportedError as error:
            if unread is None:
                raise
            unread[name] = error
    return arrays


def start_open(directory: ArrayDirectory, known: KnownArray, context: Any, *, fill_missing: bool) -> Any:
    """Return the future of an array that TensorStore opens for reading."""
    spec = open_spec(directory, known.key, known.zarr, fill_missing=fill_missing)
    return tensorstore().open(spec, open=True, read=True, write=False, context=context)


def check_array(name: str, known: KnownArray, store: Any, directory: ArrayDirectory) -> OpenArray:
    """Return an array that TensorStore has opened, after comparing it with its expected properties.

    Raises CorruptCheckpointError if its dtype or shape differs; UnsupportedError if it holds no numbers, does not start
    at index 0, or its chunks are too large to decode.
    """
    path = directory.path / known.key
    dtype = BY_NAME.get(store.dtype.name)
    if dtype is None:
        raise UnsupportedError(f"holds elements of {store.dtype.name}, which are not numbers", path=path, name=name)
    shape = tuple(int(length) for length in store.shape)
    types = known.types or stored_type(dtype)
    if types.stored is not dtype or shape != (known.shape if known.shape is not None else shape):
        raise CorruptCheckpointError(
            f"the array is {dtype} of shape {list(shape)}, which differs from what was saved", path=path, name=name
        )
    if any(store.domain.origin):
        raise UnsupportedError("the array does not start at index 0", path=path, name=name)
    chunk = tuple(map(int, store.chunk_layout.read_chunk.shape or (1,) * len(shape)))
    size, total = prod(chunk) * dtype.itemsize, prod(shape) * dtype.itemsize
    # A small file may declare a chunk that takes all memory when it is decoded.
    if size > BLOCK_BYTES and (size > memory_limit() // 4 or (size > _LARGE_CHUNK and size > 4 * total)):
        raise UnsupportedError(
            f"its chunks of shape {list(chunk)} take {size:,} bytes each, too many to decode",
            path=path,
            name=name,
            remedy="store it in smaller chunks",
        )
    return OpenArray(store, types, shape, chunk, store.spec().to_json()["metadata"], directory)
