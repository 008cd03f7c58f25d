"""One flipped bit in a checkpoint, to see that it is found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.errors import UsageError
from tensorkeep.formats.native import manifest
from tensorkeep.io.directory import Directory


@dataclass(frozen=True, slots=True)
class Flip:
    """Which byte was changed: the file and the offset in it, the tensor and the block that it belongs to."""

    file: str
    offset: int
    name: str
    block: int
    before: int
    after: int


def flip_bit(checkpoint: Path) -> Flip:
    """Flip the lowest bit of the byte in the middle of the largest tensor's middle block.

    Parameters
    ----------
    checkpoint : Path
        A checkpoint in the native format; it is damaged afterwards.

    Raises
    ------
    UsageError
        If it holds no tensor with data.
    """
    with Directory(checkpoint) as directory:
        found = manifest.read(directory)
    leaf = max(found.leaves, key=lambda leaf: leaf.nbytes, default=None)
    if leaf is None or not leaf.blocks:
        raise UsageError("holds no tensor whose data could be damaged", path=checkpoint)
    block = len(leaf.blocks) // 2
    offset = leaf.offset + sum(b.length for b in leaf.blocks[:block]) + leaf.blocks[block].length // 2
    file = found.files[leaf.file].name
    fd = os.open(checkpoint / file, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(fd, 1, offset)[0]
        after = before ^ 1
        os.pwrite(fd, bytes([after]), offset)
    finally:
        os.close(fd)
    return Flip(file, offset, leaf.name, block, before, after)
