"""`tensorkeep.open`: a mapping of lazy tensors; indexing one reads only the blocks that hold the selected rows."""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.loading import LoadRequest, load_open
from tensorkeep.checkpoint.match import refuse_placeholders_named
from tensorkeep.checkpoint.options import AllowOption, MemorySize, ProgressOption, drawn, open_settings
from tensorkeep.checkpoint.ranges import NewPages, contiguous_in, fill, strided_view
from tensorkeep.checkpoint.verify import VerifyReport, verify_open
from tensorkeep.closing import Closing
from tensorkeep.errors import PathLike, TensorNotFoundError, UsageError, explains_keywords
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.formats.finding import open_reader
from tensorkeep.paths import absolute
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.leaf import Array, Device, DTypeLike, Leaf, LeafKind, allocate
from tensorkeep.state.names import nearest
from tensorkeep.state.tree import shown_values
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool

if TYPE_CHECKING:
    import numpy as np
    import torch


@explains_keywords(device="give it to load(), or to the to() of a tensor", mmap="give it to load()")
def open(
    path: PathLike,
    *,
    verify: bool = True,
    format: str | None = None,
    allow: AllowOption = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> "Checkpoint":
    """Open a checkpoint of any format without reading a tensor; a context manager, and a mapping of lazy tensors.

    Parameters
    ----------
    path : path-like
        A checkpoint, or a step of a run such as ``"run"`` or ``"run@1200"``; see `load`.
    verify, format, allow, memory_budget : optional
        See `tensorkeep.load`.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
        As `tensorkeep.load`; of the damage, only what its description shows.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"w": torch.arange(6).reshape(3, 2)}, f"{folder.name}/c")
    >>> with tensorkeep.open(f"{folder.name}/c") as checkpoint:
    ...     checkpoint["w"].shape, checkpoint["w"][1:3]
    ((3, 2), tensor([[2, 3],
            [4, 5]]))
    >>> folder.cleanup()
    """
    settings = open_settings(memory_budget, verify=verify, page_cache=True, allow=allow)
    return Checkpoint(open_reader(checkpoint_path(path), settings, format), settings)


def _reopen(path: str, verify: bool, format: str, allow: list[str], memory_budget: int, identity: str) -> "Checkpoint":
    """Open a checkpoint that was pickled; UsageError if another one has taken its place."""
    found = open(path, verify=verify, format=format, allow=allow or None, memory_budget=memory_budget)
    if found._reader.identity() != identity:
        found.close()
        raise UsageError("was replaced since it was pickled", path=path, remedy="open it again")
    return found


class Checkpoint(Closing, Mapping[str, "LazyTensor"]):
    """An open checkpoint: a mapping from name to lazy tensor, in the state's order; returned by `tensorkeep.open`.

    It has a ``path``, a ``format``, and ``metadata``, which was given when it was saved. ``plain_values`` has what the
    state holds besides tensors.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> state = {"w": torch.zeros(3, 2), "b": torch.ones(2), "step": 7}
    >>> _ = tensorkeep.save(state, f"{folder.name}/c", metadata={"lr": 0.1})
    >>> with tensorkeep.open(f"{folder.name}/c") as checkpoint:
    ...     list(checkpoint), checkpoint.nbytes, checkpoint.format, checkpoint.metadata, checkpoint.plain_values
    (['w', 'b'], 32, 'native', {'lr': 0.1}, {'step': 7})
    >>> folder.cleanup()
    """

    def __init__(self, reader: Reader, settings: OpenSettings) -> None:
        self.path = reader.path
        self.format = reader.format
        self.metadata = reader.metadata
        self._reader = reader
        self._settings = settings
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Raw bytes of all tensors; shared storage counts once."""
        return sum(leaf.nbytes for leaf in self._reader.flat.leaves.values())

    @cached_property
    def plain_values(self) -> dict[str, Any]:
        """The values of the state that are not tensors, by name, such as ``step``; see `InfoReport`."""
        return dict(shown_values(self._reader.flat.skeleton))

    def __getitem__(self, name: str) -> "LazyTensor":
        """Return a lazy tensor; TensorNotFoundError, a KeyError, names the nearest ones if it does not exist.

        UnsupportedError if it cannot be read; see `Placeholder`.
        """
        if name not in self._reader.entries:
            refuse_placeholders_named(self._reader, [name])
            if name in self.plain_values:
                text = f"{name!r} is not a tensor, but a plain value"
                raise TensorNotFoundError(text, path=self.path, remedy=f"read it with plain_values[{name!r}]")
            raise TensorNotFoundError(f"has no tensor {name!r}", path=self.path, remedy=nearest(list(self), str(name)))
        return LazyTensor(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r} ({self.format}): {len(self)} tensors, {self.nbytes:,} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path, for a worker of a data loader, for example: it opens the files itself."""
        reader, pool = self._open()
        settings = self._settings
        arguments = (os.fspath(absolute(self.path)), settings.verify, self.format, sorted(settings.allow), pool.budget)
        return _reopen, (*arguments, reader.identity())

    def verify(self, *, progress: ProgressOption = None, threads: int | None = None) -> VerifyReport:
        """Read everything and check it, in the files that are open; see `tensorkeep.verify`.

        UsageError is raised if the checkpoint was opened with ``verify=False``, or is closed.
        """
        if not self._settings.verify:
            text = "was opened with verify=False, so that reading checks nothing"
            raise UsageError(text, path=self.path, remedy="open it with verify=True, or call tensorkeep.verify")
        reader, pool = self._open()
        with drawn(progress, "verifying") as callback:
            return verify_open(reader, pool, threads=threads, progress=callback)

    def load(
        self,
        *,
        into: Any = None,
        select: str | Iterable[str] | None = None,
        device: Device = None,
        dtype: DTypeLike = None,
        strict: bool = True,
        progress: ProgressOption = None,
        threads: int | None = None,
    ) -> Any:
        """Load the state, or a selection, from the open files; see `tensorkeep.load`.

        Uses the checksums and the memory budget given to `tensorkeep.open`.
        """
        reader, pool = self._open()
        return load_open(
            reader, pool, LoadRequest(into, select, device, strict, dtype, progress=progress, threads=threads)
        )

    def close(self) -> None:
        """Close the files; lazy tensors can then not be read. A second call does nothing."""
        self._closed = True
        self._reader.close()
        self._settings.pool.close()

    def _open(self) -> tuple[Reader, BufferPool]:
        if self._closed:
            raise UsageError("is closed", path=self.path, remedy="read it before close(), or open it again")
        return self._reader, self._settings.pool


class LazyTensor:
    """A tensor of an open checkpoint; indexing it reads the blocks that hold the selected rows.

    It has a ``name``, a ``shape``, and ``nbytes``, its raw bytes.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"w": torch.zeros(3, 2)}, f"{folder.name}/c")
    >>> with tensorkeep.open(f"{folder.name}/c") as checkpoint:
    ...     lazy = checkpoint["w"]
    ...     lazy.shape, lazy.dtype, lazy.nbytes, lazy[1]
    ((3, 2), torch.float32, 24, tensor([0., 0.]))
    >>> folder.cleanup()
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        entry = checkpoint._reader.entries[name]
        self.name = name
        self.shape = entry.shape
        self.nbytes = entry.nbytes
        self._dtype = entry.dtype
        self._kind = checkpoint._reader.leaf_specs[name].kind
        self._checkpoint = checkpoint

    @property
    def dtype(self) -> "torch.dtype | np.dtype[Any]":
        """The torch dtype; the numpy dtype if it was saved as a numpy array."""
        return self._dtype.numpy if self._kind in ("ndarray", "npscalar") else self._dtype.torch

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyTensor, (self._checkpoint, self.name)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r}: {self._dtype} {list(self.shape)}>"

    def to(self, *args: Any, **kwargs: Any) -> "torch.Tensor":
        """Return the full tensor on a device, or of another dtype: ``to("cuda")``, ``to(torch.float32)``.

        Takes the arguments of `torch.Tensor.to`. What was saved as a numpy array is returned as a tensor as well.
        """
        tensor: torch.Tensor = self._read((...,), "tensor")
        return tensor.to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        """Return the selected elements as a tensor, or as an array if it was saved as one.

        Only the rows that the first index selects, an integer or a slice, are read; other indices are applied in
        memory. Raises CorruptCheckpointError if a block that is read is damaged, and UsageError after `close`.
        """
        return self._read(index if isinstance(index, tuple) else (index,), self._kind)

    def _read(self, places: tuple[Any, ...], kind: LeafKind) -> Array:
        reader, pool = self._checkpoint._open()
        # A strided view has no range of its own in the file.
        if contiguous_in(reader, self.name) is None:
            return strided_view(reader, self.name, kind, pool).array[places]
        low, high, first = self._row_range(places)
        shape = (high - low, *self.shape[1:]) if self.shape else ()
        leaf = Leaf(self.name, kind, self._dtype, allocate(kind, self._dtype, shape))
        fill(reader, self.name, leaf, pool, NewPages(), start=low * prod(self.shape[1:]) * self._dtype.itemsize)
        return leaf.array[(*first, *places[1:])]

    def _row_range(self, places: tuple[Any, ...]) -> tuple[int, int, tuple[Any, ...]]:
        count = self.shape[0] if self.shape else 1
        if not places or not self.shape:
            return 0, count, places[:1]
        first = places[0]
        if isinstance(first, slice):
            # The rows between the steps are read as well; the step is applied in memory.
            picked = range(*first.indices(count))
            if not picked:
                return 0, 0, (slice(None),)
            return min(picked), max(picked) + 1, (slice(None, None, picked.step),)
        # Masks, lists and index tensors may select any row.
        if isinstance(first, bool) or not hasattr(first, "__index__") or getattr(first, "shape", None):
            return 0, count, (first,)
        row = operator.index(first)
        if not -count <= row < count:
            raise IndexError(f"index {row} is out of range for dimension 0 of size {count}")
        return row % count, row % count + 1, (0,)

    def load(self, *, out: Array = None) -> Array:
        """Return the full tensor, in ``out`` if it is given: a tensor or array of the same dtype and shape.

        Raises UsageError if ``out`` does not fit or is not writable, or the checkpoint is closed.
        """
        if out is None:
            return self[...]
        reader, pool = self._checkpoint._open()
        leaf = Leaf.of(self.name, out)
        if leaf is None or (leaf.dtype, leaf.shape) != (self._dtype, self.shape) or not leaf.writable:
            text = f"`out` is not a writable {self._dtype} of shape {list(self.shape)}"
            raise UsageError(text, path=reader.path, name=self.name)
        fill(reader, self.name, leaf, pool)
        return out
