"""One safetensors file: `safe_open` reads its tensors or slices, and `write_file` writes it."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from safetensors import SafetensorError

from tensorkeep.checkpoint.lazy import Checkpoint, LazyTensor
from tensorkeep.checkpoint.ranges import CopyPlan
from tensorkeep.checkpoint.saving import save
from tensorkeep.errors import NotFoundError, PathLike, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.plan import SUFFIX
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.safetensors import SafetensorsReader, begins_like_safetensors
from tensorkeep.machine import memory_file
from tensorkeep.paths import checked_path
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Array, Leaf, check_device
from tensorkeep.state.tree import placeholders
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.parallel import default_threads
from tensorkeep.storage.system_errors import store_errors

if TYPE_CHECKING:
    import torch

    Device = torch.device | str | int

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}
# Of safetensors; all read the same bytes.
BACKENDS = ("mmap", "pread")


@contextmanager
def safetensor_errors() -> Iterator[None]:
    """Raise errors of Tensorkeep as errors that are also a `SafetensorError`, which callers of safetensors catch."""
    try:
        yield
    # For a missing file, safetensors raises a plain FileNotFoundError as well.
    except (SafetensorError, NotFoundError):
        raise
    except TensorkeepError as error:
        kind = _both_errors(type(error))  # type: ignore[arg-type]  # mypy: a class with __hash__ is not hashable
        # Without calling `__init__`: its arguments differ among the errors.
        both = kind.__new__(kind, *error.args)
        vars(both).update(vars(error))
        raise both from None


@cache
def _both_errors(kind: Any) -> type[TensorkeepError]:
    # Cached: the same error class each time, so that callers can compare classes.
    return type(kind.__name__, (kind, SafetensorError), {"__module__": kind.__module__})


def bytes_of_file(serialize: Callable[..., bytes], tensors: Mapping[str, Any], metadata: Any) -> bytes:
    """Return tensors as the bytes of a file; ``serialize`` of safetensors makes them if it knows all dtypes."""
    content = None if metadata is None else dict(metadata)
    if all(BY_NAME[str(each.dtype).removeprefix("torch.")].tag(tuple(each.shape)) for each in tensors.values()):
        return serialize(tensors, metadata=content)
    # The library of safetensors does not know all dtypes, so our own writer makes the bytes.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"tensors{SUFFIX}")
        write_file(tensors, path, content)
        return path.read_bytes()


def checked_tensors(tensors: Any, kind: type) -> dict[str, Any]:
    """Return a flat dict of tensors or arrays of one kind; UsageError for anything else."""
    if not isinstance(tensors, Mapping):
        raise UsageError(f"a {type(tensors).__name__} is not a dict of tensors", remedy="give names and tensors")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, kind):
            remedy = "flatten the dict" if isinstance(value, Mapping) else "convert it, or leave it out"
            raise UsageError(
                f"a {type(value).__name__} at {name!r} is not a {kind.__name__} with a name",
                remedy=f"{remedy}; tensorkeep.save stores nested states of tensors, arrays and plain values",
            )
    return dict(tensors)


def write_file(tensors: Mapping[str, Array], filename: PathLike, metadata: Mapping[str, str] | None) -> None:
    """Write one safetensors file of any name, with only this metadata; replaces an existing safetensors file."""
    place = Path(checked_path(filename))
    write = partial(
        save, dict(tensors), format="safetensors", overwrite=True, metadata=dict(metadata or {}), framework=None
    )
    if place.suffix == SUFFIX:
        write(place)
        return
    # For another suffix, the format would write a directory: the file gets its name when it is complete.
    with Commit(place, directory=False, overwrite=True, replaceable=begins_like_safetensors) as commit:
        whole = commit.path.with_name(f"model{SUFFIX}")
        try:
            write(whole)
        except TensorkeepError as error:
            error.path = os.fspath(place)
            raise
        with store_errors(place, "save here"):
            os.rename(whole, commit.path)
        commit.publish()


class safe_open:  # noqa: N801
    """Open a safetensors file, or a directory of shards with an index, without reading a tensor; a context manager.

    Parameters
    ----------
    filename : path-like
    framework : str
        ``"pt"`` for torch tensors, ``"np"`` for numpy arrays.
    device : torch.device, str or int
        Device of the tensors; an int is the index of a CUDA device.
    backend : str
        Has no effect.

    Raises
    ------
    NotFoundError
        If nothing is at the path.
    SafetensorError
        If the file is not a safetensors file, is damaged, or an argument is wrong.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tensorkeep.safetensors import safe_open, save_file
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"w": torch.arange(6.0).reshape(3, 2)}, f"{folder.name}/a.safetensors", {"step": "7"})
    >>> with safe_open(f"{folder.name}/a.safetensors", framework="pt") as file:
    ...     file.keys(), file.metadata(), file.get_slice("w")[1:, 0]
    (['w'], {'step': '7'}, tensor([2., 4.]))
    >>> folder.cleanup()
    """

    def __init__(self, filename: PathLike, framework: str, device: "Device" = "cpu", *, backend: str = "mmap") -> None:
        with safetensor_errors():
            if backend not in BACKENDS:
                raise UsageError(f"the backend {backend!r} does not exist", remedy=f"give one of {', '.join(BACKENDS)}")
            if framework not in _FRAMEWORKS:
                raise UnsupportedError(
                    f"the framework {framework!r} is not supported", remedy='give "pt" or "np", and convert the arrays'
                )
            self._framework = _FRAMEWORKS[framework]
            self._device = self._checked_device(device)
            settings = OpenSettings(verify=True, pool=BufferPool(), page_cache=True)
            reader = open_reader(checked_path(filename, stores=True), settings, "safetensors")
            assert isinstance(reader, SafetensorsReader)
            self._reader = reader
            self._checkpoint = Checkpoint(reader, settings)
            # Tensors of dtypes that neither torch nor numpy has: listed by name, but not read.
            self._unread = {found.name: found for found in placeholders(reader.flat.skeleton)}
            self._closed = False

    def _checked_device(self, device: "Device") -> "torch.device | None":
        if self._framework == "np" or str(device) == "cpu":
            return None
        import torch

        check_device(device)  # type: ignore[arg-type]
        return torch.device(device)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted([*self._open(), *self._unread])

    def offset_keys(self) -> list[str]:
        """Return the names of the stored tensors in file order."""
        self._open()
        return self._reader.offset_order()

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file; None if it has none."""
        self._open()
        framework = self._reader.details["framework"]
        return {
            **({} if framework is None else {"format": framework}),
            **self._reader.written_by,
            **self._reader.metadata,
        } or None

    def get_tensor(self, name: str) -> Array:
        """Return a tensor; SafetensorError if it does not exist or is damaged."""
        return self.get_slice(name)[...]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Return all tensors, or the named ones, read in parallel."""
        checkpoint = self._open()
        with safetensor_errors():
            # All names are checked before anything is read.
            for name in self._unread if names is None else self._unread.keys() & set(names):
                self._raise_unread(name)
            chosen = list(checkpoint) if names is None else [checkpoint[name].name for name in names]
            plan = CopyPlan(self._reader, chosen, {}, self._device)
            plan.read(default_threads(), checkpoint._settings.pool, None)
            values = plan.values()
            return {name: self._as_framework(values[name], self._reader.entries[name].dtype) for name in chosen}

    def get_slice(self, name: str) -> "TensorSlice":
        """Return a tensor that reads only the slices it is asked for.

        Raises SafetensorError if it does not exist, or neither torch nor numpy has its dtype.
        """
        with safetensor_errors():
            if name in self._unread:
                self._raise_unread(name)
            return TensorSlice(self, self._open()[name])

    def _raise_unread(self, name: str) -> NoReturn:
        found = self._unread[name]
        raise UnsupportedError(f"cannot be read: {found.what}", path=self._checkpoint.path, name=name)

    def _open(self) -> Checkpoint:
        if self._closed:
            with safetensor_errors():
                raise UsageError("is closed", path=self._checkpoint.path, remedy="read it within the with block")
        return self._checkpoint

    def _as_framework(self, value: Array, dtype: DType) -> Array:
        if self._framework == "np":
            if isinstance(value, np.ndarray):
                return value
            # `Tensor.numpy` refuses bfloat16 and other dtypes; the bytes are the same.
            content = Leaf("", "tensor", dtype, value.contiguous()).host_bytes()
            assert content is not None
            return content.view(dtype.numpy).reshape(tuple(value.shape))
        import torch

        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.reshape(-1).view(np.uint8)).view(dtype.torch).reshape(value.shape)
        return value if self._device is None else value.to(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._checkpoint.close()

    def __repr__(self) -> str:
        return f"<safe_open {os.fspath(self._checkpoint.path)!r}>"


def tensors_in(data: bytes, framework: str) -> dict[str, Array]:
    """Return the tensors in the bytes of a safetensors file; SafetensorError for other bytes."""
    try:
        # The reader needs a file: a memory file takes no disk, and has a path while it is open.
        with open(memory_file(), "wb", buffering=0) as file:
            # A write to memory takes at most 2 GiB at once.
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework) as opened:
                return opened.get_tensors()
    except TensorkeepError as error:
        error.path = None  # the copy, which the caller does not know
        if not isinstance(error, UnsupportedError):
            error.message = f"the bytes are not a safetensors file: {error.message}"
        raise
    except (OSError, TypeError) as error:
        with safetensor_errors():
            raise UsageError(f"cannot copy the bytes: {error}", remedy="give the bytes of a file") from error


class TensorSlice:
    """A tensor of an open file; indexing it reads the rows that the first index selects."""

    def __init__(self, file: safe_open, tensor: LazyTensor) -> None:
        self._file = file
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape. ``"F4"`` counts numbers; an element of a torch tensor packs two of them."""
        return list(self._dtype.numbers_shape(self._tensor.shape))

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors, such as ``"BF16"``, or else in numpy."""
        return self._dtype.safetensors or self._dtype.name

    @property
    def _dtype(self) -> DType:
        return self._file._reader.entries[self._tensor.name].dtype

    def __getitem__(self, index: Any) -> Array:
        """Return the selected elements; SafetensorError if the file is closed or damaged, or the index is wrong."""
        self._file._open()
        with safetensor_errors():
            try:
                selected = self._tensor[self._element_index(index)]
            except IndexError as error:
                path, shape = self._file._checkpoint.path, self.get_shape()
                remedy = f"its shape is {shape}"
                raise UsageError(str(error), path=path, name=self._tensor.name, remedy=remedy) from None
            return self._file._as_framework(selected, self._dtype)

    def _element_index(self, index: Any) -> Any:
        # float4_e2m1fn_x2 packs two numbers into one element; safetensors counts numbers.
        packs, places = self._dtype.packs, index if isinstance(index, tuple) else (index,)
        given = [place for place in places if place is not None and place is not ...]
        after_dots = places[-1] is not ... and any(place is ... for place in places)
        reaches_last = len(given) == self._tensor.ndim or after_dots
        if packs == 1 or not given or not reaches_last:
            return index
        last = places[-1]
        if isinstance(last, slice) and last.step in (None, 1):
            start, stop, _ = last.indices(self.get_shape()[-1])
            if start % packs == stop % packs == 0:
                return (*places[:-1], slice(start // packs, stop // packs))
        raise UnsupportedError(
            f"packs {packs} numbers in an element, and {index!r:.100} does not select full elements",
            name=self._tensor.name,
            remedy=f"as the last index, give a slice that starts and ends at multiples of {packs}",
        )
