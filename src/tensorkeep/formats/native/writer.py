"""Writer of native checkpoints: data files, indexes, manifest, then one rename."""

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.coded_file import CodedDataFile
from tensorkeep.formats.blockfile.data_file import (
    DataFile,
    WriteContext,
    buffers_per_thread,
    find_codec,
    index_content,
    write_files,
)
from tensorkeep.formats.blockfile.gather import staging_bytes
from tensorkeep.formats.blockfile.plan import (
    CODED_SUFFIX,
    INDEX_SUFFIX,
    SUFFIX,
    Block,
    BlockFileOptions,
    BlockRecord,
    LeafInFile,
    blocks_of,
    plan_files,
    tasks_of,
)
from tensorkeep.formats.blockfile.raw_file import RawDataFile
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.incremental import ChangesFile
from tensorkeep.formats.native.previous import PreviousCheckpoint, open_base
from tensorkeep.formats.native.records import (
    PLACES,
    VERSION,
    WIDE_DIGESTS,
    BaseRecord,
    FileRecord,
    LeafRecord,
    Manifest,
    PlaceRecord,
)
from tensorkeep.formats.native.staging import Staging
from tensorkeep.formats.structure import AliasRecord
from tensorkeep.formats.write import BLOCK_BYTES, StagedWrite, WriteResult, WriteSettings, thread_bytes
from tensorkeep.io.buffers import BufferPool, buffer_bytes
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import write_small
from tensorkeep.io.parallel import Meter
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.version import __version__

logger = logging.getLogger(__name__)


class NativeOptions(BlockFileOptions, frozen=True):
    """The options of the native format.

    Attributes
    ----------
    incremental : bool or None
        Whether later saves may build on this one; by default they may if this one has a base.
    base : path-like, callable or None
        An earlier checkpoint on the same file system: only the blocks that have changed since are written. A callable
        returns it, or None, when the writing begins.
    delta : bool
        Whether changed blocks may be stored as differences from the base; only with ``compression="lossless"``.
    """

    incremental: bool | None = None
    base: Any = None
    delta: bool = False

    def __post_init__(self) -> None:
        if self.base is not None and self.incremental is False:
            raise UsageError("a save with a base is incremental", remedy="leave out incremental=False, or the base")
        if not (self.base is None or callable(self.base) or isinstance(self.base, str | os.PathLike)):
            raise UsageError(f"base is {self.base!r}", remedy="give the path of an earlier checkpoint")

    @property
    def wide_digests(self) -> bool:
        """Whether the checksums of raw blocks have 128 bits, so that later saves may build on this one."""
        return self.base is not None if self.incremental is None else self.incremental


class NativeWrite(StagedWrite):
    """The writing of a native checkpoint; see `tensorkeep.formats.write.StagedWrite`."""

    def __init__(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> None:
        super().__init__(flat, destination, settings)
        self._options = options = settings.options_as(NativeOptions)
        suffix = SUFFIX if settings.compression == "none" else CODED_SUFFIX
        self._plans = plan_files(flat, options.shard_bytes, suffix=suffix)
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

    def _write(self) -> WriteResult:
        settings, options = self._settings, self._options
        if options.delta:
            # Otherwise a too small budget would be found by the second save only: the first has no base.
            buffers = buffers_per_thread(staged=self._staging is not None, delta=True)
            settings.pool.threads(1, thread_bytes(BLOCK_BYTES, buffers=buffers))
        with Commit(
            self._destination, directory=True, overwrite=settings.overwrite, replaceable=is_replaceable
        ) as commit:
            base: PathLike | None = options.base() if callable(options.base) else options.base
            pool = OpenSettings(pool=settings.pool)
            previous, refused = open_base(base, pool, delta=options.delta, optional=callable(options.base))
            with previous or nullcontext():
                used = previous if previous and previous.link_into(commit.path, len(self._plans)) else None
                files = self._write_files(commit.path, used)
                records = [FileRecord(file.name, file.size, file.header_size, file.header_digest) for file in files]
                if used is None and settings.compression == "none":
                    records += _write_indexes(commit.path, files)
                linked, numbers = used.finish(len(records)) if used else ([], {})
            if previous:
                refused = previous.obstacle
            if refused:
                logger.info("not all unchanged blocks were taken from the base %s: %s", base, refused)
            content = sealed.seal(self._manifest(files, records + linked, numbers))
            # A checkpoint that no reader would accept must not be reported as saved.
            manifests.parse(content, self._destination / manifests.FILE_NAME)
            write_small(commit.path / manifests.FILE_NAME, content)
            self._cancellation.check()
            commit.publish()
        new_bytes = sum(record.bytes for record in records) + len(content)
        return WriteResult(
            stored_bytes=new_bytes + sum(record.bytes for record in linked),
            new_bytes=new_bytes,
            peak_buffer_bytes=settings.pool.peak_bytes,
            direct_io=bool(files) and all(file.direct for file in files),
            base=str(Path(base)) if used and base is not None else None,
            base_refused=refused,
        )

    def _write_files(self, directory: Path, previous: PreviousCheckpoint | None) -> list[DataFile]:
        settings, options = self._settings, self._options
        context = WriteContext(
            settings.pool,
            Meter(sum(plan.raw_bytes for plan in self._plans), settings.progress),
            self._cancellation,
            self._pace,
            direct=options.direct_io,
            wide=options.wide_digests,
            codec=self._codec,
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

    def _manifest(self, files: Sequence[DataFile], records: list[FileRecord], numbers: dict[int, int]) -> Manifest:
        """Return the manifest of the finished files of this save.

        ``records`` are those of these files, the indexes and the linked files; ``numbers`` are the numbers of the
        linked files by those in the earlier manifest.
        """
        flat, settings = self._flat, self._settings
        by_name = {
            leaf.source.name: _leaf_record(leaf, number, file, numbers)
            for number, file in enumerate(files)
            for leaf in file.plan.leaves
        }
        leaves = [by_name[name] for name in flat.leaves]
        features = [WIDE_DIGESTS] if self._options.wide_digests else []
        if any(leaf.places for leaf in leaves):
            features.append(PLACES)
        return Manifest(
            format="tensorkeep",
            version=VERSION,
            writer=f"tensorkeep {__version__}",
            features=features,
            block_bytes=BLOCK_BYTES,
            compression=settings.compression,
            files=records,
            leaves=leaves,
            aliases={name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()},
            skeleton=flat.skeleton,
            metadata=settings.metadata,
            step=settings.step,
        )


def _leaf_record(leaf: LeafInFile, number: int, file: DataFile, numbers: dict[int, int]) -> LeafRecord:
    keys = [block.key for block in blocks_of(leaf)]
    offset = file.offsets.get(leaf.key, 0)
    places: list[PlaceRecord] = []
    if isinstance(file, ChangesFile):
        blocks, places = _changed_blocks(keys, offset, number, file, numbers)
    else:
        blocks = [file.records[key] for key in keys]
    dtype, shape = leaf.source.dtype.name, leaf.source.shape
    return LeafRecord(leaf.source.name, leaf.part, leaf.key, dtype, shape, number, offset, blocks, places)


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


def _write_indexes(directory: Path, files: Sequence[DataFile]) -> Iterator[FileRecord]:
    """Write the index that Hugging Face tools read, for each part that has several files."""
    parts: dict[str, list[DataFile]] = {}
    for file in files:
        parts.setdefault(file.plan.part, []).append(file)
    for shards in parts.values():
        if len(shards) > 1:
            name = shards[0].name.rsplit("-00001-of-", 1)[0] + INDEX_SUFFIX
            content = index_content(shards)
            write_small(directory / name, content)
            yield FileRecord(name, len(content), len(content), sealed.digest(content))
