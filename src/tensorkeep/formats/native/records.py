"""The records of a native checkpoint's JSON files: files, tensors, blocks, and the fragments of many ranks.

msgspec decodes the records and checks types and ranges; ``manifest.py`` checks the other rules. One process writes one
`Manifest`. Many ranks write a `Root` together, which describes the state, and one `Fragment` each, which lists the
boxes of tensors that the rank stored. ``docs/reference/native-format.md`` specifies the format.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from tensorkeep.formats.base import AliasRecord, PartKey, StepRecord
from tensorkeep.formats.blockfile.plan import MAX_BLOCK_BYTES, BlockRecord, ByteCuts, Cuts, Grid
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import MOST_DIMENSIONS
from tensorkeep.storage.base import MANIFEST_NAME

VERSION = 1
FRAGMENT_FORMAT = "tensorkeep-fragment"
FRAGMENT_VERSION = 1

WIDE_DIGESTS = "wide-digests"
"""Raw blocks have checksums of 128 bits, so that a later save can identify changed blocks."""

PLACES = "places"
"""Blocks may be in files of earlier saves, or be differences from blocks there."""

REFERENCES = "references"
"""Files may be objects of other checkpoints of the same run, in an object store."""

PIECES = "pieces"
"""Many ranks wrote the checkpoint together: the manifest is a `Root`, and fragments list the blocks."""

FEATURES = (WIDE_DIGESTS, PLACES, REFERENCES)
"""The features that the records of stored blocks may use."""

MAX_RANKS = 2**20

MAX_BASES = 8
"""Maximum number of base blocks of a difference."""

_PLAIN_NAME = "[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}"

FILE_NAME_PATTERN = rf"^(\.\./{_PLAIN_NAME}/)?(?!{MANIFEST_NAME}\Z){_PLAIN_NAME}\Z"
"""Names of data files: one plain name, not hidden, not the manifest's; or, with `REFERENCES`, ``../NAME/FILE``."""

Count = Annotated[int, Meta(ge=0)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMENSIONS)]


def fragment_name(rank: int) -> str:
    """Return the file name of a rank's fragment."""
    return f"rank-{rank:05d}.json"


def save_id(save: str) -> str:
    """Return the id that names the objects of a save in a store: the save's name without the restart count.

    >>> save_id("0123456789abcdef-0")
    '0123456789abcdef'
    """
    return save.partition("-")[0]


class BaseRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A base of a difference: a stored block, with its file and offset."""

    codec: str
    length: Count
    raw: str
    stored: str
    file: Count
    offset: Count


class BlockLocation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The location of a block that does not follow the block before it, and the bases of a difference.

    ``file`` is an index into the list of files. ``bases`` is empty for a block that is stored in full. Otherwise the
    raw block is the bitwise XOR of the decoded block and the raw first base; the first base may itself be a difference
    from the second, and so on. The last base is stored in full. ``age`` counts how many saves in a row have stored the
    block as a difference.
    """

    file: Count
    offset: Count
    bases: Annotated[list[BaseRecord], Meta(max_length=MAX_BASES)] = []
    age: Count = 0

    @property
    def files(self) -> list[int]:
        """The files that must be read to get the block."""
        return [self.file, *(base.file for base in self.bases)]

    def renumbered(self, numbers: Mapping[int, int] | Sequence[int]) -> "BlockLocation":
        """Return the same location in another list of files; ``numbers`` maps old file numbers to new ones."""
        return BlockLocation(numbers[self.file], self.offset, renumbered(self.bases, numbers), self.age)


def renumbered(bases: Sequence[BaseRecord], numbers: Mapping[int, int] | Sequence[int]) -> list[BaseRecord]:
    """Return bases with the file numbers of another list of files."""
    return [BaseRecord(b.codec, b.length, b.raw, b.stored, numbers[b.file], b.offset) for b in bases]


class StoredRecord:
    """Base class of records that list the blocks of a tensor or of a box.

    Without ``places``, the blocks follow one another from ``offset`` in ``file``. Otherwise ``places`` has the location
    of every block.
    """

    __slots__ = ()

    file: int
    offset: int
    blocks: list[BlockRecord]
    places: list[BlockLocation]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield file, offset and length of everything that is stored."""
        if not self.places:
            yield self.file, self.offset, sum([block.length for block in self.blocks])
        for block, place in zip(self.blocks, self.places, strict=False):
            yield place.file, place.offset, block.length
            yield from ((base.file, base.offset, base.length) for base in place.bases)

    def located(self) -> list[tuple[BlockRecord, BlockLocation]]:
        """Return each block with its location."""
        if self.places:
            return list(zip(self.blocks, self.places, strict=True))
        offsets = accumulate([block.length for block in self.blocks], initial=self.offset)
        return [(block, BlockLocation(self.file, at)) for block, at in zip(self.blocks, offsets, strict=False)]


class TensorDescription(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor of the state: name, part of the state, key within the part, dtype and full shape."""

    name: str
    part: str
    key: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class ShardedTensor(TensorDescription, frozen=True, omit_defaults=True):
    """A tensor of a `Root`. ``layout`` is a hint for people: how the tensor was sharded."""

    layout: str = ""


class LeafRecord(StoredRecord, TensorDescription, frozen=True, omit_defaults=True):
    """A tensor of a `Manifest`, and its blocks: ``block_bytes`` raw bytes each, the last one shorter."""

    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[BlockLocation] = []


class BoxRecord(StoredRecord, msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box of a tensor, and its blocks, which hold the C-order bytes of the box.

    ``leaf`` is an index into the names of the fragment. The box begins at the element ``offsets``.
    """

    leaf: Count
    offsets: Shape
    sizes: Shape
    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[BlockLocation] = []


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file: its size, and the checksum of its first ``head_bytes`` bytes, which are the whole file for an index.

    Blocks follow the head without gaps or overlaps. ``origin`` names the earlier save that wrote the file, if any;
    blocks that are no longer used may then lie between the others.
    """

    name: Annotated[str, Meta(pattern=FILE_NAME_PATTERN)]
    bytes: Count
    head_bytes: Count
    head: str
    origin: str = ""


class Fragment(msgspec.Struct, frozen=True):
    """The boxes that one rank stored, and its data files. ``leaves`` are the names of the boxes' tensors.

    ``grid_bytes`` and ``grid_parts`` determine where boxes are cut into blocks: see `Grid`.
    """

    may_be_empty: ClassVar[bool] = False
    """Whether a box may have no elements."""

    format: str
    version: int
    features: list[str]
    save: str
    rank: Count
    ranks: Count
    grid_bytes: Annotated[int, Meta(ge=16, le=MAX_BLOCK_BYTES, multiple_of=16)]
    grid_parts: Annotated[int, Meta(ge=1)]
    files: list[FileRecord]
    leaves: list[str]
    boxes: list[BoxRecord]

    @property
    def cuts(self) -> Cuts:
        """Where boxes are cut into blocks."""
        return Grid(self.grid_bytes, self.grid_parts)


class FullTensors(Fragment, frozen=True):
    """A `Manifest` seen as the fragment of its only rank: one box for each tensor, the full tensor."""

    may_be_empty = True

    @property
    def cuts(self) -> Cuts:
        return ByteCuts(self.grid_bytes)


class FragmentFiles(msgspec.Struct, frozen=True):
    """A fragment without its boxes, for callers that need the files only."""

    format: str
    version: int
    features: list[str]
    save: str
    rank: Count
    ranks: Count
    files: list[FileRecord]


class StateRecord:
    """Base class of the two kinds of manifests: what both say about the whole state."""

    __slots__ = ()

    leaves: list[Any]
    aliases: dict[str, AliasRecord]

    def parts(self) -> dict[str, PartKey]:
        """Return the part and the key of each tensor and alias.

        The first manifests of version 1 stored no key for aliases: the key is then made from the name.
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


class Manifest(StateRecord, msgspec.Struct, frozen=True, omit_defaults=True):
    """The manifest of a checkpoint that one process wrote.

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

    def fragment(self) -> FullTensors:
        """Return the manifest as a fragment, so that one reader and one set of rules serve both kinds."""
        boxes = [
            BoxRecord(number, (0,) * len(leaf.shape), leaf.shape, leaf.file, leaf.offset, leaf.blocks, leaf.places)
            for number, leaf in enumerate(self.leaves)
        ]
        names = [leaf.name for leaf in self.leaves]
        return FullTensors(FRAGMENT_FORMAT, 1, self.features, "", 0, 1, self.block_bytes, 1, self.files, names, boxes)


class FragmentRecord(msgspec.Struct, frozen=True):
    """The file of a fragment: its size, and the xxh3-128 of its bytes."""

    name: str
    bytes: Count
    digest: str


class Root(StateRecord, msgspec.Struct, frozen=True, omit_defaults=True):
    """The manifest of a checkpoint that many ranks wrote.

    ``save`` is the random name of the save, which every fragment repeats. ``fragments`` has one record for each rank,
    in the order of the ranks. ``files`` is empty: the fragments list the data files.
    """

    format: str
    version: int
    writer: str
    features: list[str]
    compression: str
    save: str
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    fragments: list[FragmentRecord]
    files: Annotated[list[FileRecord], Meta(max_length=0)]
    leaves: list[ShardedTensor]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None


class FragmentReport(msgspec.Struct, frozen=True):
    """A rank's report to rank 0 when its files are durable: its fragment, data files and boxes.

    ``boxes`` are (index into ``leaves``, offsets, sizes): rank 0 checks that they tile every tensor without reading
    files of other hosts. ``stored_bytes`` and ``new_bytes`` come from the rank's `WriteResult`.
    """

    rank: int
    record: FragmentRecord
    files: list[str]
    leaves: list[str]
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    stored_bytes: int = 0
    new_bytes: int = 0

    @classmethod
    def of_fragment(
        cls, fragment: Fragment, record: FragmentRecord, stored_bytes: int = 0, new_bytes: int = 0
    ) -> "FragmentReport":
        """Return the report of a fragment whose file is durable."""
        files = [file.name for file in fragment.files]
        boxes = [(box.leaf, box.offsets, box.sizes) for box in fragment.boxes]
        return cls(fragment.rank, record, files, fragment.leaves, boxes, stored_bytes, new_bytes)
