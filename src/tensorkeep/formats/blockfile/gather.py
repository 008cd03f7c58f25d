"""Copying and hashing the raw bytes of a task's blocks."""

from collections.abc import Iterator

import numpy as np

from tensorkeep.formats.blockfile.plan import Block
from tensorkeep.formats.sealed import Hasher, digest, new_hasher
from tensorkeep.io.buffers import ALIGNMENT, round_up
from tensorkeep.io.files import Bytes
from tensorkeep.state.cuda import side_stream

_HASH_BYTES = 1024**2
"""Bytes that are hashed right after they were copied, while they are still in the core's cache."""


def slices_of(blocks: list[Block]) -> Iterator[tuple[Block, slice]]:
    """Yield each block's place in a buffer that holds a task's bytes with the alignment that they have in the file."""
    at = (blocks[0].leaf.start + blocks[0].start) % ALIGNMENT
    for block in blocks:
        yield block, slice(at, at + block.nbytes)
        at += block.nbytes


def bytes_of(blocks: list[Block]) -> int:
    """Return the raw bytes of a task's blocks."""
    return sum(block.nbytes for block in blocks)


def staging_bytes(blocks: list[Block]) -> int:
    """Return the size of a buffer that holds a task's blocks, with the whole pages at either end."""
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


class HashedReading:
    """Reads the raw bytes of a block once and hashes them; see `tensorkeep.codecs.base.Reading`.

    So what is hashed is what is coded even if the state changes. ``aside`` is memory for a copy of the block, which
    others may change; None if nothing changes it.
    """

    def __init__(self, aside: Bytes | None, *, wide: bool) -> None:
        self.aside = aside
        self._hasher: Hasher = new_hasher(wide=wide)

    def read(self, piece: Bytes) -> Bytes:
        if self.aside is None:
            self.hash(piece)
            return piece
        copy = self.aside[: piece.size]
        for at in range(0, piece.size, _HASH_BYTES):
            np.copyto(copy[at : at + _HASH_BYTES], piece[at : at + _HASH_BYTES])
            self.hash(copy[at : at + _HASH_BYTES])
        return copy

    def hash(self, piece: Bytes) -> None:
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        """Return the checksum of all pieces."""
        return self._hasher.hexdigest()


def copy_and_hash(block: Block, out: Bytes, *, wide: bool) -> str:
    """Copy a block's raw bytes to ``out``; return their checksum."""
    raw = block.leaf.source.host_bytes()
    if raw is None:
        block.leaf.source.read(block.start, block.stop, out)
        return digest(out, wide=wide)
    reading = HashedReading(out, wide=wide)
    reading.read(raw[block.start : block.stop])
    return reading.hexdigest()
