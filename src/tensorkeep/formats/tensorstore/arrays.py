"""Opening arrays, and reading byte ranges with each chunk decoded once where memory allows.

Reading is cheapest in full rows of chunks. If such a row is too large to be read at once, smaller ranges are read
through a cache that holds it, so that a sequential load still decodes each chunk once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.boxes import Box, box_shape, range_to_boxes
from tensorkeep.formats.tensorstore.chunking import Shape
from tensorkeep.formats.tensorstore.library import ArrayDirectory, context, tensorstore
from tensorkeep.formats.tensorstore.specs import StoredType, open_spec, stored_type
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME

_THREADS = 4
_LARGE_CHUNK = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class KnownArray:
    """The expected properties of an array, known before it is opened.

    Attributes
    ----------
    key : str
        Its path in the directory.
    zarr : int
        2 or 3.
    stored_bytes : int
        Bytes of its files.
    types : StoredType or None
        The dtypes that it must have, from the sidecar if there is one.
    shape : tuple of int or None
        The shape that it must have, from the sidecar if there is one.
    """

    key: str
    zarr: int
    stored_bytes: int
    types: StoredType | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class OpenArray:
    """An open array.

    Attributes
    ----------
    name : str
        Of the tensor.
    metadata : dict
        Its zarr metadata, as TensorStore decoded it.
    """

    name: str
    store: Any
    types: StoredType
    shape: Shape
    chunk: Shape
    metadata: dict[str, Any]

    def read_box(self, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order and in the state's dtype."""
        lengths = box_shape(box)
        view = None if self.types.converts else out.view(self.types.stored.numpy).reshape(lengths)
        target = view if view is not None and view.flags.aligned else np.empty(lengths, self.types.stored.numpy)
        self._read(box, target)
        if target is not view:
            out[:] = self.types.from_stored(target)

    def _read(self, box: Box, target: npt.NDArray[Any]) -> None:
        ts = tensorstore()
        store = self.store
        if box_shape(box) != self.shape:
            # The indices of a box start at those of the array, the indices of the target at zero.
            store = store[box][ts.d[:].translate_to[0]]
        ts.array(target).write(store).result()

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
        """The cache with which a few threads that read block after block decode no chunk twice."""
        dtype, stored = self.types.dtype, self.types.stored
        row = self.row_bytes // dtype.itemsize * stored.itemsize
        blocks = _THREADS * BLOCK_BYTES // dtype.itemsize * stored.itemsize
        return row * (blocks // row + 2)


class ArraySet:
    """The open arrays of one directory.

    Parameters
    ----------
    directory : ArrayDirectory
    known : dict of str to KnownArray
        By the tensor's name.
    budget : int
        Bytes that reading may use besides the tensors; one row of chunks may need more.
    fill_missing : bool
        Whether a missing chunk is read as the fill value, which is how zarr stores chunks of zeros; otherwise it is an
        error.

    Attributes
    ----------
    arrays : dict of str to OpenArray

    Raises
    ------
    CorruptCheckpointError, UnsupportedError, StoreError
        As `check_array`, and if an array cannot be opened.
    """

    def __init__(
        self, directory: ArrayDirectory, known: Mapping[str, KnownArray], *, budget: int, fill_missing: bool
    ) -> None:
        self._directory = directory
        self._known = dict(known)
        self._fill_missing = fill_missing
        self._max_row = max(BLOCK_BYTES, budget // 8)
        self.arrays = self._open(list(self._known), context())
        large = [name for name, array in self.arrays.items() if array.row_bytes > self._max_row]
        if large:
            cache = max(self.arrays[name].cache_bytes for name in large)
            self.arrays |= self._open(large, context(cache_bytes=min(cache, physical_memory() // 4)))

    def _open(self, names: list[str], context: Any) -> dict[str, OpenArray]:
        futures = {}
        for name in names:
            with self._directory.reading(name):
                futures[name] = start_open(self._directory, self._known[name], context, fill_missing=self._fill_missing)
        arrays = {}
        for name, future in futures.items():
            with self._directory.reading(name):
                arrays[name] = check_array(name, self._known[name], future.result(), self._directory)
        return arrays

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes ``start:stop`` of a tensor; see `tensorkeep.formats.base.Reader.read`."""
        array = self.arrays[name]
        size, at = array.types.dtype.itemsize, 0
        with self._directory.reading(name):
            for box in range_to_boxes(array.shape, start // size, stop // size):
                nbytes = prod(box_shape(box)) * size
                array.read_box(box, out[at : at + nbytes])
                at += nbytes

    def block_bytes(self, name: str) -> int:
        """Return the alignment at which reading a tensor is cheapest: rows of chunks, if they are not too large."""
        row = self.arrays[name].row_bytes
        return BLOCK_BYTES if row > self._max_row else row * max(1, BLOCK_BYTES // row)


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
    if size > physical_memory() // 4 or (size > _LARGE_CHUNK and size > 4 * total):
        raise UnsupportedError(
            f"its chunks of shape {list(chunk)} take {size:,} bytes each, too many to decode",
            path=path,
            name=name,
            remedy="store it in smaller chunks",
        )
    return OpenArray(name, store, types, shape, chunk, store.spec().to_json()["metadata"])


def physical_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
