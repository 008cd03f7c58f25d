"""Loading TensorStore arrays with one read call per array, for comparison.

`tensorkeep.load` reads ranges straight into the memory of the tensors instead.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tensorkeep.formats.t5x import read_contents
from tensorkeep.formats.tensorstore.library import ArrayDirectory, context
from tensorkeep.formats.tensorstore.listing import KnownArray
from tensorkeep.formats.tensorstore.reader import check_array, read_own, start_open
from tensorkeep.formats.tensorstore.specs import StoredType
from tensorkeep.state.aliases import make_view
from tensorkeep.storage.local import LocalDirectory

if TYPE_CHECKING:
    import torch

_MAX_IN_FLIGHT = 1024**3
"""Bytes of arrays, as stored, that are read at once; a larger array is read alone."""

InFlight = Literal["one", "all"]


def load_tensorstore(
    path: Path, *, concurrency: int | None = None, in_flight: InFlight = "all"
) -> "dict[str, torch.Tensor]":
    """Read every array of a TensorStore checkpoint that Tensorkeep saved, in the dtype that was saved.

    ``concurrency`` is TensorStore's limit on concurrent file operations. With ``in_flight="one"``, each array is opened
    and read before the next. With ``"all"``, all are opened, then up to 1 GiB is read at once.
    """
    with LocalDirectory(path) as directory:
        notes, arrays, known = read_own(directory)
        tensors = _Loader(arrays, known, concurrency).load(in_flight)
    aliases = notes.structure.flat({}).aliases
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in aliases.items()}


def load_t5x(path: Path, *, concurrency: int | None = None, in_flight: InFlight = "all") -> "dict[str, torch.Tensor]":
    """Read every array of a T5X checkpoint; parameters and result are those of `load_tensorstore`."""
    import torch

    with LocalDirectory(path) as directory:
        contents = read_contents(directory)
        tensors = _Loader(contents.directory, contents.arrays, concurrency).load(in_flight)
    for name, tensor in contents.inline.items():
        tensors[name] = torch.from_numpy(tensor.content.copy()).view(tensor.dtype.torch).reshape(tensor.shape)
    aliases = contents.structure.flat({}).aliases
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in aliases.items()}


@dataclass
class _Loader:
    directory: ArrayDirectory
    known: Mapping[str, KnownArray]
    concurrency: int | None

    def load(self, in_flight: InFlight) -> "dict[str, torch.Tensor]":
        self._context = context(concurrency=self.concurrency)
        if in_flight == "one":
            return {name: self._finish(*self._start(name, self._open(name))) for name in self.known}
        stores = {name: self._open(name) for name in self.known}
        tensors: dict[str, torch.Tensor] = {}
        reading: deque[tuple[str, int, Any]] = deque()
        for name, future in stores.items():
            size = prod(future.result().shape) * future.result().dtype.numpy_dtype.itemsize
            while reading and size + sum(entry[1] for entry in reading) > _MAX_IN_FLIGHT:
                earlier, _, started = reading.popleft()
                tensors[earlier] = self._finish(*started)
            reading.append((name, size, self._start(name, future)))
        return tensors | {name: self._finish(*started) for name, _, started in reading}

    def _open(self, name: str) -> Any:
        known = self.known[name]
        return start_open(self.directory, known, self._context, fill_missing=known.types is None)

    def _start(self, name: str, future: Any) -> tuple[str, Any, StoredType]:
        """Check an open array and start to read it."""
        with self.directory.reading(name):
            array = check_array(name, self.known[name], future.result(), self.directory)
            return name, array.store.read(order="C"), array.types

    def _finish(self, name: str, future: Any, types: StoredType) -> "torch.Tensor":
        import torch

        with self.directory.reading(name):
            content = future.result()
        if types.converts:
            return torch.from_numpy(content).to(types.dtype.torch)
        flat = torch.from_numpy(content.reshape(-1).view(np.uint8))
        return flat.view(types.dtype.torch).reshape(content.shape)
