"""The records of a manifest: what a native checkpoint says of its files, tensors and blocks.

``manifest.py`` reads one and holds it to the rules; ``docs/reference/native-format.md`` specifies it.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import msgspec

from tensorkeep.formats.structure import AliasRecord
from tensorkeep.formats.write import StepRecord
from tensorkeep.state.dtypes import BY_NAME

VERSION = 1
MAX_BLOCK_BYTES = 64 * 1024**2

WIDE_DIGESTS = "wide-digests"
"""Raw blocks have checksums of 128 bits, so that a later save can tell by them what has changed."""

PLACES = "places"
"""Blocks lie in files of earlier saves, too, or are differences from blocks there."""

FEATURES = (WIDE_DIGESTS, PLACES)
MOST_BASES = 8
"""Blocks that one is made from besides its own."""


class BlockRecord(msgspec.Struct, array_like=True, frozen=True):
    """One block: codec, stored length in bytes, xxh3-64 of the raw bytes and, where a codec is used, of the stored."""

    codec: str
    length: int
    raw: str = ""
    stored: str = ""


class BaseRecord(msgspec.Struct, array_like=True, frozen=True):
    """A stored block that another is the difference from: as a `BlockRecord`, with its file and offset."""

    codec: str
    length: int
    raw: str
    stored: str
    file: int
    offset: int


class PlaceRecord(msgspec.Struct, array_like=True, frozen=True):
    """Where a block lies that does not follow the one before it, and what it is the difference from.

    Attributes
    ----------
    file, offset : int
        Index into the manifest's files, and first byte there.
    bases : list of BaseRecord
        Empty for a block that is stored whole. Otherwise the decoded block is the bitwise XOR of the raw block and
        that of the first base, which itself is a difference from the second, and so on; the last is whole.
    age : int
        How many times it has been stored as a difference since it was stored whole.
    """

    file: int
    offset: int
    bases: list[BaseRecord] = []
    age: int = 0


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf: where its bytes lie and what they are.

    Attributes
    ----------
    name, part, key : str
        Full dotted name, part of the state, and name within the part (which is its name in the file).
    dtype : str
    shape : tuple of int
    file : int
        Index into the manifest's files.
    offset : int
        First byte in the file.
    blocks : list of BlockRecord
        In order; each covers ``block_bytes`` raw bytes but the last.
    places : list of PlaceRecord
        Of each block, where they do not simply follow one another; else empty.
    """

    name: str
    part: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    blocks: list[BlockRecord]
    places: list[PlaceRecord] = []

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return int(prod(self.shape)) * BY_NAME[self.dtype].itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes in files, without those of bases."""
        return sum(block.length for block in self.blocks)

    def located(self) -> list[tuple[BlockRecord, PlaceRecord]]:
        """Return each block with its place."""
        if self.places:
            return list(zip(self.blocks, self.places, strict=True))
        starts = accumulate((block.length for block in self.blocks), initial=self.offset)
        return [(block, PlaceRecord(self.file, start)) for block, start in zip(self.blocks, starts, strict=False)]


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file: its size, and the checksum of its first ``head_bytes`` bytes (all of it for an index).

    What lies behind the head are the leaves' blocks, without hole or overlap. A file that an earlier save wrote, and
    ``origin`` names, may hold other blocks, too.
    """

    name: str
    bytes: int
    head_bytes: int
    head: str
    origin: str = ""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a checkpoint is made of. ``features`` names what a reader must know besides the version.

    ``step`` is what a `CheckpointManager` says of it: number, time, metrics.
    """

    format: str
    version: int
    writer: str
    features: list[str]
    block_bytes: int
    compression: str
    files: list[FileRecord]
    leaves: list[LeafRecord]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None

    def parts(self) -> dict[str, tuple[str, str]]:
        """Return the part and the key of each leaf and alias."""
        found = {leaf.name: (leaf.part, leaf.key) for leaf in self.leaves}
        found |= {name: (alias.part, alias.key) for name, alias in self.aliases.items() if alias.key}
        taken = set(found.values())
        for name, alias in self.aliases.items():
            if not alias.key:
                key = name.removeprefix(f"{alias.part}.")
                while (alias.part, key) in taken:
                    key += "_"
                found[name] = (alias.part, key)
                taken.add(found[name])
        return found
