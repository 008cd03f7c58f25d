"""Loading all arrays of a directory as a user of TensorStore does: open, read, convert back; for comparisons.

`tensorkeep.load` reads through `TensorStoreReader`, straight into the tensors' memory, in pieces and checked against
what was written. Here each array is read by one call, as TensorStore's own documentation and most programs do it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import PathLike, UnsupportedError
from tensorkeep.formats.tensorstore import sidecar as sidecars
from tensorkeep.formats.tensorstore.failures import reading, tensorstore
from tensorkeep.formats.tensorstore.opened import Wanted, opened, refuse_larger_than_memory
from tensorkeep.formats.tensorstore.places import foreign_arrays, own_arrays
from tensorkeep.formats.tensorstore.settings import in_flight as checked_in_flight
from tensorkeep.formats.tensorstore.settings import limit
from tensorkeep.formats.tensorstore.specs import Place, context, open_spec
from tensorkeep.formats.tensorstore.stored_types import StoredType
from tensorkeep.io.directory import Directory
from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.units import parse_bytes

if TYPE_CHECKING:
    import torch

_DEFAULT_MEMORY = 1024**3

Arrays = dict[str, Any]


def load_arrays(
    path: PathLike,
    *,
    concurrency: int | None = None,
    in_flight: str = "all",
    memory: int | str | None = None,
) -> dict[str, torch.Tensor]:
    """Read every array of a directory whole.

    Parameters
    ----------
    path : path-like
        Arrays that `tensorkeep.save` wrote with ``format="tensorstore"``, or others'.
    concurrency : int, optional
        TensorStore's limit on file operations at once; its default unless given.
    in_flight : str
        ``"one"``: each array is opened and read to the end before the next; ``"all"``: all at once.
    memory : int or str, optional
        The most bytes of arrays that are being read at once, as they are stored, with ``in_flight="all"``; a larger
        array is read alone. 1 GiB by default.

    Returns
    -------
    dict of str to torch.Tensor
        By name, in the dtype that was saved where our own file tells it, else in the stored one.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError, UsageError, MissingExtraError
    """
    limits = ReadLimits.of(concurrency, in_flight, memory)
    with Directory(Path(path)) as directory:
        place, wanted, aliases = _arrays(directory)
        tensors = read_whole(directory.path, place, wanted, limits)
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in aliases.items()}


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much is read at once.

    Attributes
    ----------
    concurrency : int or None
        File operations; None for TensorStore's default.
    memory : int
        Bytes of arrays; 0 for one array after the other.
    """

    concurrency: int | None
    memory: int

    @classmethod
    def of(cls, concurrency: int | None, in_flight: str, memory: int | str | None) -> ReadLimits:
        """Return the limits that `load_arrays` was given, checked; MissingExtraError without TensorStore."""
        one = checked_in_flight(in_flight) == "one"
        most = 0 if one else parse_bytes(_DEFAULT_MEMORY if memory is None else memory)
        checked = limit("concurrency", concurrency)
        tensorstore()
        return cls(checked, most)


def read_whole(directory: Path, place: Place, wanted: dict[str, Wanted], limits: ReadLimits) -> Arrays:
    """Open arrays and read each by one call.

    Parameters
    ----------
    directory : Path
        What errors call the place.
    place : Place
    wanted : dict of str to Wanted
    limits : ReadLimits

    Returns
    -------
    dict of str to torch.Tensor
    """
    loading = _Loading(directory, place, wanted, context(concurrency=limits.concurrency))
    return loading.all_at_once(limits.memory) if limits.memory else loading.one_by_one()


def _arrays(directory: Directory) -> tuple[Place, dict[str, Wanted], dict[str, Alias]]:
    root = f"{directory.fd_path}/"
    if not sidecars.is_ours(Path(root)):
        return *foreign_arrays(directory.path, root), {}
    found, place, wanted = own_arrays(directory, root)
    return place, wanted, found.aliases


class _Loading:
    """One call of `load_arrays`."""

    def __init__(self, directory: Path, place: Place, wanted: dict[str, Wanted], context: Any) -> None:
        self._directory = directory
        self._place = place
        self._wanted = wanted
        self._context = context
        self._types: dict[str, StoredType] = {}

    def one_by_one(self) -> Arrays:
        return {
            name: self._finish(name, self._read(name, self._result(name, self._open(name)))) for name in self._wanted
        }

    def all_at_once(self, most: int) -> Arrays:
        """Open all, then read as many at once as may be."""
        stores = {name: self._open(name) for name in self._wanted}
        tensors: Arrays = {}
        waiting: deque[tuple[str, int, Any]] = deque()
        pending = 0
        for name, future in stores.items():
            store = self._result(name, future)
            size = prod(store.shape) * (store.dtype.numpy_dtype.itemsize)
            while waiting and pending + size > most:
                earlier, freed, found = waiting.popleft()
                tensors[earlier] = self._finish(earlier, found)
                pending -= freed
            waiting.append((name, size, self._read(name, store)))
            pending += size
        return tensors | {name: self._finish(name, found) for name, _, found in waiting}

    def _open(self, name: str) -> Any:
        wanted = self._wanted[name]
        spec = open_spec(self._place, wanted.key, wanted.zarr, fill_missing=wanted.types is None)
        with reading(self._directory, self._place.root, name):
            return tensorstore().open(spec, open=True, read=True, write=False, context=self._context)

    def _result(self, name: str, future: Any) -> Any:
        with reading(self._directory, self._place.root, name):
            return future.result()

    def _read(self, name: str, store: Any) -> Any:
        # Which refuses what is not as it was saved.
        array = opened(name, self._wanted[name], store, self._directory)
        if not array.types.dtype.has_torch:
            raise UnsupportedError(f"torch has no dtype {array.types.dtype}", path=self._directory, name=name)
        refuse_larger_than_memory(array, self._directory)
        self._types[name] = array.types
        with reading(self._directory, self._place.root, name):
            return store.read(order="C")

    def _finish(self, name: str, future: Any) -> torch.Tensor:
        return _tensor(self._result(name, future), self._types[name])


def _tensor(array: npt.NDArray[Any], types: StoredType) -> torch.Tensor:
    import torch

    if types.converts:
        return torch.from_numpy(array).to(types.dtype.torch)
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(types.dtype.torch).reshape(array.shape)
