"""Reading tensors that are stored as blocks: raw, compressed, or as differences; with or without checksums."""

from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate

import msgspec
import numpy as np

from tensorkeep.codecs.base import CODECS, Codec, CodecError
from tensorkeep.codecs.planes import PlanesCodec
from tensorkeep.errors import BLOCK_CHANGED, CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES, Reader, StoredLeaf
from tensorkeep.formats.checksummed_json import digest, is_wide, new_hasher
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.buffers import ALIGNMENT, BufferPool, round_up

# Bytes that are hashed right after they were read, while they are still in the core's cache.
_HASH_BYTES = 1024**2

# Smaller reads go through the page cache: its read-ahead loads the neighbours as well.
_SMALL_BYTES = 1024**2

# The most blocks that one read covers.
_MOST_IN_RUN = 128

# Blocks of an object that are at most so far apart are read by one request, with the bytes between them.
_GAP_BYTES = 64 * 1024

_NO_BYTES = np.empty(0, np.uint8)


class StoredBlock(msgspec.Struct, frozen=True):
    """One block: its stored bytes in a file, and the expected checksums, empty if unknown."""

    file: SourceFile
    codec: str
    offset: int
    length: int
    raw: str = ""
    stored: str = ""
    # Of a difference: its raw bytes are the XOR of the decoded block and all decoded bases.
    bases: "tuple[StoredBlock, ...]" = ()


class StoredTensor(msgspec.Struct, frozen=True):
    """A stored tensor or box. Its first block is in ``file``; ``starts`` are the first raw bytes of its blocks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    file: SourceFile
    starts: Sequence[int]
    blocks: tuple[StoredBlock, ...]

    def mapped(self) -> Bytes | None:
        """Return its bytes over the mapped file; None unless they are stored there raw, in order and without gaps."""
        at = start = self.blocks[0].offset if self.blocks else 0
        for block in self.blocks:
            if block.file is not self.file or block.codec != "raw" or block.bases or block.offset != at:
                return None
            at += block.length
        return self.file.map_private()[start:at] if at - start == self.nbytes else None

    def leaf(self, reader: Reader) -> StoredLeaf:
        return StoredLeaf(
            reader,
            self.name,
            self.dtype,
            self.shape,
            stored_bytes=sum([block.length for block in self.blocks]),
            codec="+".join(dict.fromkeys(block.codec for block in self.blocks)) or "raw",
            file=self.file.path.name,
        )


def lay_out(file: SourceFile, offset: int, blocks: list[tuple[str, int]]) -> tuple[StoredBlock, ...]:
    """Return blocks, given as (codec, length), that follow one another from an offset; without checksums."""
    starts = accumulate((length for _, length in blocks), initial=offset)
    return tuple(
        StoredBlock(file, codec, start, length) for start, (codec, length) in zip(starts, blocks, strict=False)
    )


def read_ahead(ranges: Sequence[tuple[StoredTensor, int, int]]) -> AbstractContextManager[object]:
    """Return a context for reading these ranges in this thread: one request fetches neighbours in an object."""
    # A disk has its own read-ahead; only requests to a store are worth joining.
    if not ranges or not ranges[0][0].file.ranges_are_requests:
        return nullcontext()
    places: dict[SourceFile, list[tuple[int, int]]] = {}
    for tensor, start, stop in ranges:
        for block in tensor.blocks[bisect(tensor.starts, start) - 1 : bisect_left(tensor.starts, stop)]:
            places.setdefault(block.file, []).append((block.offset, block.offset + block.length))
    # If a later request fails, the exit stack ends the earlier prefetches.
    with ExitStack() as stack:
        for file, found in places.items():
            stack.enter_context(file.prefetch(_joined(found)))
        return stack.pop_all()


def _joined(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


class BlockReader:
    """Reads and verifies ranges of stored tensors, from any thread."""

    def __init__(self, pool: BufferPool, *, verify: bool) -> None:
        self._pool = pool
        self._verify = verify

    def read(self, tensor: StoredTensor, start: int, stop: int, out: Bytes) -> None:
        """Fill ``out`` with the raw bytes ``start:stop``; CorruptCheckpointError with file, tensor and block."""
        done = start
        while done < stop:
            index = bisect(tensor.starts, done) - 1
            begin = tensor.starts[index]
            skip = done - begin
            size = (tensor.starts[index + 1] if index + 1 < len(tensor.blocks) else tensor.nbytes) - begin
            count = min(size - skip, stop - done)
            target = out[done - start : done - start + count]
            block = tensor.blocks[index]
            whole, coded = count == size, _is_coded(block, size)
            # A whole block is read or decoded straight into its destination.
            if whole and not coded:
                count = self._read_run(tensor, index, stop - done, out[done - start : stop - start])
            # Nothing to verify: only the wanted bytes are read. Otherwise the checksum needs the whole block.
            elif not (coded or (self._verify and block.raw)):
                block.file.read_into(block.offset + skip, target)
            else:
                # One acquire for all buffers of the block, to avoid deadlocks: see `tensorkeep.storage.buffers`.
                full_bytes = 0 if whole else round_up(size)
                needed = full_bytes + (scratch_bytes(block, size) if coded else 0)
                with self._pool.acquire(needed) as scratch:
                    self._read_block(tensor, index, target if whole else scratch[:size], scratch[full_bytes:])
                    if not whole:
                        target[:] = scratch[skip : skip + count]
            done += count

    def _read_run(self, tensor: StoredTensor, first: int, most: int, out: Bytes) -> int:
        """Read a raw block and raw blocks that follow it, at most ``most`` bytes; return the count of bytes."""
        # The blocks that many ranks write are much smaller than a disk's fastest reads.
        ends = [*tensor.starts[first + 1 : first + 1 + _MOST_IN_RUN], tensor.nbytes]
        # A run ends where blocks are not adjacent in the file, at a coded block, and at the size of a large read.
        begin = at = tensor.starts[first]
        run: list[tuple[StoredBlock, int]] = []
        for block, end in zip(tensor.blocks[first : first + _MOST_IN_RUN], ends, strict=False):
            follows = not run or (block.file is run[0][0].file and block.offset == run[0][0].offset + at - begin)
            fits = end - begin <= min(most, BLOCK_BYTES) or not run
            if not (follows and fits) or _is_coded(block, end - at):
                break
            run.append((block, end - at))
            at = end
        file, offset, count = run[0][0].file, run[0][0].offset, at - begin
        direct = count >= _SMALL_BYTES and file.bypasses_cache(offset, count)
        with self._pool.acquire(_with_pages(count)) if direct else nullcontext(_NO_BYTES) as scratch:
            data = file.fetch(offset, count, scratch) if direct else None
            at = 0
            for index, (block, size) in enumerate(run, first):
                with _named(tensor, index):
                    piece = None if data is None else data[at : at + size]
                    self._check(block, self._read_raw(block, out[at : at + size], piece))
                at += size
        return count

    def _read_block(self, tensor: StoredTensor, index: int, out: Bytes, scratch: Bytes) -> None:
        block = tensor.blocks[index]
        with _named(tensor, index):
            if _is_coded(block, len(out)):
                hasher = new_hasher(wide=is_wide(block.raw)) if self._verify and block.raw else None
                self.decode(block, tensor.dtype, out, scratch, hasher and hasher.update)
                self._check(block, hasher.hexdigest() if hasher else "")
            else:
                # A range of an object is one request: then one for the block, not one for every `_HASH_BYTES`.
                at_once = block.file.ranges_are_requests
                data = block.file.fetch(block.offset, block.length, scratch) if at_once else None
                self._check(block, self._read_raw(block, out, data))

    def _check(self, block: StoredBlock, found: str) -> None:
        if self._verify and block.raw and found != block.raw:
            raise CorruptCheckpointError(f"its checksum is {found}, not {block.raw}", path=block.file.path)

    def _read_raw(self, block: StoredBlock, out: Bytes, data: Bytes | None) -> str:
        """Fill ``out`` with a raw block, from ``data`` if that was read already; return the checksum."""
        if block.length != len(out):
            raise CorruptCheckpointError(f"{len(out):,} raw bytes are stored in {block.length:,}")
        # One pass: each piece is hashed while it is still in the cache.
        hasher = new_hasher(wide=is_wide(block.raw)) if self._verify and block.raw else None
        for at in range(0, len(out), _HASH_BYTES):
            piece = out[at : at + _HASH_BYTES]
            if data is None:
                block.file.read_into(block.offset + at, piece)
            else:
                np.copyto(piece, data[at : at + len(piece)])
            if hasher:
                hasher.update(piece)
        return hasher.hexdigest() if hasher else ""

    def decode(
        self,
        block: StoredBlock,
        dtype: DType,
        out: Bytes,
        scratch: Bytes,
        done: Callable[[Bytes], object] | None = None,
    ) -> None:
        """Fill ``out`` with a block's raw bytes, without comparing their checksum.

        ``scratch`` has at least the `scratch_bytes` of the block. ``done`` is called with the raw bytes piece by piece.
        Raises CorruptCheckpointError with the file.
        """
        # From the oldest base, which is stored in full, to the block: each layer is XORed into ``out``.
        layer, rest = (scratch[: len(out)], scratch[round_up(len(out)) :]) if block.bases else (out, scratch)
        below: StoredBlock | None = None
        for part in (*reversed(block.bases), block):
            # A base that is stored raw has no checksum of its stored bytes.
            if self._verify and below and below.raw and not below.stored and digest_as(below.raw, out) != below.raw:
                raise CorruptCheckpointError("the checksum of its base block is wrong", path=below.file.path)
            codec = _codec(part)
            stored = part.file.fetch(part.offset, part.length, rest)
            # The checksum comes first, so that damage is reported as damage and not as an error of the codec.
            if self._verify and part.stored and digest_as(part.stored, stored) != part.stored:
                raise CorruptCheckpointError("the checksum of its stored bytes is wrong", path=part.file.path)
            finished = done if part is block else None
            try:
                if isinstance(codec, PlanesCodec):
                    # This codec XORs while it decodes, so the layer is not written to memory and read again.
                    codec.decode(stored, dtype, out, done=finished, xor=below is not None)
                else:
                    codec.decode(stored, dtype, layer if below else out)
                    if below:
                        np.bitwise_xor(out, layer, out=out)
                    if finished:
                        finished(out)
            except CodecError as error:
                raise CorruptCheckpointError(f"cannot be decoded ({error})", path=part.file.path) from error
            below = part


@contextmanager
def _named(tensor: StoredTensor, index: int) -> Iterator[None]:
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            error.message,
            path=error.path or tensor.blocks[index].file.path,
            name=tensor.name,
            block=index,
            remedy=BLOCK_CHANGED,
        ) from error


def scratch_bytes(block: StoredBlock, raw_bytes: int) -> int:
    # The layers are decoded one after another into the same memory.
    stored = max(_with_pages(part.length) for part in (block, *block.bases))
    return stored + (round_up(raw_bytes) if block.bases else 0)


def digest_as(expected: str, data: Bytes) -> str:
    return digest(data, wide=is_wide(expected))


def _with_pages(nbytes: int) -> int:
    # A direct read covers whole pages; the bytes may begin and end anywhere in them.
    return round_up(nbytes) + 2 * ALIGNMENT


def _is_coded(block: StoredBlock, raw_bytes: int) -> bool:
    # A longer raw block is padded.
    return block.codec != "raw" or block.length > raw_bytes or bool(block.bases)


def _codec(block: StoredBlock) -> Codec:
    try:
        return CODECS.get(block.codec)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"holds blocks of codec {block.codec!r}, which is not installed",
            path=block.file.path,
            remedy="install the package that provides it, or a later Tensorkeep",
        ) from error
