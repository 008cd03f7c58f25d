"""A data file that many threads write at once.

A task reads its blocks from the state, or from a copy that was staged before, so that the state may change meanwhile.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from tensorkeep.codecs.base import CODECS, Codec
from tensorkeep.errors import UsageError
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.notes import METADATA_KEY, Description, describe
from tensorkeep.formats.blockfile.plan import BlockKey, BlockRecord, FilePlan, tasks_of
from tensorkeep.formats.sealed import digest
from tensorkeep.formats.write import BLOCK_BYTES, thread_bytes
from tensorkeep.io import parallel
from tensorkeep.io.buffers import Buffer, BufferPool, aligned_copy
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.io.objects.store_commit import object_name
from tensorkeep.io.objects.uploads import Upload, part_bytes
from tensorkeep.io.parallel import Cancellation, Meter, Pace
from tensorkeep.paths import StorePath

StagedTask = Callable[[], Buffer]
"""Returns the copy of a task's bytes that was staged, as `tensorkeep.formats.blockfile.gather.stage` lays it out."""


@dataclass(frozen=True, slots=True)
class WriteContext:
    """What the data files of one save share.

    ``direct`` bypasses the page cache where the file system allows it. The checksums of raw bytes have 128 bits if
    ``wide``. A probe chooses the codec of each block if ``codec`` is None. ``save_id`` is in the names of the files, if
    it is not empty.
    """

    pool: BufferPool
    meter: Meter
    cancellation: Cancellation
    pace: Pace
    direct: bool = True
    wide: bool = False
    codec: Codec | None = None
    save_id: str = ""


class DataFile(ABC):
    """One data file, or object of a store, that is being written.

    It is open only from its first task to its last: a state may have a thousand parts.

    Attributes
    ----------
    name : str
        The plan's file name after the prefix, with the id of the save.
    tasks : list of list of Block
        The blocks of each task.
    records : dict of (str, int) to BlockRecord
        The blocks written so far.
    header_size : int
        Bytes of the header, a multiple of 4096; 0 if it has none.
    size, header_digest, offsets, direct
        Once the file is finished: its bytes, the header's xxh3-64, the first byte of each tensor by key, and whether
        the page cache was bypassed.
    """

    header_comes_first: ClassVar[bool]
    """Whether the header is known before the data. An object of a store has a header only then."""

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext, *, prefix: str = "") -> None:
        self.plan = plan
        self.name = object_name(prefix + plan.name, context.save_id)
        self.in_store = isinstance(directory, StorePath)
        self.tasks = tasks_of(plan)
        self.records: dict[BlockKey, BlockRecord] = {}
        has_header = self.header_comes_first or not self.in_store
        self.header_size = len(self._header(self._longest_description(), None)) if has_header else 0
        self.header_digest = ""
        self.size = self.header_size + plan.raw_bytes
        self.offsets: dict[str, int] = {}
        self.direct = True
        self._path = directory / self.name
        self._context = context
        self._tasks_left = len(self.tasks)
        self._lock = threading.Lock()
        self._open_file: DirectFile | Upload | None = None

    @abstractmethod
    def _longest_description(self) -> Description:
        """Return the description with the longest possible header, for which space is reserved."""

    @abstractmethod
    def _write(self, number: int, staged: Buffer | None) -> None:
        """Write a task's blocks, from the staged copy if there is one, and record them."""

    def _description(self) -> Description:
        return describe(self.plan, self.records)

    def _create(self) -> DirectFile | Upload:
        if not isinstance(self._path, StorePath):
            return DirectFile(self._path, direct=self._context.direct)
        context = self._context
        return Upload(
            self._path, context.pool, context.cancellation, most_bytes=self._most_bytes, progress=context.meter.add
        )

    @property
    def _most_bytes(self) -> int:
        return self.header_size + self.plan.raw_bytes

    @property
    def upload_bytes(self) -> int:
        """The memory that an upload takes besides the buffers of the threads."""
        return part_bytes(self._most_bytes) if self.in_store else 0

    def write_task(self, number: int, take: StagedTask | None = None) -> None:
        """Write the blocks of a task; tasks start in order and each runs once. The last one makes the file durable.

        If ``take`` is given, the copy that it returns is written instead of the state, and released.
        """
        staged = take() if take else None
        try:
            self._write(number, staged)
        finally:
            if staged:
                staged.release()
        with self._lock:
            self._tasks_left -= 1
            last = self._tasks_left == 0
        if last:
            self.finish()

    def _put(self, offset: int, data: Bytes, memory: Buffer, raw_bytes: int) -> None:
        """Write the bytes of a task, which are in a buffer, and report its raw bytes as done, when they are."""
        file = self._file
        if isinstance(file, Upload):
            file.write(offset, data, memory, counts=raw_bytes)
        else:
            file.write(offset, data)
            self._context.meter.add(raw_bytes)

    def finish(self) -> None:
        """Write the header, cut the file to size and make it durable; a second call does nothing."""
        if self.header_digest:
            return
        description = self._description()
        content = self._header(description, self.header_size) if self.header_size else b""
        if not self.in_store:
            self._file.write(0, aligned_copy(content))
        self.direct = self._file.direct
        self._file.finish(self.size)
        self.offsets = {record.name: self.header_size + record.start for record in description[0]}
        self.header_digest = digest(content)

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._open_file is not None:
            self._open_file.close()

    @property
    def _file(self) -> DirectFile | Upload:
        with self._lock:
            if self._open_file is None:
                self._open_file = self._create()
            return self._open_file

    def _header(self, description: Description, size: int | None) -> bytes:
        records, notes = description
        metadata = dict(self.plan.metadata)
        if notes is not None:
            metadata[METADATA_KEY] = msgspec.json.encode(notes).decode()
        if self.plan.header_order:
            by_name = {record.name: record for record in records}
            records = [by_name[name] for name in self.plan.header_order]
        return header.build(records, metadata, size=size)


def write_files(
    files: Sequence[DataFile],
    context: WriteContext,
    threads: int,
    *,
    take: Callable[[int], Buffer] | None = None,
    delta: bool = False,
) -> None:
    """Write data files from many threads, fewer if the pool's budget is too small; each is durable on return.

    If ``take`` is given, it returns the staged copy of a task, by its number among the tasks of all files. With
    ``delta``, blocks may be stored as differences, which takes more memory.
    """
    try:
        tasks: list[Callable[[], None]] = []
        for file in files:
            for number in range(len(file.tasks)):
                staged = functools.partial(take, len(tasks)) if take else None
                tasks.append(functools.partial(file.write_task, number, staged))
        each = thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=take is not None, delta=delta))
        each += max((file.upload_bytes for file in files), default=0)
        parallel.run(tasks, context.pool.threads(threads, each), context.cancellation)
        context.cancellation.check()
        for file in files:
            file.finish()  # a file without a byte of data has no task
    finally:
        for file in files:
            file.close()


def buffers_per_thread(*, staged: bool, delta: bool) -> int:
    """Return how many block-sized buffers one writing thread may use at once.

    One for coded bytes; unless they were staged, one for raw bytes, which are gathered or copied, and one that a source
    in another checkpoint reads into; for differences, one each for the earlier block, its stored bytes and the
    difference.
    """
    return (1 if staged else 3) + (3 if delta else 0)


def find_codec(compression: str) -> Codec | None:
    """Return the codec that a save names; None for ``"lossless"``, which chooses one for each block.

    Raises UsageError if the compression is unknown.
    """
    if compression == "lossless":
        return None
    if compression == "none":
        return CODECS.get("raw")
    if compression not in CODECS.names():
        known = ", ".join(["none", "lossless", "auto", *CODECS.names()])
        raise UsageError(f"there is no compression {compression!r}", remedy=f"choose one of: {known}")
    return CODECS.get(compression)


def index_content(files: Iterable[DataFile], order: Iterable[str] | None = None) -> bytes:
    """Return the bytes of the index that Hugging Face tools read for finished files, with the keys in this order."""
    homes = {key: file.name for file in files for key in file.offsets}
    total = sum(file.size - file.header_size for file in files)
    content: bytes = msgspec.json.encode(
        {"metadata": {"total_size": total}, "weight_map": {key: homes[key] for key in order or homes}}
    )
    return content
