"""What all writers of native checkpoints share: staged copies, data files, and the records of their blocks."""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, StagedWrite, WriteResult, WriteSettings, thread_bytes
from tensorkeep.formats.blockfile.plan import (
    Block,
    BlockRecord,
    FilePlan,
    LeafInFile,
    blocks_of,
    tasks_of,
)
from tensorkeep.formats.blockfile.write import (
    CodedDataFile,
    DataFile,
    RawDataFile,
    WriteContext,
    buffers_per_thread,
    find_codec,
    staging_bytes,
    write_files,
)
from tensorkeep.formats.native.incremental import ChangesFile
from tensorkeep.formats.native.options import NativeOptions
from tensorkeep.formats.native.previous import PreviousCheckpoint, open_base
from tensorkeep.formats.native.records import (
    PLACES,
    REFERENCES,
    WIDE_DIGESTS,
    BaseRecord,
    FileRecord,
    PlaceRecord,
    StoredRecord,
)
from tensorkeep.formats.native.staging import Staging
from tensorkeep.paths import as_path
from tensorkeep.storage.buffers import BufferPool, buffer_bytes
from tensorkeep.storage.parallel import Meter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The finished data files of a save: records of these, and of the linked files of an earlier checkpoint.

    ``numbers`` are the numbers of the linked files by those in the earlier manifest, and ``reused`` is whether that was
    used at all; ``refused`` is why not all of it was.
    """

    files: list[DataFile]
    records: list[FileRecord]
    linked: list[FileRecord]
    numbers: dict[int, int]
    reused: bool
    base: PathLike | None
    refused: str | None

    def result(self, settings: WriteSettings, manifest_bytes: int) -> WriteResult:
        """Return the result of the save; ``manifest_bytes`` are those of what lists these files."""
        new_bytes = sum(record.bytes for record in self.records) + manifest_bytes
        return WriteResult(
            stored_bytes=new_bytes + sum(record.bytes for record in self.linked),
            new_bytes=new_bytes,
            peak_buffer_bytes=settings.pool.peak_bytes,
            direct_io=bool(self.files) and all(file.direct for file in self.files),
            base=os.fspath(as_path(self.base)) if self.reused and self.base is not None else None,
            base_refused=self.refused,
        )


class BlockFilesWrite(StagedWrite):
    """The writing of planned data files, block by block; see `tensorkeep.formats.base.StagedWrite`."""

    def __init__(self, plans: list[FilePlan], destination: Path, settings: WriteSettings) -> None:
        super().__init__(destination, settings)
        self._options = options = settings.options_as(NativeOptions)
        self._plans = plans
        self._codec = find_codec(settings.compression)
        self._staging: Staging | None = None
        if options.delta and settings.compression != "lossless":
            raise UsageError(
                "delta=True stores compressed differences, and this save is not compressed",
                remedy='give compression="lossless", or leave delta out',
            )

    @functools.cached_property
    def _tasks(self) -> list[list[Block]]:
        return [task for plan in self._plans for task in tasks_of(plan)]

    def staging_bytes(self) -> int:
        return sum(buffer_bytes(staging_bytes(blocks)) for blocks in self._tasks)

    def prepare(self, pool: BufferPool) -> None:
        self._staging = Staging(self._tasks, pool, self._cancellation)

    def stage(self, threads: int) -> None:
        if self._staging is None:
            raise AssertionError("prepare comes before stage")
        self._staging.copy(threads)
        self._pace.beside.set()

    def abandon(self) -> None:
        if self._staging is not None:
            self._staging.close()

    def _check_budget(self) -> None:
        """Raise UsageError if differences need more memory than the budget."""
        if self._options.delta:
            # Otherwise a too small budget would be found by the second save only: the first has no base.
            buffers = buffers_per_thread(staged=self._staging is not None, delta=True)
            self._settings.pool.threads(1, thread_bytes(BLOCK_BYTES, buffers=buffers))

    def _write_over_base(
        self,
        directory: Path,
        kind: Callable[..., PreviousCheckpoint] = PreviousCheckpoint,
        *,
        ranks: int = 1,
        save_id: str = "",
    ) -> WrittenFiles:
        """Write what the base of the save does not have, and link the rest; everything if it has no base.

        ``kind`` opens the base, and ``ranks`` is how many save together. ``save_id`` is in the names of the files.
        """
        options = self._options
        base: PathLike | None = options.base() if callable(options.base) else options.base
        pool = OpenSettings(pool=self._settings.pool)
        previous, refused = open_base(base, pool, delta=options.delta, optional=callable(options.base), kind=kind)
        with previous or nullcontext():
            used = previous if previous and previous.share_with(directory, len(self._plans), ranks=ranks) else None
            files = self._write_files(directory, used, save_id)
            records = _file_records(files)
            linked, numbers = used.finish(len(records)) if used else ([], {})
        if previous:
            refused = previous.obstacle
        if refused:
            logger.info("not all unchanged blocks were taken from the base %s: %s", base, refused)
        return WrittenFiles(files, records, linked, numbers, used is not None, base, refused)

    def _write_files(self, directory: Path, previous: PreviousCheckpoint | None, save_id: str) -> list[DataFile]:
        settings, options = self._settings, self._options
        context = WriteContext(
            settings.pool,
            Meter(sum(plan.raw_bytes for plan in self._plans), settings.progress),
            self._cancellation,
            self._pace,
            direct=options.direct_io,
            wide=options.wide_digests,
            codec=self._codec,
            save_id=save_id,
        )
        files: list[DataFile]
        if previous is not None:
            files = [ChangesFile(directory, plan, context, previous, delta=options.delta) for plan in self._plans]
        else:
            kind = RawDataFile if settings.compression == "none" else CodedDataFile
            files = [kind(directory, plan, context) for plan in self._plans]
        take = self._staging.take if self._staging is not None else None
        write_files(files, context, settings.threads, take=take, delta=previous is not None and options.delta)
        return files


def _file_records(files: Sequence[DataFile]) -> list[FileRecord]:
    """Return the records of finished data files."""
    return [FileRecord(file.name, file.size, file.header_size, file.header_digest) for file in files]


def features_of(files: Iterable[FileRecord], stored: Iterable[StoredRecord], *, wide: bool) -> list[str]:
    """Return the features that a reader of these files and blocks needs; ``wide`` is whether the checksums are."""
    needed = {
        WIDE_DIGESTS: wide,
        PLACES: any(each.places for each in stored),
        REFERENCES: any("/" in file.name for file in files),
    }
    return [name for name, is_needed in needed.items() if is_needed]


class StoredBlocks(NamedTuple):
    """The blocks of a leaf that was written; see `tensorkeep.formats.native.records.StoredRecord`."""

    file: int
    offset: int
    blocks: list[BlockRecord]
    places: list[PlaceRecord]


def stored_blocks(leaf: LeafInFile, number: int, file: DataFile, numbers: dict[int, int]) -> StoredBlocks:
    """Return the blocks of a leaf of the data file of this number.

    ``numbers`` are the numbers of the linked files by those in the earlier manifest.
    """
    keys = [block.key for block in blocks_of(leaf)]
    offset = file.offsets.get(leaf.key, 0)
    places: list[PlaceRecord] = []
    if isinstance(file, ChangesFile):
        blocks, places = _changed_blocks(keys, offset, number, file, numbers)
    else:
        blocks = [file.records[key] for key in keys]
    return StoredBlocks(number, offset, blocks, places)


def _changed_blocks(
    keys: list[tuple[str, int]], offset: int, number: int, file: ChangesFile, numbers: dict[int, int]
) -> tuple[list[BlockRecord], list[PlaceRecord]]:
    """Return the blocks of a leaf and their places, which are empty if the blocks simply follow one another."""

    def renumber(bases: list[BaseRecord]) -> list[BaseRecord]:
        return [BaseRecord(b.codec, b.length, b.raw, b.stored, numbers[b.file], b.offset) for b in bases]

    blocks: list[BlockRecord] = []
    places: list[PlaceRecord] = []
    for key in keys:
        if key in file.found:
            block, place = file.found[key]
            places.append(PlaceRecord(numbers[place.file], place.offset, renumber(place.bases), place.age))
        else:
            block, base = file.records[key], file.bases.get(key)
            places.append(PlaceRecord(number, offset, renumber(base.records) if base else [], base.age if base else 0))
            offset += block.length
        blocks.append(block)
    if all(place.file == number and not place.bases for place in places):
        places = []
    return blocks, places
