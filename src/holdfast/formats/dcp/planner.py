"""What DCP is given to save a state with: a planner that makes tensors when they are asked for, and a place to write.

DCP loses the errors of all threads but one, and its zip writer does not survive one that passes through it. So an error
is kept, what follows it is done on nothing, and the caller hears of it at the end.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from holdfast.formats.base import BLOCK_BYTES
from holdfast.formats.dcp.metadata import MARK
from holdfast.formats.path_items import Item
from holdfast.io.files import Bytes, DirectFile

_SMALL_BYTES = 1024**2


class Planner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and gets each when it is written.

    Parameters
    ----------
    items : sequence of Item
    stand_in : callable
        Returns a tensor of device ``meta`` for a name.
    get : callable
        Returns the tensor of a name.
    """

    def __init__(
        self, items: Sequence[Item], stand_in: Callable[[str], torch.Tensor], get: Callable[[str], torch.Tensor]
    ) -> None:
        super().__init__()
        self.given = {item.name: stand_in(item.name) if item.leaf else item.value for item in items}
        self._paths = {item.name: item.path for item in items}
        self._tensors = {item.name for item in items if item.leaf}
        self._get = get
        self._failure: BaseException | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._tensors:
            return self.state_dict[index.fqn]
        if self._failure is None:
            try:
                return self._get(index.fqn)
            except BaseException as error:
                self._failure = error
        return torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = self.lookup_object(write_item.index)
        if write_item.type != WriteItemType.BYTE_IO:
            return cast(torch.Tensor, found)
        content = io.BytesIO()
        torch.save(found, content)
        return content

    def raise_failure(self) -> None:
        """Raise the first error of the tensors, if there was one."""
        if self._failure is not None:
            raise self._failure


class Writer(FileSystemWriter):
    """DCP's writer to a directory, with files of ours: durable, and all errors kept."""

    def __init__(self, path: Path, threads: int) -> None:
        # Nothing is copied ahead: a tensor is there only until the next is asked for.
        super().__init__(path, thread_count=threads, sync_files=False, per_thread_copy_ahead=0)
        self.path = path
        self.fs = self._streams = _Streams()

    def storage_meta(self) -> StorageMeta | None:
        # Not the temporary directory, which will have another name.
        return StorageMeta(save_id=self.save_id, modules=[MARK])

    def raise_failure(self) -> None:
        """Raise the first error of the files, if there was one."""
        if self._streams.failures:
            raise self._streams.failures[0]


class _Streams(FileSystem):
    """The files that DCP opens."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        try:
            stream = _Stream(Path(path), self.failures)
        except BaseException as error:
            self.failures.append(error)
            yield io.BytesIO()
            return
        try:
            yield stream
            stream.finish()
        finally:
            stream.discard()


class _Stream(io.RawIOBase):
    """A new file that is written in order; torch writes some forty pieces of a few bytes for each tensor."""

    def __init__(self, path: Path, failures: list[BaseException]) -> None:
        self._file = DirectFile(path, direct=False)
        self._failures = failures
        self._small = bytearray()
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + len(self._small)

    def write(self, data: Any, /) -> int:
        if len(self._small) + len(data) > _SMALL_BYTES:
            self._flush_small()
        if len(data) > _SMALL_BYTES:
            self._put(data)
        else:
            self._small += data
        return len(data)

    def _flush_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(small)

    def _put(self, data: Any) -> None:
        content: Bytes = np.frombuffer(data, np.uint8)
        if not self._failures:
            try:
                for at in range(0, len(content), BLOCK_BYTES):
                    self._file.write(self._written + at, content[at : at + BLOCK_BYTES])
            except BaseException as error:
                self._failures.append(error)
        self._written += len(content)

    def close(self) -> None:
        """Do nothing: DCP closes before it is done."""

    def finish(self) -> None:
        """Make the file durable."""
        self._flush_small()
        if not self._failures:
            try:
                self._file.finish(self._written)
            except BaseException as error:
                self._failures.append(error)

    def discard(self) -> None:
        """Close the file, if that was not done."""
        self._file.close()
        super().close()
