"""What DCP is given to save a state with: a planner that makes tensors when they are asked for, and a place to write.

DCP loses the errors of all threads but one, does not wait for the others after that one's, and its zip writer does not
survive an error that passes through it. So an error is kept, what follows it is done on nothing, and the caller hears
of it at the end; and what was written is counted, whatever became of the threads.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tensorkeep.errors import StoreError
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.formats.dcp.metadata import MARK
from tensorkeep.formats.path_items import Item
from tensorkeep.io.files import Bytes, DirectFile

_SMALL_BYTES = 1024**2


class Failures:
    """The first error of any thread, after which nothing more is read or written.

    Attributes
    ----------
    first : BaseException or None
    """

    def __init__(self) -> None:
        self.first: BaseException | None = None
        self._lock = threading.Lock()

    def keep(self, error: BaseException) -> None:
        """Take note of an error, if it is the first."""
        with self._lock:
            self.first = self.first or error


class Planner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and gets each when it is written.

    Parameters
    ----------
    items : sequence of Item
    stand_in : callable
        Returns a tensor of device ``meta`` for a name.
    get : callable
        Returns the tensor of a name.
    failures : Failures
    """

    def __init__(
        self,
        items: Sequence[Item],
        stand_in: Callable[[str], torch.Tensor],
        get: Callable[[str], torch.Tensor],
        failures: Failures,
    ) -> None:
        super().__init__()
        self.given = {item.name: stand_in(item.name) if item.leaf else item.value for item in items}
        self._paths = {item.name: item.path for item in items}
        self._tensors = {item.name for item in items if item.leaf}
        self._get = get
        self._failures = failures

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._get(index.fqn) if index.fqn in self._tensors else self.state_dict[index.fqn]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        plain, content = write_item.type == WriteItemType.BYTE_IO, io.BytesIO()
        if self._failures.first is None:
            try:
                found = self.lookup_object(write_item.index)
                if not plain:
                    return cast(torch.Tensor, found)
                torch.save(found, content)
            except BaseException as error:
                self._failures.keep(error)
        return content if plain else torch.empty(0)


class Writer(FileSystemWriter):
    """DCP's writer to a directory, with files of ours: durable, and all errors kept.

    Parameters
    ----------
    path : Path
    threads : int
    count : int
        How many entries there are to write.
    failures : Failures
    """

    def __init__(self, path: Path, threads: int, count: int, failures: Failures) -> None:
        # Nothing is copied ahead: a tensor is there only until the next is asked for.
        super().__init__(path, thread_count=threads, sync_files=False, per_thread_copy_ahead=0)
        self.path = path
        self.fs = self._streams = _Streams(failures)
        self._count = count
        self._failures = failures

    def storage_meta(self) -> StorageMeta | None:
        # Not the temporary directory, which will have another name.
        return StorageMeta(save_id=self.save_id, modules=[MARK])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, if there is a result for every entry: DCP takes those that there are for all."""
        lost = self._count - len({result.index for some in results for result in some})
        if lost:
            self._failures.keep(StoreError(f"{lost} of {self._count} entries were not written", path=self.path))
        if self._failures.first is None:
            super().finish(metadata, results)

    def stop(self, error: BaseException) -> None:
        """Take note of an error that ended DCP's first thread, and wait for the others."""
        self._failures.keep(error)
        self._streams.join()


class _Streams(FileSystem):
    """The files that DCP opens."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with self._lock:
            self._threads.add(threading.current_thread())
            stream = _Stream(Path(path), self._failures)
        # An error that went on from here would end the thread unheard, and leave its share undone.
        try:
            yield stream
            stream.finish()
        except BaseException as error:
            self._failures.keep(error)
        finally:
            stream.discard()

    def join(self) -> None:
        """Wait for the threads that opened files; those that come later find that there was an error, and open none."""
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()


class _Stream(io.RawIOBase):
    """A new file that is written in order; torch writes some forty pieces of a few bytes for each tensor.

    Nothing is written, and no file made, once there was an error.
    """

    def __init__(self, path: Path, failures: Failures) -> None:
        self._failures = failures
        self._small = bytearray()
        self._written = 0
        self._file: DirectFile | None = None
        if failures.first is None:
            try:
                self._file = DirectFile(path, direct=False)
            except BaseException as error:
                failures.keep(error)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + len(self._small)

    def write(self, data: Any, /) -> int:
        if self._failures.first is None:
            # Torch's zip writer calls this, and does not survive an error.
            try:
                self._take(data)
            except BaseException as error:
                self._failures.keep(error)
        return len(data)

    def _take(self, data: Any) -> None:
        if len(self._small) + len(data) > _SMALL_BYTES:
            self._flush_small()
        if len(data) > _SMALL_BYTES:
            self._put(data)
        else:
            self._small += data

    def _flush_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(small)

    def _put(self, data: Any) -> None:
        content: Bytes = np.frombuffer(data, np.uint8)
        if self._file is not None:
            for at in range(0, len(content), BLOCK_BYTES):
                self._file.write(self._written + at, content[at : at + BLOCK_BYTES])
        self._written += len(content)

    def close(self) -> None:
        """Do nothing: DCP closes before it is done."""

    def finish(self) -> None:
        """Make the file durable."""
        if self._file is not None and self._failures.first is None:
            self._flush_small()
            self._file.finish(self._written)

    def discard(self) -> None:
        """Close the file, if that was not done."""
        if self._file is not None:
            self._file.close()
        super().close()
