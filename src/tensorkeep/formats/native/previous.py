"""The base of an incremental save: which blocks are reused, and which are stored as differences.

The files that hold such blocks are hard-linked into the new checkpoint's directory, so that each checkpoint is complete
in itself: the file system counts the links, and removing one checkpoint never breaks another. In an object store, the
new manifest names the objects of the earlier step instead. A block that has changed may be stored as the difference
from the earlier one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorkeep.closing import Closing
from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike, StoreError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings
from tensorkeep.formats.blockfile.header import SMALLEST_DIFFERENCE
from tensorkeep.formats.blockfile.plan import Block, BlockRecord
from tensorkeep.formats.blockfile.read import StoredBlock, digest_as
from tensorkeep.formats.native.links import SharedFiles, share_files
from tensorkeep.formats.native.open_files import OpenFiles, located
from tensorkeep.formats.native.pieces.records import Root
from tensorkeep.formats.native.records import WIDE_DIGESTS, BaseRecord, FileRecord, LeafRecord, PlaceRecord
from tensorkeep.paths import as_path
from tensorkeep.storage.direct_io import Bytes

LEAST_LIVE = 0.5
"""The fraction of a file's bytes that must still be in use for it to be shared again.

Below that, its blocks are written again: otherwise a file might be kept for ever for the sake of one block.
"""

MOST_FILES = 64
"""Files of earlier saves that one checkpoint may have, unless twice the number of its own files is more."""

MAX_DIFFERENCES_IN_A_ROW = 7
"""How many times in a row a block is stored as a difference before it is stored in full again."""

MAX_CHAIN_LENGTH = 1
"""Differences to undo when a block is read: more of them make it smaller, and slower to read."""


NARROW_DIGESTS = "it was saved without incremental=True, so its checksums cannot identify changed blocks"

Located = tuple[BlockRecord, PlaceRecord]
"""A block of the earlier checkpoint, and where it is."""


@dataclass(frozen=True, slots=True)
class DifferenceBase:
    """The blocks that a block may be stored as the difference from: manifest records, and how their XOR is read."""

    records: list[BaseRecord]
    stored: StoredBlock
    age: int


class PreviousCheckpoint(Closing):
    """An open earlier checkpoint that a save takes unchanged blocks from; a context manager.

    It must be native, and saved with ``incremental=True`` or itself with a base. With ``delta``, blocks that have
    changed may be stored as differences. ``obstacle`` is the first reason why not all of it could be used.

    Raises the errors of `OpenFiles`.
    """

    def __init__(self, path: Path, settings: OpenSettings, *, delta: bool) -> None:
        self._opened = OpenFiles(path, settings)
        self._delta = delta
        self._sharing: SharedFiles | None = None
        self._usable_files: set[int] = set()
        self._used_files: set[int] = set()
        self._leaves: dict[str, tuple[LeafRecord, list[Located]]] = {}
        self.obstacle = self._index()
        self._missing_codecs = self._codecs() - set(CODECS.names())

    def _index(self) -> str | None:
        """List the blocks that may be used again; return the reason if none can be."""
        manifest = self._opened.manifest
        if isinstance(manifest, Root):
            return "many ranks saved it together, in other blocks than one process does"
        if manifest.block_bytes != BLOCK_BYTES:
            return f"its blocks have {manifest.block_bytes:,} bytes"
        if WIDE_DIGESTS not in manifest.features:
            return NARROW_DIGESTS
        self._leaves = {leaf.name: (leaf, leaf.located()) for leaf in manifest.leaves}
        return None

    def share_with(self, directory: Path, own_files: int, *, ranks: int = 1) -> bool:
        """Share the files whose blocks are worth keeping with the new checkpoint that is written to a directory.

        ``own_files`` is how many data files the new checkpoint writes itself, or one of many ranks does. Return whether
        any file is shared.
        """
        if self.obstacle is not None:
            return False
        sharing = self._sharing = share_files(self._opened, directory, shared=ranks > 1)
        records, live = self._opened.records, self._live_bytes()
        candidates = self._candidates()
        worthy = [number for number in _worth_keeping(records, live) if number in candidates]
        kept = worthy[: max(MOST_FILES // ranks, 2 * own_files)]
        for number in sorted(kept):
            # If that is refused (another file system, too many links, a missing file), its blocks are written again.
            self._note(sharing.add(number))
        self._usable_files = set(sharing.names)
        if len(kept) < len(worthy):
            self._note(f"{len(worthy) - len(kept)} of its files would be too many, and are written again")
        for codec in sorted(self._missing_codecs):
            self._note(f"it holds blocks of codec {codec!r}, which is not installed")
        if live and not worthy:
            self._note(f"less than {LEAST_LIVE:.0%} of each of its files is still in use, so everything is written")
        return bool(self._usable_files)

    def _note(self, obstacle: str | None) -> None:
        self.obstacle = self.obstacle or obstacle

    def _codecs(self) -> set[str]:
        codecs: set[str] = set()
        for block, place in self._located():
            codecs.add(block.codec)
            codecs.update(base.codec for base in place.bases)
        return codecs

    def _located(self) -> Iterator[Located]:
        """Yield the blocks that may be used again."""
        for _, places in self._leaves.values():
            yield from places

    def _candidates(self) -> set[int]:
        """Return the numbers of the files of these blocks."""
        return {number for _, place in self._located() for number in place.files}

    def _live_bytes(self) -> dict[int, int]:
        """Return the bytes in use of each file, by its number."""
        live: dict[int, int] = defaultdict(int)
        for leaf, _ in self._leaves.values():
            for file, _, length in leaf.ranges():
                live[file] += length
        return live

    def find(self, block: Block, wide_digest: str) -> tuple[BlockRecord, PlaceRecord] | None:
        """Return the earlier block of the same tensor and index, if it has this digest and can be used again."""
        found = self._earlier(block)
        if found is None or found[0].raw != wide_digest:
            return None
        self._used_files.update(found[1].files)
        return found

    def base_of(self, block: Block) -> DifferenceBase | None:
        """Return the blocks that a changed block may be stored as the difference from, or None."""
        found = self._earlier(block) if self._delta and block.nbytes >= SMALLEST_DIFFERENCE else None
        if found is None or found[1].age >= MAX_DIFFERENCES_IN_A_ROW:
            return None
        record, place = found
        own = BaseRecord(record.codec, record.length, record.raw, record.stored, place.file, place.offset)
        records = [own, *place.bases]
        stored = located(record, place, self._opened.files)
        chain = [stored, *stored.bases]
        # The newest base that keeps the chain within the maximum length.
        first = max(0, len(records) - MAX_CHAIN_LENGTH)
        top = chain[first]
        # Without the checksum of its raw bytes, which `read` compares.
        undigested = msgspec.structs.replace(top, raw="", bases=tuple(chain[first + 1 :]))
        return DifferenceBase(records[first:], undigested, place.age + 1)

    def read(self, base: DifferenceBase, block: Block, out: Bytes, scratch: Bytes) -> bool:
        """Fill ``out`` with the raw bytes of a base; return False if that fails.

        Its files are then not used again in this save. ``scratch`` has the `scratch_bytes` of ``base.stored``.
        """
        expected = base.records[0].raw
        try:
            self._opened.blocks.decode(base.stored, block.leaf.source.dtype, out, scratch)
            if digest_as(expected, out) != expected:
                raise CorruptCheckpointError("the checksum of a block is wrong", path=base.stored.file.path)
        except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
            # The new checkpoint does not depend on it, and a failing disk may take seconds to refuse each block.
            self._usable_files.difference_update(record.file for record in base.records)
            self._note(f"{base.stored.file.path.name} cannot be used: {error.message}")
            return False
        return True

    def keep(self, base: DifferenceBase) -> None:
        """Keep the files of a base, because a difference from it was stored."""
        self._used_files.update(record.file for record in base.records)

    def _lookup(self, block: Block) -> Located | None:
        """Return the earlier block that covers the same elements."""
        source = block.leaf.source
        leaf, located = self._leaves.get(source.name, (None, []))
        if leaf is None or leaf.dtype != source.dtype.name or leaf.nbytes != source.nbytes:
            return None
        # The block covers the same raw bytes there: see `obstacle` for other block sizes.
        return located[block.index]

    def _earlier(self, block: Block) -> Located | None:
        found = self._lookup(block)
        if found is None:
            return None
        record, place = found
        if not self._usable_files.issuperset(place.files):
            return None
        if not self._missing_codecs.isdisjoint((record.codec, *(base.codec for base in place.bases))):
            return None  # the codec is not installed, so the block could not be read back
        return found

    def finish(self, first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Share only the files that are used; return their records and new numbers, as `SharedFiles.finish`."""
        return self._sharing.finish(self._used_files, first) if self._sharing else ([], {})

    def close(self) -> None:
        """Close its files."""
        self._opened.close()


def _worth_keeping(records: list[FileRecord], live: dict[int, int]) -> list[int]:
    """Return the numbers of the files of which enough is in use, those with the most in use first."""
    fractions = {
        number: count / max(1, records[number].bytes - records[number].head_bytes) for number, count in live.items()
    }
    worthy = (number for number, fraction in fractions.items() if fraction >= LEAST_LIVE)
    return sorted(worthy, key=lambda number: -live[number])


def open_base(
    base: PathLike | None,
    settings: OpenSettings,
    *,
    delta: bool,
    optional: bool,
    kind: Callable[..., PreviousCheckpoint] = PreviousCheckpoint,
) -> tuple[PreviousCheckpoint | None, str | None]:
    """Return the opened base of a save, or the reason why it cannot be used; neither if there is no base.

    A damaged or unreadable base is not an error: then everything is written.

    Raises NotACheckpointError if the path holds no checkpoint, unless it is ``optional``.
    """
    if base is None:
        return None, None
    try:
        return kind(as_path(base), settings, delta=delta), None
    except NotACheckpointError as error:
        if not optional:
            raise NotACheckpointError(
                f"cannot be the base of a save: {error.message}",
                path=error.path,
                remedy="correct base=, or leave it out",
            ) from error
        return None, str(error)
    except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
        return None, str(error)
