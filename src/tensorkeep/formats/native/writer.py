"""Writing a native checkpoint: data files from many threads, then the indexes, then the manifest, then one rename."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tensorkeep.codecs import raw
from tensorkeep.codecs.base import CODECS, Codec
from tensorkeep.errors import UsageError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import BLOCK_BYTES, StagedWrite, WriteResult, WriteSettings, thread_bytes
from tensorkeep.formats.blockfile.plan import Block, BlockFileOptions, FilePlan, plan_files, tasks_of
from tensorkeep.formats.blockfile.records import FileRecord
from tensorkeep.formats.blockfile.stream import How
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.assembly import Assembly, FinishedStream
from tensorkeep.formats.native.data_file import DataFile
from tensorkeep.formats.native.history import History, NativeOptions
from tensorkeep.formats.native.previous import Previous
from tensorkeep.formats.native.staging import Staging, memory_for
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import write_small
from tensorkeep.io.parallel import Cancellation
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


class NativeWrite(StagedWrite):
    """The writing of a native checkpoint; see `tensorkeep.formats.base.StagedWrite`."""

    def __init__(
        self, flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
    ) -> None:
        options = settings.options_as(NativeOptions)
        self._flat = flat
        self._destination = destination
        self._settings = settings
        self._replaceable = replaceable
        self._plans = plan_files(flat, options.shard_bytes)
        self._history = History.of(options, settings)
        self._codec = chosen_codec(settings.compression)
        self._cancellation = Cancellation()
        self._staging: Staging | None = None

    def staging_bytes(self) -> int:
        return memory_for(self._groups)

    def prepare(self, pool: BufferPool) -> None:
        self._staging = Staging(self._groups, pool, self._cancellation)

    def stage(self, threads: int) -> None:
        if self._staging is None:
            raise AssertionError("prepare comes before stage")
        self._staging.copy(threads)

    def cancel(self) -> None:
        self._cancellation.cancel()

    def abandon(self) -> None:
        if self._staging is not None:
            self._staging.close()

    def run(self) -> WriteResult:
        try:
            return self._run()
        except BaseException:
            self._cancellation.cancel()
            raise
        finally:
            if self._staging is not None:
                self._staging.close()

    def _run(self) -> WriteResult:
        settings = self._settings
        if self._history.delta:
            # Else the first save would work, which has nothing to be different from, and the second would not.
            settings.pool.threads(1, self._bytes_each())
        with (
            Commit(
                self._destination, directory=True, overwrite=settings.overwrite, replaceable=self._replaceable
            ) as commit,
            self._history.opened(commit.path, len(self._plans)) as previous,
        ):
            streams = write_streams(
                commit.path,
                self._plans,
                settings,
                coded=settings.compression != "none",
                codec=self._codec,
                cancellation=self._cancellation,
                staging=self._staging,
                wide=self._history.incremental,
                previous=previous,
            )
            files = [finished.record for finished in streams]
            if previous is None:
                files += list(_write_indexes(commit.path, streams))
            linked, numbers = previous.finish(len(files)) if previous else ([], {})
            manifest = Assembly(self._flat, streams, files + linked, numbers).manifest(settings, self._history)
            # What no reader would take must not be reported as saved.
            manifests.check(manifest, self._destination / manifests.FILE_NAME)
            content = sealed.seal(manifest)
            write_small(commit.path / manifests.FILE_NAME, content)
            self._cancellation.check()
            commit.publish()
        new_bytes = sum(file.bytes for file in files) + len(content)
        return WriteResult(
            stored_bytes=new_bytes + sum(file.bytes for file in linked),
            peak_buffer_bytes=settings.pool.peak_bytes,
            direct_io=bool(streams) and all(finished.stream.direct for finished in streams),
            new_bytes=new_bytes,
            base=self._history.base_used,
            base_refused=self._history.refused,
        )

    def _bytes_each(self) -> int:
        buffers = buffers_each(staged=self._staging is not None, delta=self._history.delta)
        return thread_bytes(BLOCK_BYTES, buffers=buffers)

    @functools.cached_property
    def _groups(self) -> list[list[Block]]:
        return [group for plan in self._plans for group in tasks_of(plan, BLOCK_BYTES)]


def chosen_codec(compression: str) -> Codec | None:
    """Return the codec that was asked for by name, or None when each block chooses its own (or none is used)."""
    if compression in ("none", "lossless"):
        return None
    if compression not in CODECS.names():
        known = ", ".join(["none", "lossless", "auto", *CODECS.names()])
        raise UsageError(f"there is no compression {compression!r}", remedy=f"choose one of: {known}")
    return CODECS.get(compression)


def write_streams(
    directory: Path,
    plans: list[FilePlan],
    settings: WriteSettings,
    *,
    coded: bool,
    codec: Codec | None = None,
    cancellation: Cancellation | None = None,
    staging: Staging | None = None,
    wide: bool = False,
    previous: Previous | None = None,
) -> list[FinishedStream]:
    """Write the data files of a checkpoint into a directory, each durable on return.

    With a staging, what is written is what was copied there; with an earlier checkpoint, only what has changed since.
    """
    cancellation = cancellation or Cancellation()
    how = How(
        settings.pool,
        parallel.Meter(sum(plan.raw_bytes for plan in plans), settings.progress),
        cancellation,
        direct=settings.options_as(BlockFileOptions).direct_io,
        wide=wide,
        codec=codec if coded else raw.CODEC,
    )
    files: list[DataFile] = []
    try:
        tasks: list[Callable[[], None]] = []
        for plan in plans:
            file = DataFile(directory, plan, how, coded=coded, previous=previous)
            files.append(file)
            for number in range(file.count):
                take = functools.partial(staging.take, len(tasks)) if staging else None
                tasks.append(functools.partial(file.task, number, take))
        buffers = buffers_each(staged=staging is not None, delta=previous is not None and previous.delta)
        threads = settings.pool.threads(settings.threads, thread_bytes(BLOCK_BYTES, buffers=buffers))
        parallel.run(tasks, threads, cancellation)
        cancellation.check()
        return [file.result() for file in files]
    finally:
        for file in files:
            file.abort()


def buffers_each(*, staged: bool, delta: bool) -> int:
    """Return how many buffers of a block's size one writing thread may hold at once.

    Coded bytes; raw bytes where they have to be gathered, and what a source that is stored itself reads into; for
    differences, the earlier block, what it was decoded from, and one difference on the way.
    """
    return (1 if staged else 3) + (3 if delta else 0)


def _write_indexes(directory: Path, streams: list[FinishedStream]) -> Iterator[FileRecord]:
    """Write the index that Hugging Face tools read, for each part that has several files."""
    parts: dict[str, list[FinishedStream]] = {}
    for finished in streams:
        parts.setdefault(finished.stream.plan.part, []).append(finished)
    for files in parts.values():
        if len(files) > 1:
            name = files[0].record.name.rsplit("-00001-of-", 1)[0] + ".safetensors.index.json"
            content = index_content(files)
            write_small(directory / name, content)
            yield FileRecord(name, len(content), len(content), sealed.digest(content))


def index_content(files: list[FinishedStream]) -> bytes:
    """Return the bytes of a ``*.safetensors.index.json``."""
    weight_map = {key: file.record.name for file in files for key in file.offsets}
    total = sum(file.record.bytes - file.record.head_bytes for file in files)
    content: bytes = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weight_map})
    return content
