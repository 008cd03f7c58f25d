"""An earlier checkpoint, whose blocks a save takes again where they have not changed, or stores the difference from.

The files that hold such blocks are hard-linked into the new checkpoint's directory, so that each checkpoint stands
alone: the file system counts the links, and removing one checkpoint never takes anything from another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import CorruptCheckpointError, StoreError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings
from tensorkeep.formats.blockfile.coded import SMALLEST_DIFFERENCE
from tensorkeep.formats.blockfile.plan import Block
from tensorkeep.formats.blockfile.read import StoredBlock, digest_as, scratch_bytes
from tensorkeep.formats.blockfile.records import (
    WIDE_DIGESTS,
    BaseRecord,
    BlockRecord,
    FileRecord,
    LeafRecord,
    PlaceRecord,
)
from tensorkeep.formats.native.links import Links
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.io.files import Bytes

LEAST_LIVE = 0.5
"""The share of a file's bytes that must still be in use for it to be linked again.

Below, what is left of it is written anew: else a whole file might be kept for one block, for ever.
"""

MOST_FILES = 64
"""Files of earlier saves that one checkpoint may have, unless twice as many as its own are more."""

MOST_DIFFERENCES = 7
"""Times that a block is stored as a difference before it is stored whole again."""

DEEPEST = 1
"""Differences that have to be undone to read a block: more of them make it smaller, and slower to read."""


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
    """An open earlier checkpoint, to be closed.

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
        The first thing that prevented that all of it was used, if anything did.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError
        If it cannot be read.
    """

    def __init__(self, path: Path, settings: OpenSettings, *, delta: bool) -> None:
        self.path = path
        self._opened = OpenFiles(path, settings)
        self.delta = delta
        manifest = self._opened.manifest
        self._leaves = {leaf.name: (leaf, leaf.located()) for leaf in manifest.leaves}
        self._foreign_codecs = self._codecs() - set(CODECS.names())
        self._links: Links | None = None
        self._usable: set[int] = set()
        self._used: set[int] = set()
        self.obstacle: str | None = None
        if manifest.block_bytes != BLOCK_BYTES:
            self.obstacle = f"its blocks have {manifest.block_bytes:,} bytes"
        elif WIDE_DIGESTS not in manifest.features:
            self.obstacle = "it was saved without incremental=True, so that it does not tell what has changed"

    def link_into(self, directory: Path, own_files: int) -> None:
        """Give the files whose blocks are worth keeping names in a new checkpoint's directory.

        Parameters
        ----------
        own_files : int
            How many data files the new checkpoint writes itself.
        """
        if self.obstacle is not None:
            return
        links = self._links = Links(self._opened, directory)
        records, live = self._opened.manifest.files, self._live_bytes()
        worthy = _worth_keeping(records, live)
        kept = worthy[: max(MOST_FILES, 2 * own_files)]
        for number in sorted(kept):
            # Whatever refuses a link (another file system, too many of them, a file that is gone), the blocks of this
            # file are simply written again.
            self._note(links.add(number))
        self._usable = set(links.names)
        if len(kept) < len(worthy):
            self._note(f"{len(worthy) - len(kept)} of its files would be too many, and are written anew")
        for codec in sorted(self._foreign_codecs):
            self._note(f"it holds blocks of codec {codec!r}, which is not installed")
        if live and not worthy:
            self._note(f"less than {LEAST_LIVE:.0%} of each of its files is still in use, so all is written anew")

    def _note(self, obstacle: str | None) -> None:
        self.obstacle = self.obstacle or obstacle

    @property
    def linked(self) -> bool:
        """Whether any file could be linked."""
        return bool(self._usable)

    def _codecs(self) -> set[str]:
        located = [found for _, places in self._leaves.values() for found in places]
        return {block.codec for block, _ in located} | {base.codec for _, place in located for base in place.bases}

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
        found = self._at(block) if self.delta and block.nbytes >= SMALLEST_DIFFERENCE else None
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
        """Fill ``out`` with the raw bytes of a base; False if that fails: its files are then not used any further."""
        expected = base.records[0].raw
        try:
            self._opened.blocks.decode(base.stored, block.leaf.source.dtype, out, scratch)
            if digest_as(expected, out) != expected:
                raise CorruptCheckpointError("the checksum of a block is wrong", path=base.stored.file.path)
        except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
            # The new checkpoint needs none of it, and a failing disk may take seconds to refuse each block.
            self._usable.difference_update(record.file for record in base.records)
            self._note(f"{base.stored.file.path.name} is of no use: {error.message}")
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
        if not all(number in self._usable for number in (place.file, *(base.file for base in place.bases))):
            return None
        if not self._foreign_codecs.isdisjoint((record.codec, *(base.codec for base in place.bases))):
            return None  # whoever saves must be able to read what is saved
        return Found(record, place, self._opened.block(record, place))

    def _use(self, numbers: Iterable[int]) -> None:
        self._used.update(numbers)

    def finish(self, first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Remove the links that are not needed, and return what the manifest says of the others: see `Links.finish`."""
        return self._links.finish(self._used, first) if self._links else ([], {})

    def close(self) -> None:
        """Close its files; a second call does nothing."""
        self._opened.close()


def _worth_keeping(records: list[FileRecord], live: dict[int, int]) -> list[int]:
    """Return the numbers of the files of which enough is in use, those with the most in use first."""
    shares = {
        number: count / max(1, records[number].bytes - records[number].head_bytes) for number, count in live.items()
    }
    return sorted((number for number, share in shares.items() if share >= LEAST_LIVE), key=lambda number: -live[number])
