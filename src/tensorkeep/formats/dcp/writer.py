"""Writing a distributed checkpoint: by DCP, in this process, then visible whole or not at all."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from tensorkeep.errors import OutOfMemoryError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import BLOCK_BYTES, WriteResult, WriteSettings
from tensorkeep.formats.dcp.metadata import FILE_NAME
from tensorkeep.formats.dcp.options import MOST_THREADS, DcpOptions
from tensorkeep.formats.dcp.planner import Failures, Planner, Writer
from tensorkeep.formats.dcp.reader import stored_form
from tensorkeep.formats.path_items import Item, items_of
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.structure import Structure
from tensorkeep.io import parallel
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import store_error
from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.leaf import Array, Leaf, Source, allocate
from tensorkeep.state.strided import is_lazy
from tensorkeep.state.tree import Flat


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    """Write a state as a directory; see `tensorkeep.formats.base.Format.write`."""
    threads = _checked_threads(destination, settings)
    items = items_of(flat)
    with Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit:
        cancellation = parallel.Cancellation()
        tensors = _Tensors(flat, items, settings, cancellation)
        failures = Failures()
        planner = Planner(items, tensors.stand_in, tensors.get, failures)
        writer = Writer(commit.path, threads, len(planner.given), failures)
        # DCP starts threads and does not expect an interrupt while it waits for them.
        parallel.run([lambda: _save(planner, writer, failures)], 1, cancellation)
        tensors.done()
        size = _write_sidecar(flat, commit.path, settings)
        commit.publish()
    return WriteResult(stored_bytes=size, new_bytes=size, peak_buffer_bytes=tensors.peak_bytes)


def _checked_threads(destination: Path, settings: WriteSettings) -> int:
    threads = settings.options_as(DcpOptions).thread_count or min(settings.threads, MOST_THREADS)
    if settings.compression != "none":
        raise UnsupportedError(
            f"a distributed checkpoint cannot be compressed with {settings.compression!r}",
            path=destination,
            remedy='use compression="none", or format="native"',
        )
    return threads


def _save(planner: Planner, writer: Writer, failures: Failures) -> None:
    try:
        with warnings.catch_warnings():
            # It says that there is no process group, which is the point.
            warnings.simplefilter("ignore", UserWarning)
            save(planner.given, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        _, (failure, _) = next(iter(error.failures.items()))
        writer.stop(failure)
    if isinstance(failures.first, MemoryError):
        raise OutOfMemoryError("there is not enough memory to write it", path=writer.path) from failures.first
    if isinstance(failures.first, OSError):
        # Of the directory, or of the metadata's last name: DCP's own calls.
        raise store_error(failures.first, writer.path, "write it") from failures.first
    if failures.first is not None:
        raise failures.first


def _write_sidecar(flat: Flat[Source], directory: Path, settings: WriteSettings) -> int:
    """Write what DCP has no place for; return the bytes of all files."""
    files = {path.name: sidecar.note_file(path, hashed=path.name == FILE_NAME) for path in sorted(directory.iterdir())}
    notes = Sidecar(
        format="dcp",
        structure=Structure.of_state(flat),
        tensors=sidecar.describe_tensors(flat),
        files=files,
        metadata=settings.metadata,
    )
    return sidecar.write(directory, notes) + sum(note.bytes for note in files.values())


class _Tensors:
    """The tensors that DCP asks for, one at a time in each of its threads.

    DCP keeps what it is given until a file is complete. So what was made for it is emptied when the thread asks for the
    next one: memory holds one tensor for each thread, besides those that the caller has anyway.
    """

    def __init__(
        self, flat: Flat[Source], items: list[Item], settings: WriteSettings, cancellation: parallel.Cancellation
    ) -> None:
        self.peak_bytes = 0
        self._flat = flat
        self._cancellation = cancellation
        total = sum(self._nbytes(item.name) for item in items if item.leaf)
        self._meter = parallel.Meter(total, settings.progress)
        self._lock = threading.Lock()
        self._held: dict[int, Array] = {}
        self._made = 0

    def stand_in(self, name: str) -> Array:
        """Return a tensor without memory that is like the one of a name."""
        source, alias = self._find(name)
        dtype, shape = stored_form(source.dtype, source.shape if alias is None else alias.shape)
        return allocate("tensor", dtype, shape, device="meta")

    def get(self, name: str) -> Array:
        """Return a tensor, in C order, alone in its storage."""
        self._cancellation.check()
        self._release()
        source, alias = self._find(name)
        tensor = _in_memory(source) if alias is None else None
        if tensor is None:
            tensor = self._make(source, alias)
        self._meter.add(self._nbytes(name))
        return tensor

    def done(self) -> None:
        """Empty what was made last."""
        for tensor in self._held.values():
            tensor.untyped_storage().resize_(0)
        self._held.clear()

    def _find(self, name: str) -> tuple[Source, Alias | None]:
        alias = self._flat.aliases.get(name)
        return self._flat.leaves[alias.of if alias else name], alias

    def _nbytes(self, name: str) -> int:
        source, alias = self._find(name)
        return source.nbytes if alias is None else prod(alias.shape) * source.dtype.itemsize

    def _release(self) -> None:
        with self._lock:
            tensor = self._held.pop(threading.get_ident(), None)
            if tensor is not None:
                self._made -= tensor.nbytes
                tensor.untyped_storage().resize_(0)

    def _make(self, source: Source, alias: Alias | None) -> Array:
        dtype, shape = stored_form(source.dtype, source.shape)
        tensor = allocate("tensor", dtype, shape)
        _fill(tensor, source, self._cancellation)
        if alias is not None:
            if dtype is source.dtype:
                tensor = make_view(tensor, alias)
            else:
                base = tensor.numpy().reshape(*source.shape, source.dtype.itemsize)
                tensor = _view_of_bytes(base, alias, source.dtype.itemsize)
            tensor = tensor.clone(memory_format=_contiguous())
        with self._lock:
            self._made += tensor.nbytes
            self.peak_bytes = max(self.peak_bytes, self._made)
            self._held[threading.get_ident()] = tensor
        return tensor


def _contiguous() -> Array:
    import torch

    return torch.contiguous_format


def _view_of_bytes(base: Array, alias: Alias, itemsize: int) -> Array:
    """Return the bytes of a view of elements that torch has no dtype for."""
    import torch

    raw = base.reshape(-1).view(f"V{itemsize}")
    strides = tuple(stride * itemsize for stride in alias.strides)
    view = np.ndarray(alias.shape, raw.dtype, raw, alias.offset_elements * itemsize, strides)
    return torch.from_numpy(np.ascontiguousarray(view).reshape(-1).view(np.uint8))


def _in_memory(source: Source) -> Array | None:
    """Return the state's own tensor, if it is as DCP saves it without another copy."""
    if not isinstance(source, Leaf) or not source.is_torch or is_lazy(source.array):
        return None
    tensor = source.array
    fills = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == source.nbytes
    return tensor if fills and tensor.device.type == "cpu" else None


def _fill(tensor: Array, source: Source, cancellation: parallel.Cancellation) -> None:
    import torch

    target = tensor.reshape(-1).view(torch.uint8)
    # By way of a buffer: torch gives up the right to free memory that numpy has seen.
    buffer = np.empty(min(BLOCK_BYTES, source.nbytes), np.uint8)
    for start in range(0, source.nbytes, BLOCK_BYTES):
        cancellation.check()
        stop = min(start + BLOCK_BYTES, source.nbytes)
        source.read(start, stop, buffer[: stop - start])
        target[start:stop] = torch.from_numpy(buffer[: stop - start])
