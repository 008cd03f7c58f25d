"""Metadata of data files: coded tensors, and dtypes that safetensors lacks.

Such a tensor is a ``U8`` vector in the file. The entry ``tensorkeep`` of the file's ``__metadata__`` is JSON that
describes the tensor, so that it can be decoded without the manifest::

    {"version": 1, "block_bytes": 16777216,
     "tensors": {"wte.weight": {"dtype": "bfloat16", "shape": [32000, 3200],
                                "blocks": [["planes", 11132928], ...]}}}

Each block is a codec's name and its stored length in bytes; the blocks follow one another in the vector.

A file of changes may hold some blocks of a tensor only, or blocks that are differences from blocks in other files. Its
version is 2, so that a reader of version 1 refuses it. The file of one of many ranks holds boxes of tensors, whose
blocks have various lengths. Its version is 3.
"""

from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path

import msgspec

from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.blockfile.header import Header, TensorRecord
from tensorkeep.formats.blockfile.plan import (
    MAX_BLOCK_BYTES,
    Block,
    BlockKey,
    BlockRecord,
    FilePlan,
    LeafInFile,
    blocks_of,
)
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import MOST_DIMENSIONS
from tensorkeep.structs import prepared

METADATA_KEY = "tensorkeep"
VERSION = 1
CHANGES_VERSION = 2
CUTS_VERSION = 3
"""The versions of notes that a reader of version 1 would misread: see above."""

SMALLEST_DIFFERENCE = 1024
"""Raw bytes below which a block is not stored as a difference: the record of its base would be as large as the gain."""


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensor that a ``U8`` vector holds: its dtype and shape, codec and stored length of each block in this file.

    ``numbers`` are the indices of these blocks in the tensor, if others are in files of earlier saves. ``differences``
    are positions in ``blocks`` of those that are differences from blocks in other files. ``raw`` are the raw bytes of
    each block, if these are not ``block_bytes``.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: list[tuple[str, int]]
    numbers: list[int] | None = None
    differences: list[int] = []
    raw: list[int] | None = None

    @property
    def complete(self) -> bool:
        """Whether the tensor can be decoded from this file alone."""
        return self.numbers is None and not self.differences


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ``tensorkeep`` entry of a file's metadata.

    ``structure`` is that of the state, in checkpoints without a manifest.
    """

    version: int
    block_bytes: int
    tensors: dict[str, Note]
    structure: Structure | None = None


Description = tuple[list[TensorRecord], Notes | None]
"""The header's records, and the notes if the file needs any."""


def describe(
    plan: FilePlan, blocks: Mapping[BlockKey, BlockRecord], differences: Collection[BlockKey] = ()
) -> Description:
    """Return the description of a file that has these blocks; ``differences`` depend on blocks in other files.

    A tensor that has blocks, but none of them here, is left out.
    """
    records: list[TensorRecord] = []
    tensors: dict[str, Note] = {}
    start = 0
    for leaf in plan.leaves:
        planned = {block.key: block for block in blocks_of(leaf)}
        keys = list(planned)
        stored = [key for key in keys if key in blocks]
        if keys and not stored:
            continue
        found = [blocks[key] for key in stored]
        changed = [position for position, key in enumerate(stored) if key in differences]
        complete = len(stored) == len(keys)
        stop = start + sum(block.length for block in found)
        dtype, shape = leaf.source.dtype, leaf.source.shape
        tag = dtype.tag(shape)
        if tag is not None and complete and not changed and _is_plain(leaf, found, start):
            records.append(TensorRecord(leaf.key, tag, dtype.numbers_shape(shape), start, stop))
        else:
            records.append(TensorRecord(leaf.key, "U8", (stop - start,), start, stop))
            lengths = [(block.codec, block.length) for block in found]
            numbers = None if complete else [index for _, index in stored]
            raw = _raw_lengths(leaf, [planned[key] for key in stored])
            tensors[leaf.key] = Note(leaf.source.dtype.name, leaf.source.shape, lengths, numbers, changed, raw)
        start = stop
    return records, _notes(tensors, plan)


def describe_longest(plan: FilePlan, *, changes: bool = False, delta: bool = False) -> Description:
    """Return a description whose header is at least as long as that of any coded form of the file.

    With ``changes``, the file may hold some blocks only; with ``delta``, some of those may be differences.
    """
    codec = max(CODECS.names(), key=len)
    end = 2 * plan.raw_bytes + BLOCK_BYTES
    records = [TensorRecord(leaf.key, "U8", (end,), end, end) for leaf in plan.leaves]
    tensors: dict[str, Note] = {}
    for leaf in plan.leaves:
        planned = list(blocks_of(leaf))
        count = len(planned)
        numbers = list(range(count)) if changes and count > 1 else None
        differences = list(range(count)) if delta and leaf.source.nbytes >= SMALLEST_DIFFERENCE else []
        blocks = [(codec, 2 * BLOCK_BYTES)] * count
        raw = _raw_lengths(leaf, planned)
        tensors[leaf.key] = Note(leaf.source.dtype.name, leaf.source.shape, blocks, numbers, differences, raw)
    return records, _notes(tensors, plan)


def _raw_lengths(leaf: LeafInFile, blocks: list[Block]) -> list[int] | None:
    """Return the raw bytes of the blocks in the file; None if a reader knows them without."""
    return None if leaf.starts is None or len(leaf.starts) < 2 else [block.nbytes for block in blocks]


def _notes(tensors: dict[str, Note], plan: FilePlan) -> Notes | None:
    version = VERSION if all(note.complete for note in tensors.values()) else CHANGES_VERSION
    if any(note.raw is not None for note in tensors.values()):
        version = CUTS_VERSION
    return Notes(version, BLOCK_BYTES, tensors, plan.structure) if tensors or plan.structure else None


def _is_plain(leaf: LeafInFile, blocks: Iterable[BlockRecord], start: int) -> bool:
    """Return whether a tensor is stored as any safetensors reader expects it."""
    raw = all(block.codec == "raw" for block in blocks)
    return raw and sum(b.length for b in blocks) == leaf.source.nbytes and start % leaf.source.dtype.itemsize == 0


def parse(header: Header, path: Path) -> Notes:
    """Return the notes of a file, checked against its header; empty notes if it has none.

    Raises CorruptCheckpointError if they are malformed or contradict the header; UnsupportedError if a later version
    wrote them.
    """
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return Notes(VERSION, MAX_BLOCK_BYTES, {})
    with decoding(path, what="the note on coded tensors is malformed"):
        notes = msgspec.json.decode(text, type=prepared(Notes))
        if notes.version not in (VERSION, CHANGES_VERSION, CUTS_VERSION):
            raise UnsupportedError(f"has coded tensors of version {notes.version}", remedy="install a later Tensorkeep")
        for name, note in notes.tensors.items():
            _check(name, note, notes.block_bytes, header)
    return notes


def _check(name: str, note: Note, block_bytes: int, header: Header) -> None:
    record = header.records.get(name)
    if record is None or record.tag != "U8":
        raise CorruptCheckpointError("is noted as coded, but is not a U8 vector in the file", name=name)
    if note.dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {note.dtype!r}, which this release does not know", name=name)
    if (
        not 1 <= block_bytes <= MAX_BLOCK_BYTES
        or block_bytes % 16
        or len(note.shape) > MOST_DIMENSIONS
        or any(length < 0 for length in note.shape)
    ):
        raise CorruptCheckpointError("its note has impossible sizes", name=name)
    if not note.complete:
        raise UnsupportedError(
            "has blocks in other files: this file holds the changes of one step",
            name=name,
            remedy="open the step's directory instead: its manifest lists the other files",
        )
    nbytes = prod(note.shape) * BY_NAME[note.dtype].itemsize
    stored = sum(length for _, length in note.blocks)
    raw = note.raw
    if (
        len(note.blocks) != (-(-nbytes // block_bytes) if raw is None else len(raw))
        or (raw is not None and (sum(raw) != nbytes or any(not 0 < length <= block_bytes for length in raw)))
        or stored != record.stop - record.start
        or any(not 0 < length < block_bytes + 2 * 4096 for _, length in note.blocks)
    ):
        raise CorruptCheckpointError("its blocks do not fit its shape", name=name)
