"""How coded tensors, and dtypes that safetensors lacks, are described in the data file itself.

Such a tensor is a ``U8`` vector in the file. The entry ``tensorkeep`` of the file's ``__metadata__`` is JSON that says
what it really is, so that it can be decoded without the manifest::

    {"version": 1, "block_bytes": 16777216,
     "tensors": {"wte.weight": {"dtype": "bfloat16", "shape": [32000, 3200],
                                "blocks": [["planes", 11132928], ...]}}}

Each block is a codec's name and its stored length in bytes; the blocks follow one another in the vector.

In a file of changes, tensors may be there in part, or as differences. Its version is 2, so that a reader which does not
know this refuses it, instead of taking the differences for the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.blockfile.header import MAX_DIMENSIONS, Header, TensorRecord
from tensorkeep.formats.blockfile.plan import FilePlan, Placed
from tensorkeep.formats.blockfile.records import MAX_BLOCK_BYTES, BlockRecord
from tensorkeep.formats.structure import Structure
from tensorkeep.state.dtypes import BY_NAME

METADATA_KEY = "tensorkeep"
FRAMEWORK_KEY = "format"
"""Where safetensors files say, by convention, which library their tensors belong to (``pt``)."""
VERSION = 1
CHANGES_VERSION = 2
"""Of notes that a reader of version 1 would misread."""

SMALLEST_DIFFERENCE = 1024
"""Raw bytes below which a block is not stored as a difference: saying from what would take what it saves."""

Described = tuple[list[TensorRecord], dict[str, Any]]


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a ``U8`` vector really is.

    Attributes
    ----------
    dtype, shape
        Of the tensor.
    blocks : list of (str, int)
        Codec and stored length of each block that is here.
    numbers : list of int or None
        Which blocks of the tensor these are, where others lie in files of earlier saves.
    differences : list of int
        Positions in ``blocks`` of those that are differences from blocks in other files.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: list[tuple[str, int]]
    numbers: list[int] | None = None
    differences: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether the tensor can be decoded from this file alone."""
        return self.numbers is None and not self.differences


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ``tensorkeep`` entry of a file's metadata; ``structure`` is that of a state without a manifest."""

    version: int
    block_bytes: int
    tensors: dict[str, Note]
    structure: Structure | None = None


def describe(plan: FilePlan, blocks: Mapping[tuple[str, int], BlockRecord], block_bytes: int) -> Described:
    """Return the header's records and the notes of a file; a block that is not listed lies raw."""
    records: list[TensorRecord] = []
    tensors: dict[str, Note] = {}
    start = 0
    for leaf in plan.leaves:
        stored = [
            blocks.get((leaf.key, index)) or BlockRecord("raw", size) for index, size in _raw_sizes(leaf, block_bytes)
        ]
        stop = start + sum(block.length for block in stored)
        tag = leaf.source.dtype.safetensors
        if tag is not None and _lies_plain(leaf, stored, start):
            records.append(TensorRecord(leaf.key, tag, leaf.source.shape, start, stop))
        else:
            records.append(TensorRecord(leaf.key, "U8", (stop - start,), start, stop))
            lengths = [(block.codec, block.length) for block in stored]
            tensors[leaf.key] = Note(leaf.source.dtype.name, leaf.source.shape, lengths)
        start = stop
    return records, _notes(tensors, block_bytes, plan)


def describe_changes(
    plan: FilePlan,
    blocks: Mapping[tuple[str, int], BlockRecord],
    differences: Collection[tuple[str, int]],
    block_bytes: int,
) -> Described:
    """Return the header's records and the notes of a file that holds only the blocks which are listed."""
    records: list[TensorRecord] = []
    tensors: dict[str, Note] = {}
    start = 0
    for leaf in plan.leaves:
        count = len(_raw_sizes(leaf, block_bytes))
        numbers = [index for index in range(count) if (leaf.key, index) in blocks]
        if count and not numbers:
            continue
        stored = [blocks[leaf.key, index] for index in numbers]
        stop = start + sum(block.length for block in stored)
        changed = [position for position, index in enumerate(numbers) if (leaf.key, index) in differences]
        tag = leaf.source.dtype.safetensors
        if tag is not None and len(numbers) == count and not changed and _lies_plain(leaf, stored, start):
            records.append(TensorRecord(leaf.key, tag, leaf.source.shape, start, stop))
        else:
            records.append(TensorRecord(leaf.key, "U8", (stop - start,), start, stop))
            lengths = [(block.codec, block.length) for block in stored]
            partial = numbers if len(numbers) < count else None
            tensors[leaf.key] = Note(leaf.source.dtype.name, leaf.source.shape, lengths, partial, changed)
        start = stop
    return records, _notes(tensors, block_bytes, plan)


def widest(plan: FilePlan, block_bytes: int, *, changes: bool = False, delta: bool = False) -> Described:
    """Return a description that no coded form of the file has a longer header than.

    Parameters
    ----------
    changes, delta : bool
        Whether only some blocks may be there, and whether some of those may be differences.
    """
    longest = max(CODECS.names(), key=len)
    end = 2 * plan.raw_bytes + block_bytes
    records = [TensorRecord(leaf.key, "U8", (end,), end, end) for leaf in plan.leaves]
    tensors: dict[str, Note] = {}
    for leaf in plan.leaves:
        count = len(_raw_sizes(leaf, block_bytes))
        numbers = list(range(count)) if changes and count > 1 else None
        differences = list(range(count)) if delta and leaf.source.nbytes >= SMALLEST_DIFFERENCE else []
        blocks = [(longest, 2 * block_bytes)] * count
        tensors[leaf.key] = Note(leaf.source.dtype.name, leaf.source.shape, blocks, numbers, differences)
    return records, _notes(tensors, block_bytes, plan)


def _notes(tensors: dict[str, Note], block_bytes: int, plan: FilePlan) -> dict[str, Any]:
    version = VERSION if all(note.complete for note in tensors.values()) else CHANGES_VERSION
    notes = Notes(version, block_bytes, tensors, plan.structure)
    return msgspec.to_builtins(notes) if tensors or plan.structure else {}


def _raw_sizes(leaf: Placed, block_bytes: int) -> list[tuple[int, int]]:
    nbytes = leaf.source.nbytes
    return [(i, min(block_bytes, nbytes - at)) for i, at in enumerate(range(0, nbytes, block_bytes))]


def _lies_plain(leaf: Placed, blocks: list[BlockRecord], start: int) -> bool:
    """Say whether the tensor lies in the file as it is, so that any reader may have it."""
    raw = all(block.codec == "raw" for block in blocks)
    return raw and sum(b.length for b in blocks) == leaf.source.nbytes and start % leaf.source.dtype.itemsize == 0


def parse(header: Header, path: Path) -> Notes:
    """Return the notes of a file, checked against its header; empty ones when it has none.

    Raises
    ------
    CorruptCheckpointError
        If they are malformed or contradict the header.
    UnsupportedError
        If a later version wrote them.
    """
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        return Notes(VERSION, MAX_BLOCK_BYTES, {})
    try:
        notes = msgspec.json.decode(text, type=Notes)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the note on coded tensors is malformed ({error})", path=path) from error
    if notes.version not in (VERSION, CHANGES_VERSION):
        raise UnsupportedError(
            f"has coded tensors of version {notes.version}", path=path, remedy="install a later Tensorkeep"
        )
    for name, note in notes.tensors.items():
        _check(name, note, notes.block_bytes, header, path)
    return notes


def _check(name: str, note: Note, block_bytes: int, header: Header, path: Path) -> None:
    record = header.records.get(name)
    if record is None or record.tag != "U8":
        raise CorruptCheckpointError("is noted as coded, but is no U8 vector here", path=path, name=name)
    if note.dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {note.dtype!r}, which is not known here", path=path, name=name)
    if (
        not 1 <= block_bytes <= MAX_BLOCK_BYTES
        or block_bytes % 16
        or len(note.shape) > MAX_DIMENSIONS
        or any(length < 0 for length in note.shape)
    ):
        raise CorruptCheckpointError("is noted with impossible sizes", path=path, name=name)
    if not note.complete:
        raise UnsupportedError(
            "has blocks in other files: this one holds what changed in one step",
            path=path,
            name=name,
            remedy="open the step's directory instead, whose manifest says where they are",
        )
    nbytes = prod(note.shape) * BY_NAME[note.dtype].itemsize
    stored = sum(length for _, length in note.blocks)
    if (
        len(note.blocks) != -(-nbytes // block_bytes)
        or stored != record.stop - record.start
        or any(not 0 < length < block_bytes + 2 * 4096 for _, length in note.blocks)
    ):
        raise CorruptCheckpointError("its blocks do not fit its shape", path=path, name=name)
