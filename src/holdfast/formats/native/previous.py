"""An earlier checkpoint, whose blocks a save takes again where they have not changed, or stores the difference from.

The files that hold such blocks are hard-linked into the new checkpoint's directory, so that each checkpoint stands
alone: the file system counts the links, and removing one checkpoint never takes anything from another.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.base import BLOCK_BYTES, OpenSettings
from holdfast.formats.native.blocks import StoredBlock, scratch_bytes
from holdfast.formats.native.manifest import (
    WIDE_DIGESTS,
    BaseRecord,
    BlockRecord,
    FileRecord,
    LeafRecord,
    PlaceRecord,
)
from holdfast.formats.native.pack import Block
from holdfast.formats.native.reader import NativeReader
from holdfast.io.files import Bytes, store_error

LEAST_LIVE = 0.5
"""The share of a file's bytes that must still be in use for it to be linked again.

Below, what is left of it is written anew: else a whole file might be kept for one block, for ever.
"""

MOST_FILES = 64
"""Files of earlier saves that one checkpoint may have; those with the least in use are left out first."""

MOST_DIFFERENCES = 7
"""Times that a block is stored as a difference before it is stored whole again."""

DEEPEST = 1
"""Differences that have to be undone to read a block: more of them make it smaller, and slower to read."""

_PREFIX = "from-"


@dataclass(frozen=True, slots=True)
class Found:
    """A block of the earlier checkpoint, its place there, and how it is read."""

    block: BlockRecord
    place: PlaceRecord
    stored: StoredBlock


@dataclass(frozen=True, slots=True)
class Base:
    """What a block may be stored as the difference from: records for the manifest, and how it is read."""

    records: list[BaseRecord]
    stored: StoredBlock
    age: int


class Previous:
    """An open earlier checkpoint; a context manager.

    Parameters
    ----------
    path : Path
        A native checkpoint on the same file system, saved with ``incremental=True`` or itself with a base.
    settings : OpenSettings
    delta : bool
        Whether blocks that have changed may be stored as differences.

    Attributes
    ----------
    path : Path
    delta : bool
    obstacle : str or None
        Why blocks of it, or of one of its files, cannot be taken, if so.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError
        If it cannot be read.
    """

    def __init__(self, path: Path, settings: OpenSettings, *, delta: bool) -> None:
        self.path = path
        self._reader = NativeReader(path, settings)
        self.delta = delta
        manifest = self._reader.manifest
        self._leaves = {leaf.name: (leaf, leaf.located()) for leaf in manifest.leaves}
        self._names: dict[int, str] = {}
        self._used: set[int] = set()
        self.obstacle: str | None = None
        if manifest.block_bytes != BLOCK_BYTES:
            self.obstacle = f"its blocks have {manifest.block_bytes:,} bytes"
        elif WIDE_DIGESTS not in manifest.features:
            self.obstacle = "it was saved without incremental=True, so that it does not tell what has changed"

    def link_into(self, directory: Path) -> None:
        """Give the files whose blocks are worth keeping names in a new checkpoint's directory."""
        if self.obstacle is not None:
            return
        records = self._reader.manifest.files
        for number in _worth_keeping(records, self._live_bytes()):
            name = self._name(records[number], directory)
            try:
                os.link(f"{self._reader.directory.held_path}/{records[number].name}", directory / name)
            except OSError as error:
                # Whatever refuses a link (another file system, too many of them, a file that is gone), the blocks of
                # this file are simply written again.
                self.obstacle = f"{records[number].name} cannot be linked: {error.strerror}"
            else:
                self._names[number] = name

    @property
    def linked(self) -> bool:
        """Whether any file could be linked."""
        return bool(self._names)

    def _name(self, record: FileRecord, directory: Path) -> str:
        if record.name.startswith(_PREFIX):
            name = record.name
        else:
            origin = re.sub(r"[^A-Za-z0-9_-]", "_", self._reader.path.name)[:100]
            name = f"{_PREFIX}{origin}-{record.name}"
        tried, count = name, 1
        while os.path.lexists(directory / tried):
            count += 1
            stem, _, suffix = name.rpartition(".")
            tried = f"{stem}-{count}.{suffix}"
        return tried

    def _live_bytes(self) -> dict[int, int]:
        live: dict[int, int] = defaultdict(int)
        for _, located in self._leaves.values():
            for block, place in located:
                live[place.file] += block.length
                for base in place.bases:
                    live[base.file] += base.length
        return live

    def find(self, block: Block, wide: str) -> Found | None:
        """Return the block in the same place of the earlier checkpoint, if it has that digest and can be taken."""
        found = self._at(block)
        if found is None or found.block.raw != wide:
            return None
        self._use([found.place.file, *(base.file for base in found.place.bases)])
        return found

    def base_of(self, block: Block) -> Base | None:
        """Return what a block that has changed may be stored as the difference from, if anything."""
        found = self._at(block) if self.delta else None
        if found is None or found.place.age >= MOST_DIFFERENCES:
            return None
        own = BaseRecord(
            found.block.codec,
            found.block.length,
            found.block.raw,
            found.block.stored,
            found.place.file,
            found.place.offset,
        )
        records = [own, *found.place.bases]
        stored = [found.stored, *found.stored.bases]
        # The nearest one that is not too deep already.
        first = max(0, len(records) - DEEPEST)
        chain = stored[first:]
        whole = StoredBlock(
            chain[0].file, chain[0].codec, chain[0].offset, chain[0].length, "", chain[0].stored, tuple(chain[1:])
        )
        return Base(records[first:], whole, found.place.age + 1)

    def scratch_bytes(self, base: Base, raw_bytes: int) -> int:
        """Return the memory that `read` takes."""
        return scratch_bytes(base.stored, raw_bytes)

    def read(self, base: Base, block: Block, out: Bytes, scratch: Bytes) -> bool:
        """Fill ``out`` with the raw bytes of a base; False if they are damaged, so that it is of no use."""
        try:
            self._reader.blocks.decode(base.stored, block.leaf.source.dtype, out, scratch)
        except CorruptCheckpointError:
            return False
        return True

    def take(self, base: Base) -> None:
        """Keep the files of a base, whose difference was stored."""
        self._use([record.file for record in base.records])

    def _at(self, block: Block) -> Found | None:
        source = block.leaf.source
        leaf: LeafRecord | None
        leaf, located = self._leaves.get(source.name, (None, []))
        if leaf is None or leaf.dtype != source.dtype.name or leaf.nbytes != source.nbytes:
            return None
        # Its raw bytes are those of one block here and there: see `obstacle`.
        record, place = located[block.index]
        if not all(number in self._names for number in (place.file, *(base.file for base in place.bases))):
            return None
        return Found(record, place, self._reader.tensors[source.name].blocks[block.index])

    def _use(self, numbers: Iterable[int]) -> None:
        self._used.update(numbers)

    def finish(self, directory: Path, first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Remove the links that are not needed; return the records of the others, and their numbers by the old ones.

        Parameters
        ----------
        first : int
            The number of the first of them in the new manifest.
        """
        records: list[FileRecord] = []
        numbers: dict[int, int] = {}
        origin = self._reader.path.name
        for number, name in self._names.items():
            if number not in self._used:
                _remove(directory / name)
                continue
            old = self._reader.manifest.files[number]
            numbers[number] = first + len(records)
            records.append(FileRecord(name, old.bytes, old.head_bytes, old.head, old.origin or origin))
        return records, numbers

    def close(self) -> None:
        """Close its files; a second call does nothing."""
        self._reader.close()


def _remove(link: Path) -> None:
    try:
        os.unlink(link)
    except OSError as error:
        raise store_error(error, link, "remove the link") from error


def _worth_keeping(records: list[FileRecord], live: dict[int, int]) -> list[int]:
    """Return the numbers of the files of which enough is in use."""
    shares = {
        number: count / max(1, records[number].bytes - records[number].head_bytes) for number, count in live.items()
    }
    kept = [number for number, share in shares.items() if share >= LEAST_LIVE]
    return sorted(sorted(kept, key=lambda number: -live[number])[:MOST_FILES])
