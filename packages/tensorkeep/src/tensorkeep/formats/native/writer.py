"""Writing native checkpoints: data files, then the JSON file that lists them, then the commit."""

import functools
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, PartKey, StagedWrite, WriteResult, WriteSettings
from tensorkeep.formats.blockfile import plan as layout
from tensorkeep.formats.blockfile import write as data_files
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.incremental import BaseCheckpoint, IncrementalFile, locations, open_base
from tensorkeep.paths import as_path
from tensorkeep.state.leaf import Source
from tensorkeep.state.sharded import TensorShard
from tensorkeep.state.tree import Flat
from tensorkeep.storage import parallel, storage_of, write_file
from tensorkeep.storage.buffers import Buffer, BufferPool, buffer_bytes
from tensorkeep.storage.parallel import POLL_SECONDS, Cancellation, Meter, Order
from tensorkeep.storage.store_commit import object_name
from tensorkeep.version import __version__

logger = logging.getLogger(__name__)


class NativeOptions(layout.BlockFileOptions, frozen=True):
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
    files : mapping of str to str or bytes
        Contents by name of small files to put beside the weights, such as ``config.json`` for ``from_pretrained``.
    """

    incremental: bool | None = None
    base: Any = None
    delta: bool = False
    files: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.files, Mapping | None):
            text = f"`files` is of type {type(self.files).__name__}"
            raise UsageError(text, remedy='give contents by name, as {"config.json": TEXT}')
        files: dict[str, bytes] = {}
        for name, content in (self.files or {}).items():
            if not (isinstance(name, str) and re.fullmatch(manifests.ATTACHED_NAMES, name)):
                remedy = "attach what from_pretrained reads, such as config.json; put other values into the state"
                raise UsageError(f"the file {name!r} cannot be attached to a checkpoint", remedy=remedy)
            if not isinstance(content, str | bytes):
                raise UsageError(
                    f"the content of {name} is of type {type(content).__name__}", remedy="give str or bytes"
                )
            try:
                files[name] = content.encode() if isinstance(content, str) else content
            except UnicodeEncodeError as error:
                raise UsageError(f"the content of {name} is not text: {error}", remedy="give its bytes") from None
        # The caller may change the mapping while a save runs in the background.
        msgspec.structs.force_setattr(self, "files", files or None)
        if self.base is not None and self.incremental is False:
            raise UsageError("a save with a base is incremental", remedy="leave out incremental=False, or the base")
        if not (self.base is None or callable(self.base) or isinstance(self.base, str | os.PathLike)):
            raise UsageError(f"base is {self.base!r}", remedy="give the path of an earlier checkpoint")

    @property
    def wide_digests(self) -> bool:
        # Only checksums of 128 bits let later saves build on this one.
        return self.base is not None if self.incremental is None else self.incremental


# The blocks of a leaf that was written: the fields of `StoredRecord`.
StoredBlocks = tuple[int, int, list[layout.BlockRecord], list[manifests.BlockLocation]]


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    files: list[data_files.DataFile]
    # The shared files come last.
    records: list[manifests.FileRecord]
    # File numbers among `records`, by file number in the base.
    numbers: dict[int, int]
    # The base if blocks were taken from it, and why not all unchanged blocks were.
    base: PathLike | None
    refused: str | None

    def leaves(self) -> Iterator[tuple[layout.LeafInFile, StoredBlocks]]:
        for number, file in enumerate(self.files):
            for leaf in file.plan.leaves:
                keys = [block.key for block in layout.blocks_of(leaf)]
                offset = file.offsets.get(leaf.key, 0)
                if isinstance(file, IncrementalFile):
                    yield leaf, (number, offset, *locations(keys, offset, number, file, self.numbers))
                else:
                    yield leaf, (number, offset, [file.records[key] for key in keys], [])

    def features(self, stored: Iterable[manifests.StoredRecord], *, wide: bool) -> list[str]:
        # Only what the checkpoint uses: releases without a feature can still read the others.
        needed = {
            manifests.WIDE_DIGESTS: wide,
            manifests.PLACES: any(each.places for each in stored),
            manifests.REFERENCES: any("/" in file.name for file in self.records),
        }
        return [name for name, is_needed in needed.items() if is_needed]

    def result(self, settings: WriteSettings, json_bytes: int) -> WriteResult:
        new_bytes = sum(record.bytes for record in self.records if not record.origin) + json_bytes
        return WriteResult(
            stored_bytes=new_bytes + sum(record.bytes for record in self.records if record.origin),
            new_bytes=new_bytes,
            peak_buffer_bytes=settings.pool.peak_bytes,
            direct_io=bool(self.files) and all(file.direct for file in self.files),
            base=os.fspath(as_path(self.base)) if self.base is not None else None,
            base_refused=self.refused,
        )


class NativeWrite(StagedWrite):
    def __init__(
        self, plans: list[layout.FilePlan], destination: Path, settings: WriteSettings, cuts: layout.Cuts
    ) -> None:
        super().__init__(destination, settings)
        self._options = options = settings.options_as(NativeOptions)
        self._plans = plans
        self._cuts = cuts
        self._codec = data_files.find_codec(settings.compression)
        self._staging: Staging | None = None
        if options.delta and settings.compression != "lossless":
            raise UsageError(
                "delta=True stores compressed differences, and this save is not compressed",
                remedy='give compression="lossless", or leave delta out',
            )

    @functools.cached_property
    def _tasks(self) -> list[list[layout.Block]]:
        return [task for plan in self._plans for task in layout.tasks_of(plan)]

    def staging_bytes(self) -> int:
        return sum(buffer_bytes(data_files.staging_bytes(blocks)) for blocks in self._tasks)

    def prepare(self, pool: BufferPool) -> None:
        self._staging = Staging(self._tasks, pool, self._cancellation)

    def stage(self, threads: int) -> None:
        assert self._staging is not None, "prepare comes before stage"
        self._staging.copy(threads)
        # From here on, the caller computes beside the writing, which then leaves it some processors.
        self._pace.beside.set()

    def abandon(self) -> None:
        if self._staging is not None:
            self._staging.close()

    def _check_budget(self) -> None:
        if self._options.delta:
            # The first save has no base: without this check, only the second save would find a too small budget.
            self._settings.pool.threads(1, data_files.bytes_per_thread(staged=self._staging is not None, delta=True))

    def _write_data(self, directory: Path, *, save_id: str, ranks: int = 1) -> WrittenFiles:
        """Write the blocks that the base lacks, and share its files with the others; names contain ``save_id``."""
        options = self._options
        # Asked as late as possible: the step before this one may only now be durable.
        path: PathLike | None = options.base() if callable(options.base) else options.base
        sources = [leaf.source for plan in self._plans for leaf in plan.leaves]
        opening = OpenSettings(pool=self._settings.pool)
        # A callable names what it last saved, which may be gone; a path was written by the user.
        optional = callable(options.base)
        base, refused = open_base(path, opening, sources, self._cuts, delta=options.delta, optional=optional)
        # The base stays open to the end: its files must remain readable, and are shared only when all blocks are known.
        with base or nullcontext():
            used = base if base and base.share_with(directory, len(self._plans), ranks=ranks) else None
            files = self._write_files(directory, used, save_id)
            records = [
                manifests.FileRecord(file.name, file.size, file.header_size, file.header_digest) for file in files
            ]
            shared, numbers = used.finish(len(records)) if used else ([], {})
        if base:
            refused = base.obstacle
        if refused:
            logger.info("not all unchanged blocks were taken from the base %s: %s", path, refused)
        return WrittenFiles(files, records + shared, numbers, path if used else None, refused)

    def _attach_files(self, directory: Path, save_id: str) -> Iterator[manifests.FileRecord]:
        for name, content in (self._options.files or {}).items():
            yield _write_whole(directory, object_name(name, save_id), content)

    def _write_files(self, directory: Path, base: BaseCheckpoint | None, save_id: str) -> list[data_files.DataFile]:
        settings, options = self._settings, self._options
        context = data_files.WriteContext(
            settings.pool,
            Meter(sum(plan.raw_bytes for plan in self._plans), settings.progress),
            self._cancellation,
            self._pace,
            direct=options.direct_io,
            wide=options.wide_digests,
            codec=self._codec,
            save_id=save_id,
        )
        files: list[data_files.DataFile]
        if base is not None:
            files = [IncrementalFile(directory, plan, context, base, delta=options.delta) for plan in self._plans]
        else:
            kind = data_files.RawFile if settings.compression == "none" else data_files.CompressedFile
            files = [kind(directory, plan, context) for plan in self._plans]
        take = self._staging.take if self._staging is not None else None
        data_files.write_files(files, context, settings.threads, take=take, delta=base is not None and options.delta)
        return files


def _suffix(settings: WriteSettings) -> str:
    return layout.SUFFIX if settings.compression == "none" else layout.CODED_SUFFIX


class SingleProcessWrite(NativeWrite):
    def __init__(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> None:
        plans = layout.plan_files(flat, settings.options_as(NativeOptions).shard_bytes, suffix=_suffix(settings))
        super().__init__(plans, destination, settings, layout.ByteCuts(BLOCK_BYTES))
        self._flat = flat

    def _write(self) -> WriteResult:
        settings = self._settings
        self._check_budget()
        with commit_to(self._destination, overwrite=settings.overwrite) as commit:
            written = self._write_data(commit.path, save_id=commit.save_id)
            # Indexes would name files that hold some blocks only, or compressed ones.
            if written.base is None and settings.compression == "none":
                written.records.extend(_write_indexes(commit.path, written.files, commit.save_id))
            written.records.extend(self._attach_files(commit.path, commit.save_id))
            content = checksummed_json.seal(self._manifest(written))
            # No save may succeed that no load accepts.
            with as_a_reader():
                manifests.parse(content, self._destination / manifests.FILE_NAME)
            self._cancellation.check()
            # Data files and indexes are durable now. After this line, the checkpoint exists.
            commit.publish(content)
        return written.result(settings, len(content))

    def _manifest(self, written: WrittenFiles) -> manifests.Manifest:
        flat, settings = self._flat, self._settings
        by_name: dict[str, manifests.LeafRecord] = {}
        for leaf, stored in written.leaves():
            source = leaf.source
            by_name[source.name] = manifests.LeafRecord(
                source.name, leaf.part, leaf.key, source.dtype.name, source.shape, *stored
            )
        leaves = [by_name[name] for name in flat.leaves]
        return manifests.Manifest(
            format="tensorkeep",
            version=manifests.VERSION,
            writer=f"tensorkeep {__version__}",
            features=[
                *written.features(leaves, wide=self._options.wide_digests),
                *manifests.features_of_skeleton(flat.skeleton),
            ],
            block_bytes=BLOCK_BYTES,
            compression=settings.compression,
            files=written.records,
            leaves=leaves,
            aliases=manifests.alias_records(flat),
            skeleton=flat.skeleton,
            metadata=settings.metadata,
            step=settings.step,
        )


def _write_indexes(
    directory: Path, files: Sequence[data_files.DataFile], save_id: str
) -> Iterator[manifests.FileRecord]:
    parts: dict[str, list[data_files.DataFile]] = {}
    for file in files:
        parts.setdefault(file.plan.part, []).append(file)
    for shards in parts.values():
        # Tools that load a part from several files look for this index.
        if len(shards) > 1:
            name = object_name(shards[0].name.rsplit("-00001-of-", 1)[0] + layout.INDEX_SUFFIX, save_id)
            yield _write_whole(directory, name, data_files.index_content(shards))


def _write_whole(directory: Path, name: str, content: bytes) -> manifests.FileRecord:
    write_file(directory / name, content)
    # Without blocks, so that the checksum of its head is the checksum of the whole file.
    return manifests.FileRecord(name, len(content), len(content), checksummed_json.digest(content))


class SaveCoordinator(Protocol):
    """How the ranks of one save act together; the format itself does not communicate."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def begin(self) -> tuple[Path, str]:
        """Wait for the staging folder, in an object store the checkpoint's prefix; return it, and the save's name."""

    def finish(self, report: manifests.FragmentReport) -> None:
        """Wait until rank 0 has published the checkpoint. Raises on every rank if one has failed."""


class ShardedWrite(NativeWrite):
    """The writing of one rank's boxes; with the ``parts`` of the full state, all ranks name files alike."""

    def __init__(
        self,
        shards: Sequence[TensorShard],
        parts: Mapping[str, PartKey],
        destination: Path,
        settings: WriteSettings,
        coordinator: SaveCoordinator,
        *,
        grid: layout.Grid | None = None,
    ) -> None:
        self._grid = grid or (layout.RAW_GRID if settings.compression == "none" else layout.CODED_GRID)
        self._coordinator = coordinator
        shard_bytes = settings.options_as(NativeOptions).shard_bytes
        plans = layout.plan_shards(
            shards, parts, shard_bytes, suffix=_suffix(settings), rank=coordinator.rank, grid=self._grid
        )
        super().__init__(plans, destination, settings, self._grid)

    def _write(self) -> WriteResult:
        rank, size = self._coordinator.rank, self._coordinator.size
        self._check_budget()
        directory, save = self._coordinator.begin()
        # On a disk, all ranks write into one staging folder. In a store, the id keeps the objects of two saves apart.
        names_id = manifests.save_id(save) if storage_of(directory).remote else ""
        written = self._write_data(directory, save_id=names_id, ranks=size)
        if rank == 0:
            written.records.extend(self._attach_files(directory, names_id))
        fragment, tensors = self._fragment(written, save)
        content = checksummed_json.seal(fragment)
        path = directory / object_name(manifests.fragment_name(rank), names_id)
        # No rank may report as saved what no load accepts.
        with as_a_reader():
            manifests.check_fragment(manifests.parse_fragment(content, path, save, size, rank), path, tensors)
        self._cancellation.check()
        # The fragment comes after its data, and rank 0 publishes after all fragments: a crash at any point leaves
        # nothing that looks like a checkpoint.
        write_file(path, content)
        result = written.result(self._settings, len(content))
        record = manifests.FragmentRecord(path.name, len(content), checksummed_json.digest(content, wide=True))
        self._coordinator.finish(
            manifests.FragmentReport.of_fragment(fragment, record, result.stored_bytes, result.new_bytes)
        )
        return result

    def _fragment(
        self, written: WrittenFiles, save: str
    ) -> tuple[manifests.Fragment, dict[str, manifests.TensorDescription]]:
        leaves: dict[str, int] = {}
        boxes: list[manifests.BoxRecord] = []
        tensors: dict[str, manifests.TensorDescription] = {}
        for leaf, stored in written.leaves():
            shard = leaf.source
            assert isinstance(shard, TensorShard)
            # A rank may have several boxes of one tensor.
            index = leaves.setdefault(shard.name, len(leaves))
            boxes.append(manifests.BoxRecord(index, shard.offsets, shard.shape, *stored))
            tensors[shard.name] = manifests.TensorDescription(
                shard.name, leaf.part, leaf.key, shard.dtype.name, shard.whole
            )
        fragment = manifests.Fragment(
            format=manifests.FRAGMENT_FORMAT,
            version=manifests.FRAGMENT_VERSION,
            features=written.features(boxes, wide=self._options.wide_digests),
            save=save,
            rank=self._coordinator.rank,
            ranks=self._coordinator.size,
            grid_bytes=self._grid.most_bytes,
            grid_parts=self._grid.parts,
            files=written.records,
            leaves=list(leaves),
            boxes=boxes,
        )
        return fragment, tensors


class Staging:
    """Copies of a state's blocks, made before the caller continues, in the order of the writes."""

    def __init__(self, groups: list[list[layout.Block]], pool: BufferPool, cancellation: Cancellation) -> None:
        self._groups = groups
        self._pool = pool
        # Shared with the writing, so that the failure of one ends the other.
        self._cancellation = cancellation
        self._order = Order(cancellation)
        self._ready: dict[int, Buffer] = {}
        self._closed = False
        self._changed = threading.Condition()

    def copy(self, threads: int) -> None:
        """Copy all blocks; when this returns, the state may change. Raises Cancelled if the writing has failed."""
        tasks = (functools.partial(self._copy, number) for number in range(len(self._groups)))
        parallel.run(tasks, threads, self._cancellation)
        self._cancellation.check()

    def _copy(self, number: int) -> None:
        blocks = self._groups[number]
        # In the order of the tasks, so that a state larger than the budget streams through the pool: the copying waits
        # for buffers that the writing releases, and never for one that a later task holds.
        with self._order.turn(number):
            buffer = self._pool.acquire(data_files.staging_bytes(blocks), self._cancellation)
        try:
            data_files.stage(blocks, buffer.array)
        except BaseException:
            buffer.release()
            raise
        with self._changed:
            # The writing may have failed and closed this meanwhile: then nobody takes the copy.
            if self._closed:
                buffer.release()
            else:
                self._ready[number] = buffer
            self._changed.notify_all()

    def take(self, number: int) -> Buffer:
        """Wait for the copy of a task's blocks and return it; the caller releases it."""
        with self._changed:
            while number not in self._ready:
                # A copy that fails notifies nobody, so the wait ends now and then to look for it.
                self._cancellation.check()
                self._changed.wait(timeout=POLL_SECONDS)
            return self._ready.pop(number)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for buffer in self._ready.values():
                buffer.release()
            self._ready.clear()
