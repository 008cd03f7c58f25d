"""Arrays that exist, opened for reading ranges of their bytes, each chunk decoded once as far as memory goes.

Reading is cheapest in whole rows of chunks. Where such a row is too large to be read at once, smaller ranges are read
through a cache that holds it, so that a chunk is still decoded once in a load from beginning to end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.formats.tensorstore.failures import reading, tensorstore
from tensorkeep.formats.tensorstore.regions import Box, box_shape, boxes
from tensorkeep.formats.tensorstore.specs import Place, Shape, context, open_spec
from tensorkeep.formats.tensorstore.stored_types import StoredType, stored_type
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME

_THREADS = 4
_LEAST_REFUSED_CHUNK = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array to open: its key, its version of zarr, and, where it is known, what it must be."""

    key: str
    zarr: int
    types: StoredType | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class OpenArray:
    """An open array.

    Attributes
    ----------
    name, key : str
    store : tensorstore.TensorStore
    types : StoredType
        What its elements are in the state and in the files.
    shape, chunk : tuple of int
    metadata : dict
        Its zarr metadata, as TensorStore understood it.
    """

    name: str
    key: str
    store: Any
    types: StoredType
    shape: Shape
    chunk: Shape
    metadata: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements in the state."""
        return prod(self.shape) * self.types.dtype.itemsize

    def read_box(self, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order and as they are in the state."""
        lengths = box_shape(box)
        found = None if self.types.converts else out.view(self.types.stored.numpy).reshape(lengths)
        target = found if found is not None and found.flags.aligned else np.empty(lengths, self.types.stored.numpy)
        _copy(self.store, box, self.shape, target)
        if target is not found:
            out[:] = self.types.from_stored(target)


def _copy(store: Any, box: Box, shape: Shape, target: npt.NDArray[Any]) -> None:
    ts = tensorstore()
    if box_shape(box) != shape:
        # The box begins at zero in its own memory.
        store = store[box][ts.d[:].translate_to[0]]
    ts.array(target).write(store).result()


class ArraySet:
    """The open arrays of one directory.

    Parameters
    ----------
    directory : Path
        What errors call the place.
    place : Place
    wanted : dict of str to Wanted
        By the tensor's name.
    budget : int
        Bytes that reading may take besides the tensors; a single row of chunks may need more.
    fill_missing : bool
        Whether a chunk that is not there is read as the fill value, which is how zarr stores nothing but zeros;
        otherwise it is an error.

    Attributes
    ----------
    arrays : dict of str to OpenArray

    Raises
    ------
    CorruptCheckpointError, UnsupportedError, StoreError, MissingExtraError
    """

    def __init__(
        self, directory: Path, place: Place, wanted: Mapping[str, Wanted], *, budget: int, fill_missing: bool
    ) -> None:
        self.directory = directory
        self._place = place
        self._wanted = dict(wanted)
        self._fill_missing = fill_missing
        self._largest = max(BLOCK_BYTES, budget // 8)
        self.arrays = self._open(list(self._wanted), context())
        large = [name for name, array in self.arrays.items() if _row_bytes(array) > self._largest]
        if large:
            rows = max(_cached_bytes(self.arrays[name]) for name in large)
            self.arrays |= self._open(large, context(cache_bytes=min(rows, _physical_memory() // 4)))

    def _open(self, names: list[str], context: Any) -> dict[str, OpenArray]:
        ts = tensorstore()
        futures = {}
        for name in names:
            wanted = self._wanted[name]
            spec = open_spec(self._place, wanted.key, wanted.zarr, fill_missing=self._fill_missing)
            with reading(self.directory, self._place.root, name):
                futures[name] = ts.open(spec, open=True, read=True, write=False, context=context)
        found = {}
        for name, future in futures.items():
            with reading(self.directory, self._place.root, name):
                found[name] = opened(name, self._wanted[name], future.result(), self.directory)
        return found

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes ``start:stop`` of a tensor; see `tensorkeep.formats.base.Reader.read`."""
        array = self.arrays[name]
        size = array.types.dtype.itemsize
        at = 0
        with reading(self.directory, self._place.root, name):
            for box in boxes(array.shape, start // size, stop // size):
                length = prod(box_shape(box)) * size
                array.read_box(box, out[at : at + length])
                at += length

    def block_bytes(self, name: str) -> int:
        """Return the grid on which reading a tensor is cheapest: rows of chunks, if they are not too large."""
        array = self.arrays[name]
        row = _row_bytes(array)
        return BLOCK_BYTES if row > self._largest else row * max(1, BLOCK_BYTES // row)


def _row_elements(array: OpenArray) -> int:
    """Return the smallest number of elements by which the C-order stream can be cut so that no chunk is cut."""
    shape, chunk = array.shape, array.chunk
    axis = next((axis for axis, length in enumerate(chunk) if length > 1 and shape[axis] > 1), len(shape))
    if axis == len(shape):
        return 1
    # Behind the first cut dimension, a row is whole; a chunk that is cut off at its end would shift all later rows.
    whole = axis > 0 and prod(shape[:axis]) > 1 and shape[axis] % chunk[axis] != 0
    return max(1, prod(shape[axis:]) if whole else min(chunk[axis], shape[axis]) * prod(shape[axis + 1 :]))


def _row_bytes(array: OpenArray) -> int:
    return _row_elements(array) * array.types.dtype.itemsize


def _cached_bytes(array: OpenArray) -> int:
    """Return what a cache must hold so that no chunk is decoded twice while a few threads read block after block."""
    row = _row_elements(array) * array.types.stored.itemsize
    blocks = _THREADS * BLOCK_BYTES // array.types.dtype.itemsize * array.types.stored.itemsize
    return row * (blocks // row + 2)


def opened(name: str, wanted: Wanted, store: Any, directory: Path) -> OpenArray:
    """Return an array that TensorStore has opened, checked.

    Raises
    ------
    CorruptCheckpointError
        If it is not what it must be.
    UnsupportedError
        If it holds no numbers, or its chunks are too large to be decoded.
    """
    dtype = BY_NAME.get(store.dtype.name)
    if dtype is None:
        raise UnsupportedError(
            f"holds elements of {store.dtype.name}, which are no numbers", path=directory / wanted.key, name=name
        )
    shape = tuple(int(length) for length in store.shape)
    types = wanted.types or stored_type(dtype)
    if types.stored is not dtype or shape != (wanted.shape if wanted.shape is not None else shape):
        raise CorruptCheckpointError(
            f"the array is {dtype} of shape {list(shape)}, which is not what was saved",
            path=directory / wanted.key,
            name=name,
        )
    if any(store.domain.origin):
        raise UnsupportedError("the array does not begin at index 0", path=directory / wanted.key, name=name)
    chunk = tuple(map(int, store.chunk_layout.read_chunk.shape or (1,) * len(shape)))
    array = OpenArray(name, wanted.key, store, types, shape, chunk, store.spec().to_json()["metadata"])
    _refuse_bombs(array, directory)
    return array


def _refuse_bombs(array: OpenArray, directory: Path) -> None:
    """Refuse a chunk that takes more memory than could be meant, before one is decoded."""
    size = prod(array.chunk) * array.types.stored.itemsize
    whole = prod(array.shape) * array.types.stored.itemsize
    if size > _physical_memory() // 4 or (size > _LEAST_REFUSED_CHUNK and size > 4 * whole):
        raise UnsupportedError(
            f"its chunks of shape {list(array.chunk)} take {size:,} bytes each, which are not decoded here",
            path=directory / array.key,
            name=array.name,
            remedy="store it in smaller chunks",
        )


def refuse_larger_than_memory(array: OpenArray, directory: Path) -> None:
    """Refuse to read an array whole that no memory holds; TensorStore would end the process.

    Raises
    ------
    StoreError
    """
    size = prod(array.shape) * array.types.stored.itemsize
    if size > _physical_memory():
        raise OutOfMemoryError(
            f"reading it whole takes {size:,} bytes, more than there is memory",
            path=directory / array.key,
            name=array.name,
            remedy="read slices of it: tensorkeep.open(path)[name][start:stop]",
        )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
