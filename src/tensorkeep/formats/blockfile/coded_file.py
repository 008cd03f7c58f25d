"""Data files of coded tensors: the size of a block is known only after coding.

Each task takes its offset when the task before it has taken its own. Space for the header is reserved at the front, and
the header is written last. An object of a store is written from front to back, and so has no header.
"""

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.codecs.base import Codec, Reading
from tensorkeep.formats.blockfile.data_file import DataFile, WriteContext
from tensorkeep.formats.blockfile.gather import HashedReading, bytes_of, slices_of
from tensorkeep.formats.blockfile.notes import Description, describe_longest
from tensorkeep.formats.blockfile.plan import Block, BlockRecord, FilePlan
from tensorkeep.formats.sealed import digest
from tensorkeep.io.buffers import ALIGNMENT, Buffer, round_up
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Order


class CodedDataFile(DataFile):
    """A data file whose tensors are coded block by block.

    A task's bytes are padded to whole pages at the end of its last block, so that they are written from the buffer
    that they were encoded into; not in a store.
    """

    header_comes_first = False

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext, *, prefix: str = "") -> None:
        super().__init__(directory, plan, context, prefix=prefix)
        self._order = Order(context.cancellation)
        self._end = self.header_size

    def _longest_description(self) -> Description:
        return describe_longest(self.plan)

    def _write(self, number: int, staged: Buffer | None) -> None:
        blocks = self.tasks[number]
        is_last = number == len(self.tasks) - 1
        # A stored block is never longer than the raw one, but codecs may need more space while they work.
        coded_bytes = round_up(bytes_of(blocks) + max(_slack(block.nbytes, self._context.codec) for block in blocks))
        # Raw bytes that are not staged are gathered, or copied before they are read a second time: they may change.
        aside_bytes = 0 if staged else round_up(max(block.nbytes for block in blocks))
        other_bytes = aside_bytes + self._scratch_bytes(blocks)
        # One buffer, or two for an upload, which needs the first one for longer.
        apart = self.in_store and other_bytes > 0
        memory = self._context.pool.acquire(coded_bytes + (0 if apart else other_bytes))
        with staged or nullcontext(), memory as buffer, ExitStack() as stack:
            rest = buffer[coded_bytes:]
            if apart:
                rest = stack.enter_context(self._context.pool.acquire(other_bytes))
            out, aside, scratch = buffer[:coded_bytes], rest[:aside_bytes], rest[aside_bytes:other_bytes]
            raw: Iterable[tuple[Bytes, Bytes | None]]
            if staged:
                raw = ((staged.array[place], None) for _, place in slices_of(blocks))
            else:
                raw = (readable(block, aside) for block in blocks)
            used = self._code(blocks, raw, out, scratch, padded=not (is_last or self.in_store))
            with self._order.turn(number):
                offset = self._end
                self._end += used
            if is_last:
                self.size = self._end
            self._put(offset, buffer[: used if self.in_store else round_up(used)], memory, bytes_of(blocks))

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        """Return the memory that `_store` needs for any of these blocks, besides its output."""
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
        coded: list[tuple[Block, str, str, int]] = []
        used = 0
        for block, (raw, aside) in zip(blocks, raw_of, strict=True):
            with self._context.pace.coding():
                stored = self._store(block, raw, aside, out[used:], scratch)
            if stored is not None:
                raw_digest, codec, length = stored
                coded.append((block, raw_digest, codec, used))
                used += length
        end = round_up(used) if padded else used
        out[used : round_up(used)] = 0
        stops = [start for *_, start in coded[1:]] + [end]
        for (block, raw_digest, codec, start), stop in zip(coded, stops, strict=False):
            self.records[block.key] = BlockRecord(codec, stop - start, raw_digest, digest(out[start:stop]))
        return end

    def _store(
        self, block: Block, raw: Bytes, aside: Bytes | None, out: Bytes, scratch: Bytes
    ) -> tuple[str, str, int] | None:
        """Code one block to the front of ``out``; return the digest of its raw bytes, the codec and the stored length.

        ``aside`` is memory for a copy of ``raw``, which others may change, or None if nothing changes it. The result is
        None for a block that is not stored in this file.
        """
        return encode_and_hash(block, raw, aside, self._context.codec, out, wide=self._context.wide)


def readable(block: Block, aside: Bytes) -> tuple[Bytes, Bytes | None]:
    """Return a block's raw bytes, and memory for a copy of them: None if they were gathered, to ``aside``, now."""
    raw = block.leaf.source.host_bytes()
    if raw is not None:
        return raw[block.start : block.stop], aside
    block.leaf.source.read(block.start, block.stop, aside[: block.nbytes])
    return aside[: block.nbytes], None


def _slack(nbytes: int, codec: Codec | None) -> int:
    return (probe.bound(nbytes) if codec is None else codec.bound(nbytes)) - nbytes + ALIGNMENT


def encode_and_hash(
    block: Block, raw: Bytes, aside: Bytes | None, codec: Codec | None, out: Bytes, *, wide: bool
) -> tuple[str, str, int]:
    """Code a block to the front of ``out``, by the codec that the probe chooses if ``codec`` is None.

    ``aside`` is memory for a copy of ``raw``, or None if nothing changes it. Return the digest of the raw bytes, the
    codec's name and the stored length.
    """
    reading = HashedReading(aside, wide=wide)
    name, length = encode(raw, block, codec, out, reading)
    return digest(out[:length], wide=wide) if name == "raw" else reading.hexdigest(), name, length


def encode(
    raw: Bytes, block: Block, codec: Codec | None, out: Bytes, reading: Reading | None = None
) -> tuple[str, int]:
    """Code a block with a codec, or with the one that the probe chooses; store it raw if that is not longer.

    What is stored raw is not hashed by ``reading``. Return the codec's name, and the bytes at the front of ``out``.
    """
    dtype = block.leaf.source.dtype
    if codec is None:
        return probe.encode(raw, dtype, out, reading)
    if codec.name != "raw":
        length = codec.encode(reading.read(raw) if reading else raw, dtype, out)
        if length < len(raw):
            return codec.name, length
    np.copyto(out[: len(raw)], raw)
    return "raw", len(raw)
