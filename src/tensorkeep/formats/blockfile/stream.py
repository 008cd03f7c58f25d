"""Writing the byte stream of one data file from many threads: raw, or coded.

Raw: every offset is known beforehand. Coded: the sizes of blocks are known only after coding, so each task takes its
offset when the task before it has taken its own, and room for the header is kept at the front and filled last.

A task reads its blocks from the state, or takes a copy of them that was staged before, for a save that goes on while
the state changes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.codecs.base import Codec
from tensorkeep.formats.blockfile.plan import Block, FilePlan
from tensorkeep.formats.blockfile.records import BlockRecord
from tensorkeep.formats.sealed import digest, new_hasher
from tensorkeep.io.buffers import ALIGNMENT, Buffer, BufferPool, aligned_copy, round_down, round_up
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.io.parallel import Cancellation, Meter, Order
from tensorkeep.state.cuda import side_stream

_HASH_BYTES = 1024**2
"""Bytes that are hashed right after they were copied, while they are still in the core's cache."""


@dataclass(frozen=True, slots=True)
class How:
    """How streams are written: what those of one save share.

    Attributes
    ----------
    pool : BufferPool
    meter : Meter
    cancellation : Cancellation
    direct : bool
        Whether to go around the page cache where the file system allows it.
    wide : bool
        Whether the checksums of raw blocks have 128 bits.
    codec : Codec or None
        What every block is coded by; None lets a probe choose.
    """

    pool: BufferPool
    meter: Meter
    cancellation: Cancellation
    direct: bool = True
    wide: bool = False
    codec: Codec | None = None


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
    how : How

    Attributes
    ----------
    records : dict of (str, int) to BlockRecord
        By key and index, the blocks that are written.
    size : int
        Bytes of the file, once all tasks have run.
    direct : bool
        Whether the page cache was bypassed, once it is finished.
    """

    def __init__(self, path: Path, plan: FilePlan, groups: list[list[Block]], room: int, how: How) -> None:
        self.plan = plan
        self.records: dict[tuple[str, int], BlockRecord] = {}
        self.size = room + plan.raw_bytes
        self.direct = True
        self._groups = groups
        self._room = room
        self._how = how
        self._file = DirectFile(path, direct=how.direct)

    @abstractmethod
    def task(self, number: int, staged: Buffer | None = None) -> None:
        """Write the blocks of a task; tasks start in order and each runs once.

        Parameters
        ----------
        number : int
        staged : Buffer, optional
            The task's bytes, as `stage` laid them out, to be written instead of what lies in the state by now; given
            back here.
        """

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

    def __init__(self, path: Path, plan: FilePlan, groups: list[list[Block]], room: int, how: How) -> None:
        super().__init__(path, plan, groups, room, how)
        self._edges = _SharedPages(self.size)
        self._file.preallocate(self.size)

    def task(self, number: int, staged: Buffer | None = None) -> None:
        """Write the task's blocks, but for the pages that it shares with others and that are not complete yet."""
        blocks = self._groups[number]
        begin = self._room + blocks[0].leaf.start + blocks[0].start
        end = begin + bytes_of(blocks)
        first = round_down(begin)
        with staged or self._how.pool.acquire(staging_bytes(blocks)) as buffer:
            for block, place in places(blocks):
                hasher = new_hasher(wide=self._how.wide)
                if staged:
                    hasher.update(buffer[place])
                else:
                    copy_and_hash(block, buffer[place], hasher)
                self.records[block.leaf.key, block.index] = BlockRecord("raw", block.nbytes, hasher.hexdigest())
            low, high = self._edges.settle(begin, end, buffer)
            self._file.write(low, buffer[low - first : high - first])
        self._how.meter.add(end - begin)


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

    def __init__(self, path: Path, plan: FilePlan, groups: list[list[Block]], room: int, how: How) -> None:
        super().__init__(path, plan, groups, room, how)
        self._order = Order(how.cancellation)
        self._end = room

    def task(self, number: int, staged: Buffer | None = None) -> None:
        blocks = self._groups[number]
        gathering = 0 if staged else max((b.nbytes for b in blocks if b.leaf.source.host_bytes() is None), default=0)
        # A coded block is never longer than the raw one, but coders may use room beyond while they work.
        room = round_up(bytes_of(blocks) + max(_slack(block.nbytes, self._how.codec) for block in blocks))
        sizes = room, round_up(gathering), self._scratch_bytes(blocks)
        with staged or nullcontext(), self._how.pool.acquire(sum(sizes)) as buffer:
            out, gathered, scratch = np.split(buffer[: sum(sizes)], np.cumsum(sizes[:-1]))
            raw = _staged(blocks, staged.array) if staged else (raw_bytes(block, gathered) for block in blocks)
            used = self._code(blocks, raw, out, scratch, last=number == len(self._groups) - 1)
            with self._order.turn(number):
                offset = self._end
                self._end += used
            self._file.write(offset, buffer[: round_up(used)])
            if number == len(self._groups) - 1:
                self.size = self._end
        self._how.meter.add(bytes_of(blocks))

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        """Return the memory that `_store` takes for any of these blocks, besides its room."""
        return 0

    def _code(self, blocks: list[Block], raw_of: Iterable[Bytes], out: Bytes, scratch: Bytes, *, last: bool) -> int:
        """Code a task's blocks to the front of ``out``; return the bytes used, whole pages unless it is the last."""
        coded: list[_Coded] = []
        used = 0
        for block, raw in zip(blocks, raw_of, strict=True):
            stored = self._store(block, raw, out[used:], scratch)
            if stored is not None:
                raw_digest, codec, length = stored
                coded.append(_Coded(block, raw_digest, codec, used, used + length))
                used += length
        end = used if last else round_up(used)
        out[used : round_up(used)] = 0
        for position, found in enumerate(coded):
            stop = end if position == len(coded) - 1 else found.stop
            self.records[found.block.leaf.key, found.block.index] = BlockRecord(
                found.codec, stop - found.start, found.raw, digest(out[found.start : stop])
            )
        return end

    def _store(self, block: Block, raw: Bytes, out: Bytes, scratch: Bytes) -> tuple[str, str, int] | None:
        """Code one block to the front of ``out``; return the raw bytes' digest, the codec and the length.

        None for a block that needs no room in this file.
        """
        name, length = encode(raw, block, self._how.codec, out)
        return _raw_digest(raw, wide=self._how.wide), name, length


@dataclass(frozen=True, slots=True)
class _Coded:
    """A block that was coded, and where in the buffer."""

    block: Block
    raw: str
    codec: str
    start: int
    stop: int


def places(blocks: list[Block]) -> Iterator[tuple[Block, slice]]:
    """Yield where each block of a task lies in a buffer that holds the task's bytes as the file's pages do."""
    at = (blocks[0].leaf.start + blocks[0].start) % ALIGNMENT
    for block in blocks:
        yield block, slice(at, at + block.nbytes)
        at += block.nbytes


def bytes_of(blocks: list[Block]) -> int:
    """Return the raw bytes of a task's blocks."""
    return sum(block.nbytes for block in blocks)


def staging_bytes(blocks: list[Block]) -> int:
    """Return the bytes of a buffer that takes a task's blocks, with the whole pages at either end."""
    return round_up((blocks[0].leaf.start + blocks[0].start) % ALIGNMENT + bytes_of(blocks))


def stage(blocks: list[Block], buffer: Bytes) -> None:
    """Copy a task's blocks out of the state, into a buffer of `staging_bytes`."""
    for block, place in places(blocks):
        raw = block.leaf.source.host_bytes()
        if raw is None:
            with side_stream(block.leaf.source):
                block.leaf.source.read(block.start, block.stop, buffer[place])
        else:
            np.copyto(buffer[place], raw[block.start : block.stop])


def _staged(blocks: list[Block], buffer: Bytes) -> Iterator[Bytes]:
    return (buffer[place] for _, place in places(blocks))


def copy_and_hash(block: Block, out: Bytes, hasher: Any) -> None:
    """Put a block's raw bytes into ``out`` and into a hasher."""
    raw = block.leaf.source.host_bytes()
    if raw is None:
        block.leaf.source.read(block.start, block.stop, out)
        hasher.update(out)
        return
    for at in range(0, block.nbytes, _HASH_BYTES):
        piece = out[at : at + _HASH_BYTES]
        np.copyto(piece, raw[block.start + at : block.start + at + len(piece)])
        hasher.update(piece)


def raw_bytes(block: Block, staging: Bytes) -> Bytes:
    """Return a block's raw bytes: where they lie, or read into ``staging``."""
    raw = block.leaf.source.host_bytes()
    if raw is not None:
        return raw[block.start : block.stop]
    block.leaf.source.read(block.start, block.stop, staging[: block.nbytes])
    return staging[: block.nbytes]


def _slack(nbytes: int, codec: Codec | None) -> int:
    return (probe.bound(nbytes) if codec is None else codec.bound(nbytes)) - nbytes + ALIGNMENT


def _raw_digest(raw: Bytes, *, wide: bool) -> str:
    hasher = new_hasher(wide=wide)
    hasher.update(raw)
    return str(hasher.hexdigest())


def encode(raw: Bytes, block: Block, codec: Codec | None, out: Bytes) -> tuple[str, int]:
    """Code a block by a codec, or by the one that the probe chooses; raw if that is not longer.

    Returns
    -------
    tuple of str and int
        The codec's name, and the bytes at the front of ``out``.
    """
    if codec is None:
        return probe.encode(raw, block.leaf.source.dtype, out)
    length = codec.encode(raw, block.leaf.source.dtype, out)
    if length < len(raw) or codec.name == "raw":
        return codec.name, length
    out[: len(raw)] = raw
    return "raw", len(raw)
