"""The records of a manifest: the files, tensors and blocks of a native checkpoint.

msgspec decodes them and checks their types and ranges; ``manifest.py`` checks the other rules.
``docs/reference/native-format.md`` specifies the format.
"""

from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorkeep.formats.base import AliasRecord, PartKey, StepRecord
from tensorkeep.formats.blockfile.plan import MAX_BLOCK_BYTES, BlockRecord
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import MOST_DIMENSIONS
from tensorkeep.storage.base import MANIFEST_NAME

VERSION = 1

WIDE_DIGESTS = "wide-digests"
"""Raw blocks have checksums of 128 bits, so that a later save can find out which blocks have changed."""

PLACES = "places"
"""Blocks may be in files of earlier saves, or be differences from blocks there."""

REFERENCES = "references"
"""Files may be objects of other checkpoints of the same run, in an object store."""

PIECES = "pieces"
"""Many ranks wrote the checkpoint together: their fragments list boxes of tensors (``pieces/records.py``)."""

FEATURES = (WIDE_DIGESTS, PLACES, REFERENCES)
"""The features that the records of stored blocks may use."""

MAX_BASES = 8
"""Maximum number of base blocks of a difference."""

_PLAIN_NAME = "[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}"

FILE_NAME_PATTERN = rf"^(\.\./{_PLAIN_NAME}/)?(?!{MANIFEST_NAME}\Z){_PLAIN_NAME}\Z"
"""Names of data files: one plain name, not hidden, not that of the manifest; or `REFERENCES`, ``../NAME/FILE``."""

Count = Annotated[int, Meta(ge=0)]


class BaseRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stored block that another is the difference from: a `BlockRecord` with its file and offset."""

    codec: str
    length: Count
    raw: str
    stored: str
    file: Count
    offset: Count


class PlaceRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The place of a block that does not follow the one before it, and the blocks that it is the difference from.

    ``file`` is an index into the manifest's files. ``bases`` is empty for a block that is stored in full. Otherwise the
    decoded block is the bitwise XOR of the raw block and that of the first base, which itself is a difference from the
    second, and so on; the last is stored in full. ``age`` is how many times the block has been stored as a difference
    since it was stored in full.
    """

    file: Count
    offset: Count
    bases: Annotated[list[BaseRecord], Meta(max_length=MAX_BASES)] = []
    age: Count = 0

    @property
    def files(self) -> list[int]:
        """The files that the block is read from."""
        return [self.file, *(base.file for base in self.bases)]


Shape = Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMENSIONS)]


class StoredRecord:
    """The blocks of a tensor or of a box: base of records with the fields below.

    The first block is at an offset in a file. ``places`` has one for each block, if they do not simply follow one
    another; else it is empty.
    """

    __slots__ = ()

    file: int
    offset: int
    blocks: list[BlockRecord]
    places: list[PlaceRecord]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield file, offset and length of everything that is stored."""
        if not self.places:
            yield self.file, self.offset, sum([block.length for block in self.blocks])
        for block, place in zip(self.blocks, self.places, strict=False):
            yield place.file, place.offset, block.length
            yield from ((base.file, base.offset, base.length) for base in place.bases)

    def located(self) -> list[tuple[BlockRecord, PlaceRecord]]:
        """Return each block with its place."""
        if self.places:
            return list(zip(self.blocks, self.places, strict=True))
        return [
            (block, PlaceRecord(self.file, at)) for block, at in zip(self.blocks, self.block_offsets(), strict=False)
        ]

    def block_offsets(self) -> Iterator[int]:
        """Yield the offset of each block, and that of the end, of a tensor without places."""
        return accumulate([block.length for block in self.blocks], initial=self.offset)


class LeafRecord(StoredRecord, msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored tensor: its name, part of the state and key within the part, and its blocks.

    Each of the blocks covers ``block_bytes`` raw bytes, except the last.
    """

    name: str
    part: str
    key: str
    dtype: str
    shape: Shape
    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[PlaceRecord] = []

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file: its size, and the checksum of its first ``head_bytes`` bytes, which are all of it for an index.

    The blocks of tensors follow the head without gaps or overlaps. In a file of an earlier save, which ``origin``
    names, there may be other blocks between them. The name of an object of another checkpoint is
    ``../NAME/FILE``.
    """

    name: Annotated[str, Meta(pattern=FILE_NAME_PATTERN)]
    bytes: Count
    head_bytes: Count
    head: str
    origin: str = ""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a checkpoint.

    ``features`` names what a reader must support besides the version. ``step`` is the record of a `CheckpointManager`:
    number, time, metrics.
    """

    format: str
    version: int
    writer: str
    features: list[str]
    block_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES, multiple_of=16)]
    compression: str
    files: list[FileRecord]
    leaves: list[LeafRecord]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None

    def parts(self) -> dict[str, PartKey]:
        """Return the part and the key of each leaf and alias.

        Aliases of the first manifests of version 1 have no key: it is made from the name.
        """
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
