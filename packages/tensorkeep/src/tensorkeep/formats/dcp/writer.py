"""Writes distributed checkpoints in DCP's layout, in one process; one rename publishes the folder."""

import functools
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorkeep.errors import OutOfMemoryError, UnsupportedError, is_out_of_memory
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import BLOCK_BYTES, Structure, WriteResult, WriteSettings
from tensorkeep.formats.dcp.reader import FILE_NAME, MARK, stored_form
from tensorkeep.formats.path_items import Item, items_of
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.torch_file.writer import TorchStream, fills_its_storage
from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.leaf import Leaf, Source, allocate
from tensorkeep.state.tree import Flat, named_by_keys
from tensorkeep.storage import parallel
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import write_small


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, threads: int, replaceable: Callable[[Path], bool]
) -> WriteResult:
    if settings.compression != "none":
        raise UnsupportedError(
            f"a distributed checkpoint cannot be compressed with {settings.compression!r}",
            path=destination,
            remedy='use compression="none", or format="native"',
        )
    flat = named_by_keys(flat)
    items = items_of(flat)
    tensors = _Tensors(flat)
    meter = parallel.Meter(sum(tensors.nbytes(item.name) for item in items if item.leaf), settings.progress)
    # DCP itself would leave a partial folder after a failure, and lose the errors of all threads but one.
    with Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit:
        locations: dict[str, _StorageInfo] = {}
        cancellation = parallel.Cancellation()

        def write_file(path: Path, items: Sequence[Item]) -> None:
            with TorchStream(path, cancellation=cancellation) as stream:
                for item in items:
                    cancellation.check()
                    # Every item is a complete ``torch.save`` file, and ``.metadata`` has its range.
                    offset = stream.tell()
                    if item.leaf:
                        with tensors.get(item.name) as tensor:
                            stream.save(tensor)
                        meter.add(tensors.nbytes(item.name))
                    else:
                        stream.save(item.value)
                    locations[item.name] = _StorageInfo(path.name, offset, stream.tell() - offset)
                stream.finish()

        files = {f"__0_{number}.distcp": chosen for number, chosen in enumerate(_assign(items, tensors, threads))}
        tasks = [functools.partial(write_file, commit.path / name, chosen) for name, chosen in files.items()]
        try:
            parallel.run(tasks, threads, cancellation)
        except Exception as error:
            if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
                raise OutOfMemoryError("there is not enough memory to write it", path=destination) from error
            raise
        write_small(commit.path / FILE_NAME, pickle.dumps(_metadata(items, tensors, locations)))
        size = _write_sidecar(flat, commit.path, settings)
        commit.publish()
    return WriteResult(stored_bytes=size, new_bytes=size, peak_buffer_bytes=tensors.peak_bytes)


def _assign(items: Sequence[Item], tensors: "_Tensors", count: int) -> list[list[Item]]:
    # As DCP does: values in turn; tensors to the smallest file, largest tensors first.
    files: list[list[Item]] = [[] for _ in range(min(count, len(items)))]
    for number, item in enumerate(item for item in items if not item.leaf):
        files[number % len(files)].append(item)
    sizes = [0] * len(files)
    for item in sorted((item for item in items if item.leaf), key=lambda item: tensors.nbytes(item.name), reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(item)
        sizes[smallest] += tensors.nbytes(item.name)
    return [chosen for chosen in files if chosen]


def _metadata(items: Sequence[Item], tensors: "_Tensors", locations: dict[str, _StorageInfo]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for item in items:
        if item.leaf:
            like = tensors.stand_in(item.name)
            # One chunk per tensor: this process has the full tensor.
            zeros = torch.Size([0] * like.dim())
            chunk = ChunkStorageMetadata(offsets=zeros, sizes=like.size())
            entries[item.name] = TensorStorageMetadata(TensorProperties(dtype=like.dtype), like.size(), [chunk])
            storage[MetadataIndex(item.name, zeros, 0)] = locations[item.name]
        else:
            entries[item.name] = BytesStorageMetadata()
            storage[MetadataIndex(item.name)] = locations[item.name]
    paths = {item.name: item.path for item in items}
    # The path of the checkpoint is left out: the temporary directory will be renamed.
    meta = StorageMeta(save_id=str(uuid.uuid4()), modules=[MARK])
    return Metadata(entries, paths, storage, meta, CURRENT_DCP_VERSION)


def _write_sidecar(flat: Flat[Source], directory: Path, settings: WriteSettings) -> int:
    """Write what DCP cannot store into the sidecar; return the bytes of all files."""
    files = {
        # Only the metadata is hashed: data files have a CRC-32 for every record.
        path.name: sidecar.describe_file(path, hashed=path.name == FILE_NAME)
        for path in sorted(directory.iterdir())
    }
    notes = Sidecar(
        format="dcp",
        structure=Structure.of_state(flat),
        tensors=sidecar.describe_tensors(flat),
        files=files,
        metadata=settings.metadata,
    )
    return sidecar.write(directory, notes) + sum(note.bytes for note in files.values())


class _Tensors:
    """The tensors to write; ``peak_bytes`` counts copies, without the state itself."""

    def __init__(self, flat: Flat[Source]) -> None:
        self.peak_bytes = 0
        self._flat = flat
        self._lock = threading.Lock()
        self._bytes = 0

    def stand_in(self, name: str) -> torch.Tensor:
        source, alias = self._find(name)
        # The meta device takes no memory: the metadata needs only dtype and shape.
        dtype, shape = stored_form(source.dtype, source.shape if alias is None else alias.shape)
        return cast(torch.Tensor, allocate("tensor", dtype, shape, device="meta"))

    def nbytes(self, name: str) -> int:
        source, alias = self._find(name)
        return source.nbytes if alias is None else prod(alias.shape) * source.dtype.itemsize

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a contiguous CPU tensor that fills its storage: torch would save the full storage."""
        source, alias = self._find(name)
        if alias is None and isinstance(source, Leaf) and source.is_torch and fills_its_storage(source):
            # No copy: the memory of the state is written as it is.
            own: torch.Tensor = source.array
            if own.device.type == "cpu":
                yield own
                return
        # A view gets an item of its own, because DCP has no tensors that share storage.
        tensor = _copy(source, alias)
        self._count(tensor.nbytes)
        try:
            yield tensor
        finally:
            self._count(-tensor.nbytes)

    def _find(self, name: str) -> tuple[Source, Alias | None]:
        alias = self._flat.aliases.get(name)
        return self._flat.leaves[alias.of if alias else name], alias

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)


def _copy(source: Source, alias: Alias | None) -> torch.Tensor:
    dtype, shape = stored_form(source.dtype, source.shape)
    tensor: torch.Tensor = allocate("tensor", dtype, shape)
    out = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, source.nbytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, source.nbytes)
        source.read(start, stop, out[start:stop])
    if alias is None:
        return tensor
    if dtype is source.dtype:
        # The clone fills its storage; the view would be saved with the full tensor.
        return cast(torch.Tensor, make_view(tensor, alias)).clone(memory_format=torch.contiguous_format)
    # Torch lacks the dtype, so the tensor holds bytes, and numpy makes the view of its elements.
    elements = out.view(f"V{source.dtype.itemsize}")
    strides = tuple(stride * source.dtype.itemsize for stride in alias.strides)
    view = np.ndarray(alias.shape, elements.dtype, elements, alias.offset_elements * source.dtype.itemsize, strides)
    return torch.from_numpy(np.ascontiguousarray(view).reshape(-1).view(np.uint8))
