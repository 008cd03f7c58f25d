"""The layout of data files: tensors into files, tensors into blocks, blocks into write tasks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

import msgspec

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import BLOCK_BYTES, LEAST_BLOCK_BYTES, RANK_BLOCK_BYTES, FormatOptions, PartKey, Structure
from tensorkeep.state.leaf import Source
from tensorkeep.state.names import part_file_stems
from tensorkeep.state.sharded import TensorShard
from tensorkeep.state.tree import Flat
from tensorkeep.units import parse_bytes

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
# The metadata key for the library that a safetensors file was written for.
FRAMEWORK_KEY = "format"
FRAMEWORK = "pt"
# The suffix of files with compressed tensors: other tools would read the compressed bytes as weights.
CODED_SUFFIX = ".tensorkeep"
DEFAULT_SHARD_BYTES = 4 * 1024**3


class BlockFileOptions(FormatOptions, frozen=True):
    """The options that the native format and the safetensors format share.

    Attributes
    ----------
    shard_bytes : int or str or None
        The size above which the tensors of a part are split over several files, also as ``"4GiB"``, the default.
    direct_io : bool
        Whether to write around the page cache (O_DIRECT) where the file system supports it.
    """

    shard_bytes: int | str | None = None
    direct_io: bool = True


@dataclass(frozen=True, slots=True)
class LeafInFile:
    """A leaf in a file: its key there, and the offset of its raw bytes in the data."""

    source: Source
    part: str
    key: str
    start: int
    # The first raw bytes of its blocks; None stands for a block every `BLOCK_BYTES`.
    starts: Sequence[int] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.source.nbytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file; its leaves are in the order of the data, with raw offsets that begin at 0."""

    name: str
    part: str
    leaves: tuple[LeafInFile, ...]
    # The keys in the order of the header, if it differs.
    header_order: tuple[str, ...] = ()
    # The `__metadata__` of the header, without the entry `tensorkeep`.
    metadata: Mapping[str, str] = field(default_factory=lambda: {FRAMEWORK_KEY: FRAMEWORK})
    # Describes the state, in checkpoints without a manifest.
    structure: Structure | None = None

    @property
    def raw_bytes(self) -> int:
        return self.leaves[-1].stop if self.leaves else 0


@dataclass(frozen=True, slots=True)
class Block:
    """A block: raw bytes ``start:stop`` of a leaf."""

    leaf: LeafInFile
    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> "BlockKey":
        return self.leaf.key, self.index


# A tensor to store, its key in its part, and the starts of its blocks: see `LeafInFile`.
CutSource = tuple[Source, str, Sequence[int] | None]
# Key of a leaf in its file, and index of the block in the leaf.
BlockKey = tuple[str, int]


# Without the cyclic garbage collector: a large checkpoint has very many blocks.
class BlockRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    codec: str
    length: int
    # The checksum of the raw bytes, and of the stored bytes if the block is coded.
    raw: str = ""
    stored: str = ""


def blocks_of(leaf: LeafInFile) -> Iterator[Block]:
    """Yield the blocks of a leaf; an empty leaf has none."""
    starts = range(0, leaf.source.nbytes, BLOCK_BYTES) if leaf.starts is None else leaf.starts
    for index, (start, stop) in enumerate(pairwise((*starts, leaf.source.nbytes))):
        yield Block(leaf, index, start, stop)


def plan_files(flat: Flat[Source], shard_bytes: int | str | None = None, *, suffix: str = SUFFIX) -> list[FilePlan]:
    """Return the data files of a state: a set for each part, no file above ``shard_bytes`` unless one leaf is."""
    limit = shard_limit(shard_bytes)
    parts: dict[str, list[CutSource]] = {}
    for name, source in flat.leaves.items():
        part, key = flat.parts[name]
        parts.setdefault(part, []).append((source, key, None))
    stems = part_file_stems(list(parts))
    return [plan for part in parts for plan in plan_part(part, stems[part], parts[part], limit, suffix=suffix)]


def shard_limit(shard_bytes: int | str | None) -> int:
    limit = DEFAULT_SHARD_BYTES if shard_bytes is None else parse_bytes(shard_bytes)
    if limit <= 0:
        raise UsageError(f"shard_bytes is {shard_bytes}", remedy="give a positive number of bytes")
    return limit


def plan_part(part: str, stem: str, leaves: list[CutSource], limit: int, *, suffix: str = SUFFIX) -> Iterator[FilePlan]:
    # Wide elements first: every leaf then begins at a multiple of its item size, which readers that map a file need.
    ordered = sorted(leaves, key=lambda leaf: -leaf[0].dtype.itemsize)
    shards: list[list[CutSource]] = [[]]
    size = 0
    for leaf in ordered:
        # A leaf is never split over files: other tools could not load it.
        if shards[-1] and size + leaf[0].nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(leaf)
        size += leaf[0].nbytes
    for number, shard in enumerate(shards, start=1):
        place = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        placed: list[LeafInFile] = []
        for source, key, starts in shard:
            placed.append(LeafInFile(source, part, key, placed[-1].stop if placed else 0, starts))
        yield FilePlan(f"{stem}{place}{suffix}", part, tuple(placed))


def coded_name(name: str) -> str:
    return name.rpartition(".")[0] + CODED_SUFFIX


def tasks_of(plan: FilePlan) -> list[list[Block]]:
    """Return the blocks of a file in order, in groups of at most one block's size."""
    groups: list[list[Block]] = []
    size = BLOCK_BYTES  # so that the first block begins a group
    for leaf in plan.leaves:
        for block in blocks_of(leaf):
            # Small blocks share a task, so that many small tensors do not become many small writes.
            if size + block.nbytes > BLOCK_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(block)
            size += block.nbytes
    return groups


class TensorBox(NamedTuple):
    """A box of a tensor: shape of the full tensor, offsets and sizes of the box, bytes per element."""

    full: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @classmethod
    def of_source(cls, source: Source) -> "TensorBox":
        """Return the box that a source stores: all of its tensor unless it is a shard."""
        shape = tuple(source.shape)
        if isinstance(source, TensorShard):
            return cls(source.whole, source.offsets, shape, source.dtype.itemsize)
        return cls(shape, (0,) * len(shape), shape, source.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.itemsize


class ByteCuts(NamedTuple):
    """A cut every ``most_bytes``: the blocks of a tensor that one process writes; see `Grid`."""

    most_bytes: int

    def block_starts(self, box: TensorBox) -> Sequence[int]:
        return range(0, box.nbytes, self.most_bytes)

    def block_count(self, box: TensorBox) -> int:
        # Not `len` of the range: it fails for the absurd sizes of a damaged file.
        return -(-box.nbytes // self.most_bytes)

    def read_bytes(self, full: Sequence[int], itemsize: int) -> int:
        return self.most_bytes

    def cut_alike(self, one: Sequence[int], other: Sequence[int]) -> bool:
        # Counted from the start of the tensor, the blocks do not depend on the shape.
        return prod(one) == prod(other)


class Grid(NamedTuple):
    """Cuts at rows of the full tensor, so that any number of ranks cuts its boxes at the same rows.

    A cut comes about every ``most_bytes``, or ``parts`` times in a tensor if that is finer, but not within 128 KiB.
    """

    most_bytes: int
    parts: int = 1

    def bytes_between_cuts(self, full: Sequence[int], itemsize: int) -> int:
        """Return the bytes of a tensor of this shape between two cuts."""
        part = -(-prod(full) * itemsize // self.parts)
        return min(self.most_bytes, max(LEAST_BLOCK_BYTES, 1 << max(0, part - 1).bit_length()))

    def rows_per_block(self, full: Sequence[int], itemsize: int) -> int:
        """Return the number of rows (indices of dimension 0) between two cuts of a tensor of this shape; at least 1."""
        return max(1, self.bytes_between_cuts(full, itemsize) // max(1, prod(full[1:]) * itemsize))

    def block_starts(self, box: TensorBox) -> Sequence[int]:
        """Return the first byte of every block of a box, counted from its start.

        A box is cut where the row number in the full tensor is a multiple of `rows_per_block`. If one row of the box is
        longer than `bytes_between_cuts`, each row is cut by itself.

        >>> list(Grid(80).block_starts(TensorBox(full=(100, 4), offsets=(30, 0), sizes=(40, 4), itemsize=1)))
        [0, 40, 120]
        """
        rows, cuts = self._starts(box)
        if len(cuts) == 1:
            return rows if not rows.start else (0, *rows)
        return [row + cut for row in rows for cut in cuts]

    def block_count(self, box: TensorBox) -> int:
        """Return the number of blocks without listing them: the sizes may come from a damaged file."""
        rows, cuts = self._starts(box)
        return (len(rows) + (rows.start > 0)) * len(cuts)

    def _starts(self, box: TensorBox) -> tuple[range, range]:
        """Return the starts of rows, perhaps without byte 0, and the starts of blocks within a row."""
        nbytes, whole = box.nbytes, range(1)
        if not box.sizes or not nbytes:
            return range(0, nbytes, max(1, nbytes)), whole
        row = nbytes // box.sizes[0]
        step = self.bytes_between_cuts(box.full, box.itemsize)
        # A cut within a row is counted from the start of the box's row, so ranks with the same columns cut alike.
        if row > step:
            return range(0, nbytes, row), range(0, row, step)
        rows = self.rows_per_block(box.full, box.itemsize)
        # The first cut is at the first row of the full tensor that is a multiple of `rows`.
        return range(-box.offsets[0] % rows * row, nbytes, rows * row), whole

    def read_bytes(self, full: Sequence[int], itemsize: int) -> int:
        """Return a size: reads that begin at its multiples decode no block twice."""
        row = prod(full[1:]) * itemsize
        most = self.bytes_between_cuts(full, itemsize)
        if not full or row > most:
            return max(BLOCK_BYTES, most)
        # As many whole blocks as a large read covers.
        cut = self.rows_per_block(full, itemsize) * row
        return max(1, BLOCK_BYTES // cut) * cut if cut else BLOCK_BYTES

    def cut_alike(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether tensors of these shapes have the same blocks if their C-order bytes are the same."""
        # The grid follows the rows, so another shape cuts the same bytes in other places.
        return tuple(one) == tuple(other)


# Where the C-order bytes of a box are cut into blocks.
Cuts = ByteCuts | Grid


# A rank that reads other rows than were written reads up to two blocks too many for each box. With fine cuts, a rank
# that reads one of eight shards of a tensor reads little more than its own bytes.
RAW_GRID = Grid(RANK_BLOCK_BYTES, parts=128)
# Smaller blocks take twice the time to code.
CODED_GRID = Grid(RANK_BLOCK_BYTES)


def plan_shards(
    shards: Sequence[TensorShard],
    parts: Mapping[str, PartKey],
    shard_bytes: int | str | None,
    *,
    suffix: str,
    rank: int,
    grid: Grid,
) -> list[FilePlan]:
    """Return the data files of one rank; with the ``parts`` of the full state, all ranks name files alike."""
    limit = shard_limit(shard_bytes)
    stems = part_file_stems(dict.fromkeys(part for part, _ in parts.values()))
    by_part: dict[str, list[CutSource]] = {}
    for shard, key in zip(shards, _keys(shards, parts), strict=True):
        by_part.setdefault(parts[shard.name][0], []).append((shard, key, grid.block_starts(TensorBox.of_source(shard))))
    return [
        plan
        for part, leaves in by_part.items()
        for plan in plan_part(part, f"{stems[part]}-rank-{rank:05d}", leaves, limit, suffix=suffix)
    ]


def _keys(shards: Sequence[TensorShard], parts: Mapping[str, PartKey]) -> list[str]:
    """Return the key of each box in its data file: the tensor's key, with the ranges if it has several boxes."""
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard.name] = counts.get(shard.name, 0) + 1
    taken = set(parts.values())
    keys: list[str] = []
    for shard in shards:
        part, key = parts[shard.name]
        # The key shows people and other tools which part of the tensor the entry holds.
        if counts[shard.name] > 1:
            sides = zip(shard.offsets, shard.shape, strict=True)
            key += f"[{','.join(f'{offset}:{offset + size}' for offset, size in sides)}]"
            while (part, key) in taken:
                key += "_"
            taken.add((part, key))
        keys.append(key)
    return keys
