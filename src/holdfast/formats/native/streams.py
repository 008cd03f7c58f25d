"""Writing the byte stream of one data file from many threads: raw, or coded.

Raw: every offset is known beforehand. Coded: the sizes of blocks are known only after coding, so each task takes its
offset when the task before it has taken its own, and room for the header is kept at the front and filled last.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import xxhash

from holdfast.codecs import probe
from holdfast.codecs.base import Codec
from holdfast.formats.native.manifest import BlockRecord
from holdfast.formats.native.pack import Block, FilePlan
from holdfast.formats.sealed import digest
from holdfast.io.buffers import ALIGNMENT, BufferPool, aligned_copy, round_down, round_up
from holdfast.io.files import Bytes, DirectFile
from holdfast.io.parallel import Cancellation, Meter

_HASH_BYTES = 1024**2
"""Bytes that are hashed right after they were copied, while they are still in the core's cache."""


class Stream(ABC):
    """One data file that is being written.

    Parameters
    ----------
    path : Path
    plan : FilePlan
    groups : list of list of Block
        The tasks.
    room : int
        Bytes kept for the header, a multiple of 4096.
    pool : BufferPool
    meter : Meter
    direct : bool
        Whether to go around the page cache where the file system allows it.

    Attributes
    ----------
    records : dict of (str, int) to BlockRecord
        By key and index, the blocks that are written.
    size : int
        Bytes of the file, once all tasks have run.
    direct : bool
        Whether the page cache was bypassed, once it is finished.
    """

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        groups: list[list[Block]],
        room: int,
        pool: BufferPool,
        meter: Meter,
        *,
        direct: bool = True,
    ) -> None:
        self.plan = plan
        self.records: dict[tuple[str, int], BlockRecord] = {}
        self.size = room + plan.raw_bytes
        self.direct = True
        self._groups = groups
        self._room = room
        self._pool = pool
        self._meter = meter
        self._file = DirectFile(path, direct=direct)

    @abstractmethod
    def task(self, number: int) -> None:
        """Write the blocks of a task; tasks start in order and each runs once."""

    def finish(self, header: bytes) -> None:
        """Write the header, cut the file to size and make it durable."""
        self._file.write(0, aligned_copy(header))
        self.direct = self._file.direct
        self._file.finish(self.size)

    def abort(self) -> None:
        """Close the file, whatever its state."""
        self._file.close()


class RawStream(Stream):
    """A data file whose leaves lie in it as they are."""

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        groups: list[list[Block]],
        room: int,
        pool: BufferPool,
        meter: Meter,
        *,
        direct: bool = True,
    ) -> None:
        super().__init__(path, plan, groups, room, pool, meter, direct=direct)
        self._edges = _SharedPages(self.size)
        self._file.preallocate(self.size)

    def task(self, number: int) -> None:
        """Write the task's blocks, but for the pages that it shares with others and that are not complete yet."""
        blocks = self._groups[number]
        begin, end = self._offset(blocks[0]), self._offset(blocks[-1]) + blocks[-1].nbytes
        first = round_down(begin)
        with self._pool.acquire(round_up(end) - first) as buffer:
            for block in blocks:
                at = self._offset(block) - first
                record = copy_and_hash(block, buffer[at : at + block.nbytes])
                self.records[block.leaf.key, block.index] = record
            low, high = self._edges.settle(begin, end, buffer)
            self._file.write(low, buffer[low - first : high - first])
        self._meter.add(end - begin)

    def _offset(self, block: Block) -> int:
        return self._room + block.leaf.start + block.start


class _SharedPages:
    """The pages in which one task ends and another begins: whoever completes one writes it.

    A direct write covers whole pages, and two that cover one page would undo each other.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: dict[int, tuple[Bytes, int]] = {}
        self._lock = threading.Lock()

    def settle(self, begin: int, end: int, buffer: Bytes) -> tuple[int, int]:
        """Return the range of the file to write from a buffer that begins with the page of ``begin``.

        Pages at either end that others have bytes of are completed in the buffer, or else kept here and left out.
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
        """Add bytes ``start:stop`` of a page; when that completes it, put the whole page into ``own``."""
        with self._lock:
            content, count = self._pages.get(page) or (np.zeros(ALIGNMENT, np.uint8), 0)
            content[start - page : stop - page] = own[start - page : stop - page]
            count += stop - start
            self._pages[page] = (content, count)
            if page + count < min(page + ALIGNMENT, self._size):
                return False
            own[:] = content
            return True


class CodedStream(Stream):
    """A data file whose leaves are coded block by block.

    A task's bytes are padded to whole pages, at the end of its last block, so that each block is written from where
    it was coded.
    """

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        groups: list[list[Block]],
        room: int,
        pool: BufferPool,
        meter: Meter,
        codec: Codec | None,
        cancellation: Cancellation,
        *,
        direct: bool = True,
    ) -> None:
        super().__init__(path, plan, groups, room, pool, meter, direct=direct)
        self._codec = codec
        self._turns = _Turns(room, cancellation)

    def task(self, number: int) -> None:
        blocks = self._groups[number]
        raw_bytes = sum(block.nbytes for block in blocks)
        staging = max((block.nbytes for block in blocks if block.leaf.source.host_bytes() is None), default=0)
        # A coded block is never longer than the raw one, but coders may use room beyond while they work.
        room = raw_bytes + max(_slack(block.nbytes, self._codec) for block in blocks)
        with self._pool.acquire(round_up(room) + round_up(staging)) as buffer:
            out, raw = buffer[: round_up(room)], buffer[round_up(room) :]
            used = self._code(blocks, out, raw, last=number == len(self._groups) - 1)
            self._file.write(self._turns.take(number, used), out[: round_up(used)])
            if number == len(self._groups) - 1:
                self.size = self._turns.end
        self._meter.add(raw_bytes)

    def _code(self, blocks: list[Block], out: Bytes, staging: Bytes, *, last: bool) -> int:
        used = 0
        for position, block in enumerate(blocks):
            raw = raw_bytes(block, staging)
            name, length = _encode(raw, block, self._codec, out[used:])
            end = used + length
            if position == len(blocks) - 1:
                out[end : round_up(end)] = 0
                end = end if last else round_up(end)
            self.records[block.leaf.key, block.index] = BlockRecord(
                name, end - used, digest(raw), digest(out[used:end])
            )
            used = end
        return used


class _Turns:
    """Hands out offsets in the order of the tasks, whichever is coded first."""

    def __init__(self, start: int, cancellation: Cancellation) -> None:
        self.end = start
        self._next = 0
        self._changed = threading.Condition()
        self._cancellation = cancellation

    def take(self, number: int, length: int) -> int:
        with self._changed:
            while self._next != number:
                self._cancellation.check()
                self._changed.wait(timeout=0.1)
            offset = self.end
            self.end += length
            self._next += 1
            self._changed.notify_all()
        return offset


def copy_and_hash(block: Block, out: Bytes) -> BlockRecord:
    """Put a block's raw bytes into ``out`` and return its record."""
    raw = block.leaf.source.host_bytes()
    if raw is None:
        block.leaf.source.read(block.start, block.stop, out)
        return BlockRecord("raw", block.nbytes, digest(out))
    hasher = xxhash.xxh3_64()
    for at in range(0, block.nbytes, _HASH_BYTES):
        piece = out[at : at + _HASH_BYTES]
        np.copyto(piece, raw[block.start + at : block.start + at + len(piece)])
        hasher.update(piece)
    return BlockRecord("raw", block.nbytes, hasher.hexdigest())


def raw_bytes(block: Block, staging: Bytes) -> Bytes:
    """Return a block's raw bytes: where they lie, or read into ``staging``."""
    raw = block.leaf.source.host_bytes()
    if raw is not None:
        return raw[block.start : block.stop]
    block.leaf.source.read(block.start, block.stop, staging[: block.nbytes])
    return staging[: block.nbytes]


def _slack(nbytes: int, codec: Codec | None) -> int:
    return (probe.bound(nbytes) if codec is None else codec.bound(nbytes)) - nbytes + ALIGNMENT


def _encode(raw: Bytes, block: Block, codec: Codec | None, out: Bytes) -> tuple[str, int]:
    if codec is None:
        return probe.encode(raw, block.leaf.source.dtype, out)
    length = codec.encode(raw, block.leaf.source.dtype, out)
    if length < len(raw):
        return codec.name, length
    out[: len(raw)] = raw
    return "raw", len(raw)
