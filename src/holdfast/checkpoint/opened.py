"""An open checkpoint: a mapping of lazy tensors that read only what is asked for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.checkpoint.finding import open_reader
from holdfast.checkpoint.load import load
from holdfast.checkpoint.verify import VerifyReport, verify
from holdfast.errors import PathLike, UsageError
from holdfast.formats.base import OpenSettings, Reader
from holdfast.io.buffers import DEFAULT_BUDGET, BufferPool
from holdfast.io.parallel import Progress
from holdfast.state.aliases import make_view
from holdfast.state.leaf import Array, Leaf, LeafKind, allocate
from holdfast.state.tree import leaf_specs

if TYPE_CHECKING:
    import numpy as np
    import torch


def open(
    path: PathLike, *, verify: bool = True, format: str | None = None, memory_budget: int = DEFAULT_BUDGET
) -> Checkpoint:
    """Open a checkpoint of any format without reading a tensor.

    Parameters
    ----------
    path : path-like
    verify : bool
        Check each block that is read against its checksum, where the format has any.
    format : str, optional
        Do not look, take this one.
    memory_budget : int
        Bytes that the buffers for reading may take.

    Returns
    -------
    Checkpoint
        A context manager; ``ckpt["model.wte.weight"][0:10]`` reads the blocks that hold those rows.

    Raises
    ------
    NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
    """
    return Checkpoint(
        open_reader(path, OpenSettings(verify=verify, pool=BufferPool(memory_budget), page_cache=True), format)
    )


class Checkpoint(Mapping[str, "LazyTensor"]):
    """An open checkpoint: a mapping from name to lazy tensor, in the state's order.

    Attributes
    ----------
    path : Path
    format : str
    metadata : dict
        What was given when it was saved.
    """

    def __init__(self, reader: Reader) -> None:
        self.path = reader.path
        self.format = reader.format
        self.metadata = reader.metadata
        self._reader = reader
        self._specs = leaf_specs(reader.flat.skeleton)

    @property
    def nbytes(self) -> int:
        """Raw bytes of all tensors, each storage once."""
        return sum(leaf.nbytes for leaf in self._reader.flat.leaves.values())

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self._reader, name, self._specs[name].kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r} ({self.format}): {len(self)} tensors, {self.nbytes:,} bytes>"

    def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read everything and check it; see `holdfast.verify`."""
        return verify(self.path, format=self.format, progress=progress)

    def load(self, **options: Any) -> Any:
        """Load the state; takes what `holdfast.load` takes."""
        return load(self.path, format=self.format, **options)

    def close(self) -> None:
        """Close the files; lazy tensors can no longer be read."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class LazyTensor:
    """A tensor that lies in a checkpoint; indexing it reads the blocks that hold the rows asked for.

    Attributes
    ----------
    name : str
    shape : tuple of int
    nbytes : int
        Raw bytes.
    """

    def __init__(self, reader: Reader, name: str, kind: LeafKind) -> None:
        entry = reader.entries[name]
        self.name = name
        self.shape = entry.shape
        self.nbytes = entry.nbytes
        self._dtype = entry.dtype
        self._kind = kind
        self._reader = reader

    @property
    def dtype(self) -> torch.dtype | np.dtype[Any]:
        """The torch dtype, or the numpy dtype of what was saved as a numpy array."""
        return self._dtype.numpy if self._kind in ("ndarray", "npscalar") else self._dtype.torch

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r}: {self._dtype} {list(self.shape)}>"

    def __getitem__(self, index: Any) -> Array:
        """Return the selected elements as a tensor (an array, if it was saved as one).

        An integer or a slice in the first place limits what is read to those rows; all else is applied in memory.

        Raises
        ------
        CorruptCheckpointError
            If a block that is read is not what was written.
        IndexError
            If the index is out of range.
        """
        places = index if isinstance(index, tuple) else (index,)
        alias = self._reader.flat.aliases.get(self.name)
        if alias is not None:
            whole = LazyTensor(self._reader, alias.of, self._kind).load()
            return make_view(whole, alias)[places]
        low, high, first = self._row_range(places)
        return self._rows(low, high)[(*first, *places[1:])]

    def _row_range(self, places: tuple[Any, ...]) -> tuple[int, int, tuple[Any, ...]]:
        """Return the rows to read, and what is left of the first index when only they are there."""
        count = self.shape[0] if self.shape else 1
        if not places or not self.shape:
            return 0, count, places[:1]
        first = places[0]
        if isinstance(first, slice):
            picked = range(*first.indices(count))
            if not picked:
                return 0, 0, (slice(None),)
            return min(picked), max(picked) + 1, (slice(None, None, picked.step),)
        if isinstance(first, bool) or not hasattr(first, "__index__") or getattr(first, "shape", None):
            return 0, count, (first,)
        row = operator.index(first)
        if not -count <= row < count:
            raise IndexError(f"index {row} is out of range for dimension 0 of size {count}")
        return row % count, row % count + 1, (0,)

    def load(self, *, out: Array = None) -> Array:
        """Return the whole tensor, in ``out`` if one of the same dtype and shape is given."""
        if out is None:
            return self[...]
        leaf = Leaf.of(self.name, out)
        if leaf is None or (leaf.dtype, leaf.shape) != (self._dtype, self.shape) or not leaf.writable:
            raise UsageError(
                f"`out` is no writable {self._dtype} of shape {list(self.shape)}",
                path=self._reader.path,
                name=self.name,
            )
        self._fill(leaf, 0)
        return out

    def _rows(self, low: int, high: int) -> Array:
        shape = (high - low, *self.shape[1:]) if self.shape else ()
        leaf = Leaf(self.name, self._kind, self._dtype, allocate(self._kind, self._dtype, shape))
        self._fill(leaf, low * prod(self.shape[1:]) * self._dtype.itemsize)
        return leaf.array

    def _fill(self, leaf: Leaf, start: int) -> None:
        host = leaf.host_bytes()
        step = self._reader.block_bytes(self.name)
        for begin, end in _grid(start, start + leaf.nbytes, step):
            if host is not None:
                self._reader.read(self.name, begin, end, host[begin - start : end - start])
            else:
                with BufferPool().acquire(end - begin) as buffer:
                    self._reader.read(self.name, begin, end, buffer[: end - begin])
                    leaf.write(begin - start, end - start, buffer[: end - begin])


def _grid(start: int, stop: int, step: int) -> Iterable[tuple[int, int]]:
    """Yield the range cut at the multiples of ``step``."""
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end
