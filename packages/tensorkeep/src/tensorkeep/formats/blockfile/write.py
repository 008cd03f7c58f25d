"""Writing data files: many threads copy, hash, compress and write the tasks of a file at once."""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.codecs.base import CODECS, Codec, HashedInput
from tensorkeep.errors import UsageError
from tensorkeep.formats.base import BLOCK_BYTES, thread_bytes
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.header import METADATA_KEY, Description, describe, describe_longest
from tensorkeep.formats.blockfile.plan import Block, BlockKey, BlockRecord, FilePlan, tasks_of
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.state.leaf import Bytes, side_stream
from tensorkeep.storage import parallel, storage_of
from tensorkeep.storage.base import OutputFile
from tensorkeep.storage.buffers import ALIGNMENT, Buffer, BufferPool, aligned_copy, round_down, round_up
from tensorkeep.storage.parallel import Cancellation, Meter, Order, Pace
from tensorkeep.storage.store_commit import object_name

# The raw bytes of a task.


def slices_of(blocks: list[Block]) -> Iterator[tuple[Block, slice]]:
    """Yield each block's slice of the task's buffer, which is aligned like the file offset."""
    # Direct I/O needs memory and file offset at the same place within a page.
    at = (blocks[0].leaf.start + blocks[0].start) % ALIGNMENT
    for block in blocks:
        yield block, slice(at, at + block.nbytes)
        at += block.nbytes


def bytes_of(blocks: list[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def staging_bytes(blocks: list[Block]) -> int:
    """Return the size of a buffer for a task's blocks, with the whole pages at either end."""
    return round_up((blocks[0].leaf.start + blocks[0].start) % ALIGNMENT + bytes_of(blocks))


def stage(blocks: list[Block], buffer: Bytes) -> None:
    """Copy a task's blocks from the state into a buffer of `staging_bytes`."""
    for block, place in slices_of(blocks):
        raw = block.leaf.source.host_bytes()
        if raw is None:
            with side_stream(block.leaf.source):
                block.leaf.source.read(block.start, block.stop, buffer[place])
        else:
            np.copyto(buffer[place], raw[block.start : block.stop])


def copy_and_hash(block: Block, out: Bytes, *, wide: bool) -> str:
    raw = block.leaf.source.host_bytes()
    if raw is None:
        block.leaf.source.read(block.start, block.stop, out)
        return digest(out, wide=wide)
    data = HashedInput(out, wide=wide)
    data.read(raw[block.start : block.stop])
    return data.hexdigest()


def readable(block: Block, copy_buffer: Bytes) -> tuple[Bytes, Bytes | None]:
    """Return a block's raw bytes, and a buffer for a copy; None if the raw bytes are already in ``copy_buffer``."""
    raw = block.leaf.source.host_bytes()
    if raw is not None:
        return raw[block.start : block.stop], copy_buffer
    block.leaf.source.read(block.start, block.stop, copy_buffer[: block.nbytes])
    return copy_buffer[: block.nbytes], None


# Coding one block.


class EncodedBlock(NamedTuple):
    """A block at the front of a buffer; ``length`` is its stored length."""

    raw_digest: str
    codec: str
    length: int


def find_codec(compression: str) -> Codec | None:
    """Return the codec that a save names; None for ``"lossless"``, which chooses a codec for every block."""
    if compression == "lossless":
        return None
    if compression == "none":
        return CODECS.get("raw")
    if compression not in CODECS.names():
        known = ", ".join(["none", "lossless", "auto", *CODECS.names()])
        raise UsageError(f"there is no compression {compression!r}", remedy=f"choose one of: {known}")
    return CODECS.get(compression)


def encode(
    raw: Bytes, block: Block, codec: Codec | None, out: Bytes, data: HashedInput | None = None
) -> tuple[str, int]:
    """Code a block to the front of ``out``, or store it raw, which ``data`` does not hash; return codec and length."""
    dtype = block.leaf.source.dtype
    if codec is None:
        return probe.encode(raw, dtype, out, data)
    if codec.name != "raw":
        length = codec.encode(data.read(raw) if data else raw, dtype, out)
        if length < len(raw):
            return codec.name, length
    np.copyto(out[: len(raw)], raw)
    return "raw", len(raw)


def encode_and_hash(
    block: Block, raw: Bytes, copy_buffer: Bytes | None, codec: Codec | None, out: Bytes, *, wide: bool
) -> EncodedBlock:
    """Code a block to the front of ``out``; see `encode`. If ``copy_buffer`` is None, nothing changes ``raw``."""
    data = HashedInput(copy_buffer, wide=wide)
    name, length = encode(raw, block, codec, out, data)
    # What is stored raw may have been copied after it was hashed: the checksum must be the copy's.
    return EncodedBlock(digest(out[:length], wide=wide) if name == "raw" else data.hexdigest(), name, length)


# Data files.

# Returns the staged copy of a task's bytes, as `stage` lays it out.
StagedTask = Callable[[], Buffer]


@dataclass(frozen=True, slots=True)
class WriteContext:
    """Settings and resources that the data files of one save share."""

    pool: BufferPool
    meter: Meter
    cancellation: Cancellation
    pace: Pace
    # Bypass the page cache where the file system allows it.
    direct: bool = True
    # Checksums of raw bytes have 128 bits, so that later saves find unchanged blocks by them.
    wide: bool = False
    # None: a probe chooses the codec of every block.
    codec: Codec | None = None
    # Part of the file names, unless it is empty.
    save_id: str = ""


class DataFile(ABC):
    """One data file, or object of a store, that is being written; see `finish`."""

    # Whether the header is known before the data. An object of a store has a header only then.
    header_comes_first: ClassVar[bool]

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext, *, prefix: str = "") -> None:
        self.plan = plan
        self.name = object_name(prefix + plan.name, context.save_id)
        self._storage = storage_of(directory)
        self.tasks = tasks_of(plan)
        # The blocks written so far.
        self.records: dict[BlockKey, BlockRecord] = {}
        # An object is written from front to back, so its header cannot be written last.
        has_header = self.header_comes_first or not self._storage.writes_in_order
        # A multiple of 4096; 0 without a header.
        self.header_size = len(self._header(self._longest_description(), None)) if has_header else 0
        # `finish` sets these.
        self.header_digest = ""
        self.size = self.header_size + plan.raw_bytes
        self.offsets: dict[str, int] = {}  # the first byte of every tensor, by key
        self.direct = True
        self._path = directory / self.name
        self._context = context
        self._tasks_left = len(self.tasks)
        self._lock = threading.Lock()
        self._open_file: OutputFile | None = None

    @abstractmethod
    def _longest_description(self) -> Description:
        """Return the description with the longest possible header, to reserve space for it."""

    @abstractmethod
    def _write(self, number: int, staged: Buffer | None) -> None:
        """Write a task's blocks, from the staged copy if there is one, and record them."""

    def _description(self) -> Description:
        return describe(self.plan, self.records)

    def _create(self) -> OutputFile:
        context = self._context
        return self._storage.create(
            self._path,
            context.pool,
            context.cancellation,
            most_bytes=self._most_bytes,
            direct=context.direct,
            progress=context.meter.add,
        )

    @property
    def _most_bytes(self) -> int:
        return self.header_size + self.plan.raw_bytes

    @property
    def upload_bytes(self) -> int:
        """The memory that an upload takes besides the buffers of the threads."""
        return self._storage.buffer_bytes(self._most_bytes)

    def write_task(self, number: int, take: StagedTask | None = None) -> None:
        """Write the blocks of a task, or the staged copy that ``take`` returns; the last task finishes the file."""
        staged = take() if take else None
        try:
            self._write(number, staged)
        finally:
            if staged:
                staged.release()
        # Finished by its last task and not at the end: only a few files are open at a time.
        with self._lock:
            self._tasks_left -= 1
            last = self._tasks_left == 0
        if last:
            self.finish()

    def _put(self, offset: int, data: Bytes, memory: Buffer, raw_bytes: int) -> None:
        """Write ``data``, which lies in ``memory``; the raw bytes count as done when it is written."""
        self._file.write(offset, data, memory, counts=raw_bytes)

    def finish(self) -> None:
        """Write the header, cut the file to size and make it durable; a second call does nothing."""
        if self.header_digest:
            return
        description = self._description()
        content = self._header(description, self.header_size) if self.header_size else b""
        if not self._storage.writes_in_order:
            self._file.write(0, aligned_copy(content))
        self.direct = self._file.direct
        self._file.finish(self.size)
        self.offsets = {record.name: self.header_size + record.start for record in description[0]}
        self.header_digest = digest(content)

    def close(self) -> None:
        if self._open_file is not None:
            self._open_file.close()

    @property
    def _file(self) -> OutputFile:
        with self._lock:
            # Opened by its first task: a state may have a thousand parts, more files than a process may open.
            if self._open_file is None:
                self._open_file = self._create()
            return self._open_file

    def _header(self, description: Description, size: int | None) -> bytes:
        records, encoding = description
        metadata = dict(self.plan.metadata)
        if encoding is not None:
            metadata[METADATA_KEY] = msgspec.json.encode(encoding).decode()
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
    """Write data files from many threads; ``take`` returns the staged copy of a task, numbered over all files."""
    try:
        tasks: list[Callable[[], None]] = []
        for file in files:
            for number in range(len(file.tasks)):
                staged = functools.partial(take, len(tasks)) if take else None
                tasks.append(functools.partial(file.write_task, number, staged))
        per_thread = bytes_per_thread(staged=take is not None, delta=delta)
        per_thread += max((file.upload_bytes for file in files), default=0)
        parallel.run(tasks, context.pool.threads(threads, per_thread), context.cancellation)
        context.cancellation.check()
        for file in files:
            file.finish()  # a file without a byte of data has no task
    finally:
        for file in files:
            file.close()


def buffers_per_thread(*, staged: bool, delta: bool) -> int:
    # One for coded bytes. Unless blocks were staged, one for raw bytes, and one that a source in another checkpoint
    # reads into. For differences, one each for the earlier block, its stored bytes and the difference.
    return (1 if staged else 3) + (3 if delta else 0)


def bytes_per_thread(*, staged: bool, delta: bool) -> int:
    return thread_bytes(BLOCK_BYTES, buffers=buffers_per_thread(staged=staged, delta=delta))


def index_content(files: Iterable[DataFile], order: Iterable[str] | None = None) -> bytes:
    """Return the index that Hugging Face tools read for finished files, with the keys in this order."""
    homes = {key: file.name for file in files for key in file.offsets}
    total = sum(file.size - file.header_size for file in files)
    content: bytes = msgspec.json.encode(
        {"metadata": {"total_size": total}, "weight_map": {key: homes[key] for key in order or homes}}
    )
    return content


class RawFile(DataFile):
    """A data file of uncompressed tensors: every offset is known before anything is written."""

    header_comes_first = True

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext) -> None:
        super().__init__(directory, plan, context)
        self._edges = _SharedPages(self.size)

    def _longest_description(self) -> Description:
        blocks = [block for task in self.tasks for block in task]
        return describe(self.plan, {block.key: BlockRecord("raw", block.nbytes) for block in blocks})

    def _create(self) -> OutputFile:
        file = super()._create()
        # The size is known, so a full disk is found before any data is written.
        file.preallocate(self.size)
        if self._storage.writes_in_order:
            file.write(0, np.frombuffer(self._header(self._longest_description(), self.header_size), np.uint8))
        return file

    def _write(self, number: int, staged: Buffer | None) -> None:
        blocks = self.tasks[number]
        begin = self.header_size + blocks[0].leaf.start + blocks[0].start
        end = begin + bytes_of(blocks)
        first = round_down(begin)
        memory = staged or self._context.pool.acquire(staging_bytes(blocks))
        with memory as buffer:
            for block, place in slices_of(blocks):
                if staged:
                    checksum = digest(buffer[place], wide=self._context.wide)
                else:
                    checksum = copy_and_hash(block, buffer[place], wide=self._context.wide)
                self.records[block.key] = BlockRecord("raw", block.nbytes, checksum)
            # Pages that other tasks share are left out until they are complete.
            low, high = (begin, end) if self._storage.writes_in_order else self._edges.settle(begin, end, buffer)
            self._put(low, buffer[low - first : high - first], memory, end - begin)


class _SharedPages:
    """Pages that two tasks share at their border; the task that completes a page writes it."""

    def __init__(self, size: int) -> None:
        # A direct write covers whole pages: two tasks that both write a page would overwrite each other's bytes.
        self._size = size
        self._pages: dict[int, tuple[Bytes, int]] = {}
        self._lock = threading.Lock()

    def settle(self, begin: int, end: int, buffer: Bytes) -> tuple[int, int]:
        """Return the range of the file to write from a buffer that begins with the page of ``begin``.

        The bytes of an incomplete page at either end are kept here, and are not in the range.
        """
        first, low, high = round_down(begin), round_up(begin), round_down(end)
        if low > high:  # all within one page
            return (first, round_up(end)) if self._merge(first, begin, end, buffer[:ALIGNMENT]) else (first, first)
        if begin != low and self._merge(first, begin, low, buffer[:ALIGNMENT]):
            low = first
        if end != high and self._merge(high, high, end, buffer[high - first : high - first + ALIGNMENT]):
            high = round_up(end)
        return low, high

    def _merge(self, page: int, start: int, stop: int, own: Bytes) -> bool:
        """Add bytes ``start:stop`` of a page; if that completes it, copy the whole page into ``own``."""
        with self._lock:
            content, count = self._pages.get(page) or (np.zeros(ALIGNMENT, np.uint8), 0)
            content[start - page : stop - page] = own[start - page : stop - page]
            count += stop - start
            self._pages[page] = (content, count)
            # The last page of the file ends with the file.
            if page + count < min(page + ALIGNMENT, self._size):
                return False
            own[:] = content
            return True


class CompressedFile(DataFile):
    """A data file of blocks that are coded one by one; a block's size is known only after coding."""

    header_comes_first = False

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext, *, prefix: str = "") -> None:
        super().__init__(directory, plan, context, prefix=prefix)
        self._order = Order(context.cancellation)
        # Space for the header is reserved at the front, and the header is written last.
        self._end = self.header_size

    def _longest_description(self) -> Description:
        return describe_longest(self.plan)

    def _write(self, number: int, staged: Buffer | None) -> None:
        blocks = self.tasks[number]
        is_last = number == len(self.tasks) - 1
        # A stored block is never longer than the raw one, but codecs may need more space while they work.
        bound = probe.bound if self._context.codec is None else self._context.codec.bound
        coded_bytes = round_up(
            bytes_of(blocks) + max(bound(block.nbytes) - block.nbytes for block in blocks) + ALIGNMENT
        )
        # Raw bytes that are not staged are read here, or copied before they are read a second time: they may change.
        copy_bytes = 0 if staged else round_up(max(block.nbytes for block in blocks))
        other_bytes = copy_bytes + self._scratch_bytes(blocks)
        # One buffer, or two for an upload, which needs the first one for longer.
        apart = self._storage.writes_in_order and other_bytes > 0
        memory = self._context.pool.acquire(coded_bytes + (0 if apart else other_bytes))
        with staged or nullcontext(), memory as buffer, ExitStack() as stack:
            rest = buffer[coded_bytes:]
            if apart:
                rest = stack.enter_context(self._context.pool.acquire(other_bytes))
            out, copy_buffer, scratch = buffer[:coded_bytes], rest[:copy_bytes], rest[copy_bytes:other_bytes]
            raw: Iterable[tuple[Bytes, Bytes | None]]
            if staged:
                raw = ((staged.array[place], None) for _, place in slices_of(blocks))
            else:
                raw = (readable(block, copy_buffer) for block in blocks)
            used = self._code(blocks, raw, out, scratch, padded=not (is_last or self._storage.writes_in_order))
            # A task takes its offset when the task before it has taken its own: the file has no gaps.
            with self._order.turn(number):
                offset = self._end
                self._end += used
            if is_last:
                self.size = self._end
            self._put(
                offset, buffer[: used if self._storage.writes_in_order else round_up(used)], memory, bytes_of(blocks)
            )

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        return 0

    def _code(
        self,
        blocks: list[Block],
        raw_of: Iterable[tuple[Bytes, Bytes | None]],
        out: Bytes,
        scratch: Bytes,
        *,
        padded: bool,
    ) -> int:
        """Code a task's blocks to the front of ``out``; return the bytes used: whole pages if they are padded."""
        coded: list[tuple[Block, EncodedBlock, int]] = []
        used = 0
        for block, (raw, copy_buffer) in zip(blocks, raw_of, strict=True):
            # Beside training, coding leaves processors to the training.
            with self._context.pace.coding():
                stored = self._store(block, raw, copy_buffer, out[used:], scratch)
            if stored is not None:
                coded.append((block, stored, used))
                used += stored.length
        # Padded on a disk, so that a direct write takes the bytes from the buffer that they were encoded into.
        end = round_up(used) if padded else used
        # The buffer holds older data: the padding must be zeros, which decoders check.
        out[used : round_up(used)] = 0
        stops = [start for *_, start in coded[1:]] + [end]
        for (block, stored, start), stop in zip(coded, stops, strict=False):
            self.records[block.key] = BlockRecord(
                stored.codec, stop - start, stored.raw_digest, digest(out[start:stop])
            )
        return end

    def _store(
        self, block: Block, raw: Bytes, copy_buffer: Bytes | None, out: Bytes, scratch: Bytes
    ) -> EncodedBlock | None:
        """Code one block to the front of ``out``, None if another file has it; copy ``raw`` first if it may change."""
        return encode_and_hash(block, raw, copy_buffer, self._context.codec, out, wide=self._context.wide)
