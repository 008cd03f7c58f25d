"""The records of a checkpoint that many ranks wrote together: a root manifest, and one fragment for each rank.

The root has what is true of the whole state. A fragment lists the boxes of tensors that one rank stored. Together the
boxes tile each tensor exactly. ``docs/reference/native-format.md`` specifies the format.
"""

from math import prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorkeep.formats.base import AliasRecord, PartKey, StepRecord
from tensorkeep.formats.blockfile.plan import MAX_BLOCK_BYTES, BlockRecord, Grid
from tensorkeep.formats.native.records import Count, FileRecord, PlaceRecord, Shape, StoredRecord
from tensorkeep.state.dtypes import BY_NAME

FRAGMENT_FORMAT = "tensorkeep-fragment"
FRAGMENT_VERSION = 1

MAX_RANKS = 2**20


def fragment_name(rank: int) -> str:
    """Return the name of a rank's fragment."""
    return f"rank-{rank:05d}.json"


def save_id(save: str) -> str:
    """Return the part of a save's name that is in the names of its objects in a store.

    >>> save_id("0123456789abcdef-0")
    '0123456789abcdef'
    """
    return save.partition("-")[0]


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor of the state; ``layout`` is a hint for people: how it was divided among the ranks."""

    name: str
    part: str
    key: str
    dtype: str
    shape: Shape
    layout: str = ""

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class FragmentRecord(msgspec.Struct, frozen=True):
    """The file of a fragment: its size, and the xxh3-128 of its bytes."""

    name: str
    bytes: Count
    digest: str


class Root(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the manifest of such a checkpoint.

    ``save`` is a random name of the save, which its fragments repeat. ``fragments`` has one record for each rank, in
    their order. ``files`` is empty: the fragments list the data files.
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
    leaves: list[TensorRecord]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None

    def parts(self) -> dict[str, PartKey]:
        """Return the part and the key of each leaf and alias."""
        found = {leaf.name: (leaf.part, leaf.key) for leaf in self.leaves}
        return found | {name: (alias.part, alias.key) for name, alias in self.aliases.items()}


class BoxRecord(StoredRecord, msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One box of a tensor and its blocks, which hold the C-order bytes of the box.

    ``leaf`` is an index into the names of the fragment, ``offsets`` is where the box begins in the tensor.
    """

    leaf: Count
    offsets: Shape
    sizes: Shape
    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[PlaceRecord] = []


class Fragment(msgspec.Struct, frozen=True):
    """What one rank stored. ``leaves`` are the names of the tensors of its boxes.

    ``grid_bytes`` and ``grid_parts`` determine where boxes are cut into blocks: see ``blockfile/cuts.py``.
    """

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
    def grid(self) -> Grid:
        """Where boxes are cut."""
        return Grid(self.grid_bytes, self.grid_parts)


class FragmentFiles(msgspec.Struct, frozen=True):
    """The part of a fragment that lists its files, without its boxes."""

    format: str
    version: int
    features: list[str]
    save: str
    rank: Count
    ranks: Count
    files: list[FileRecord]


class FragmentReport(msgspec.Struct, frozen=True):
    """What a rank reports to the coordinator once its part is durable: its fragment, data files and boxes.

    ``boxes`` are (index into ``leaves``, offsets, sizes), so that the coordinator can check that nothing is missing
    without reading files that others wrote. ``stored_bytes`` and ``new_bytes`` are those of the rank's `WriteResult`.
    """

    rank: int
    record: FragmentRecord
    files: list[str]
    leaves: list[str]
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    stored_bytes: int = 0
    new_bytes: int = 0
