"""Loading a T5X checkpoint as T5X does: open every array, read it whole, convert back; for comparisons.

`holdfast.load` reads straight into the tensors' memory, in pieces and checked. Here each array is read by one call.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import PathLike
from holdfast.io.directory import Directory

if TYPE_CHECKING:
    import torch

_DEFAULT_MEMORY = 1024**3


def load_arrays(
    path: PathLike,
    *,
    concurrency: int | None = None,
    in_flight: str = "all",
    memory: int | str | None = None,
) -> dict[str, torch.Tensor]:
    """Read every array of a T5X checkpoint whole.

    Parameters
    ----------
    path : path-like
        What `holdfast.save` wrote with ``format="t5x"``, or T5X.
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
    from holdfast.formats.t5x.contents import look
    from holdfast.formats.tensorstore_arrays.failures import tensorstore
    from holdfast.formats.tensorstore_arrays.places import held
    from holdfast.formats.tensorstore_arrays.settings import in_flight as checked_in_flight
    from holdfast.formats.tensorstore_arrays.settings import limit
    from holdfast.formats.tensorstore_arrays.specs import context
    from holdfast.formats.tensorstore_arrays.walking import check_folders
    from holdfast.state.aliases import make_view
    from holdfast.units import parse_bytes

    most = 0 if checked_in_flight(in_flight) == "one" else parse_bytes(_DEFAULT_MEMORY if memory is None else memory)
    chosen = limit("concurrency", concurrency)
    tensorstore()
    directory = Path(path)
    with Directory(directory) as opened, held(Path(opened.held_path)) as root:
        contents = look(opened)
        check_folders(root, (wanted.key for wanted in contents.wanted.values()), directory)
        loading = _Loading(directory, root, contents, context(concurrency=chosen))
        tensors = loading.arrays(most)
        tensors |= {name: _tensor(stored) for name, stored in contents.inline.items()}
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in contents.aliases.items()}


class _Loading:
    """One call of `load_arrays`."""

    def __init__(self, directory: Path, root: str, contents: Any, context: Any) -> None:
        from holdfast.formats.tensorstore_arrays.specs import Place

        self._directory = directory
        self._place = Place(root)
        self._contents = contents
        self._context = context

    def arrays(self, most: int) -> dict[str, Any]:
        """Read all arrays, so many bytes of them at once; for 0, one after the other."""
        tensors: dict[str, Any] = {}
        waiting: list[tuple[str, int, Any]] = []
        futures = {name: self._open(name) for name in self._contents.wanted} if most else {}
        for name in self._contents.wanted:
            store = self._result(name, futures[name] if most else self._open(name))
            size = prod(store.shape) * store.dtype.numpy_dtype.itemsize
            while waiting and sum(item[1] for item in waiting) + size > most:
                earlier, _, future = waiting.pop(0)
                tensors[earlier] = self._finish(earlier, future)
            waiting.append((name, size, self._read(name, store)))
        return tensors | {name: self._finish(name, future) for name, _, future in waiting}

    def _open(self, name: str) -> Any:
        from holdfast.formats.tensorstore_arrays.failures import reading, tensorstore
        from holdfast.formats.tensorstore_arrays.specs import open_spec

        wanted = self._contents.wanted[name]
        spec = open_spec(self._place, wanted.key, wanted.zarr, fill_missing=self._contents.notes is None)
        with reading(self._directory, self._place.root, name):
            return tensorstore().open(spec, open=True, read=True, write=False, context=self._context)

    def _read(self, name: str, store: Any) -> Any:
        from holdfast.errors import UnsupportedError
        from holdfast.formats.tensorstore_arrays.failures import reading
        from holdfast.formats.tensorstore_arrays.opened import opened, refuse_larger_than_memory

        # Which refuses what is not as it was saved.
        array = opened(name, self._contents.wanted[name], store, self._directory)
        if not array.types.dtype.has_torch:
            raise UnsupportedError(f"torch has no dtype {array.types.dtype}", path=self._directory, name=name)
        refuse_larger_than_memory(array, self._directory)
        with reading(self._directory, self._place.root, name):
            return store.read(order="C")

    def _result(self, name: str, future: Any) -> Any:
        from holdfast.formats.tensorstore_arrays.failures import reading

        with reading(self._directory, self._place.root, name):
            return future.result()

    def _finish(self, name: str, future: Any) -> torch.Tensor:
        import numpy as np
        import torch

        from holdfast.state.dtypes import of_numpy

        array = self._result(name, future)
        wanted = self._contents.wanted[name].types
        dtype = wanted.dtype if wanted is not None else of_numpy(np.dtype(array.dtype))
        if dtype is None:
            raise AssertionError(f"{name}: opened with a dtype that is not known")
        if wanted is not None and wanted.converts:
            return torch.from_numpy(array).to(dtype.torch)
        return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype.torch).reshape(array.shape)


def _tensor(stored: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(stored.content.copy()).view(stored.dtype.torch).reshape(stored.shape)
