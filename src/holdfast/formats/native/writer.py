"""Writing a native checkpoint: data files from many threads, then the indexes, then the manifest, then one rename."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast import plugins
from holdfast.codecs.base import Codec
from holdfast.errors import UsageError
from holdfast.formats import safetensors_header, sealed
from holdfast.formats.base import BLOCK_BYTES, WriteSettings, Written, thread_bytes
from holdfast.formats.native import manifest as manifests
from holdfast.formats.native.coded_tensors import FRAMEWORK_KEY, METADATA_KEY, describe, widest
from holdfast.formats.native.manifest import AliasRecord, FileRecord, LeafRecord, Manifest
from holdfast.formats.native.pack import DEFAULT_SHARD_BYTES, FilePlan, plan_files, tasks_of
from holdfast.formats.native.streams import CodedStream, RawStream, Stream
from holdfast.formats.safetensors_header import TensorRecord
from holdfast.io import parallel
from holdfast.io.buffers import BufferPool
from holdfast.io.commit import Commit
from holdfast.io.files import write_small
from holdfast.state.source import Source
from holdfast.state.tree import Flat
from holdfast.units import parse_bytes
from holdfast.version import __version__


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> Written:
    """Write a state as a native checkpoint; see `holdfast.formats.base.Format.write`."""
    options = settings.only("native", "shard_bytes", "direct_io")
    plans = plan_files(flat, parse_bytes(options.get("shard_bytes", DEFAULT_SHARD_BYTES)))
    codec = chosen_codec(settings.compression)
    chosen_direct_io(options)
    with Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=replaceable) as commit:
        streams = write_streams(commit.path, plans, settings, coded=settings.compression != "none", codec=codec)
        files = [finished.record for finished in streams]
        files += list(_write_indexes(commit.path, streams))
        manifest = _manifest(flat, streams, files, settings)
        content = sealed.seal(manifest)
        write_small(commit.path / manifests.FILE_NAME, content)
        commit.publish()
    return Written(
        stored_bytes=sum(file.bytes for file in files) + len(content),
        peak_buffer_bytes=settings.pool.peak_bytes,
        direct_io=bool(streams) and all(finished.stream.direct for finished in streams),
    )


def chosen_codec(compression: str) -> Codec | None:
    """Return the codec that was asked for by name, or None when each block chooses its own (or none is used)."""
    if compression in ("none", "lossless"):
        return None
    if compression not in plugins.names("codecs"):
        known = ", ".join(["none", "lossless", "auto", *plugins.names("codecs")])
        raise UsageError(f"there is no compression {compression!r}", remedy=f"choose one of: {known}")
    return cast(Codec, plugins.get("codecs", compression))


def chosen_direct_io(options: Mapping[str, Any]) -> bool:
    """Return whether to write around the page cache, which ``direct_io=False`` forbids; UsageError if it is no bool."""
    direct = options.get("direct_io", True)
    if not isinstance(direct, bool):
        raise UsageError(f"direct_io is {direct!r}", remedy="give True or False")
    return direct


@dataclass(frozen=True, slots=True)
class FinishedStream:
    """A data file that is written and durable: its stream, its record, and the offset of each key's bytes in it."""

    stream: Stream
    record: FileRecord
    offsets: dict[str, int]


def write_streams(
    directory: Path,
    plans: list[FilePlan],
    settings: WriteSettings,
    *,
    coded: bool,
    codec: Codec | None = None,
) -> list[FinishedStream]:
    """Write the data files of a checkpoint into a directory, each durable on return.

    Of the format's options, ``direct_io`` is followed here; whoever calls this knows the others.
    """
    direct = chosen_direct_io(settings.options)
    cancellation = parallel.Cancellation()
    meter = parallel.Meter(sum(plan.raw_bytes for plan in plans), settings.progress)
    jobs: list[_Job] = []
    try:
        tasks: list[Callable[[], None]] = []
        for plan in plans:
            job = _Job(
                directory / plan.name,
                plan,
                settings.pool,
                meter,
                coded=coded,
                codec=codec,
                direct=direct,
                cancellation=cancellation,
            )
            jobs.append(job)
            tasks += [functools.partial(job.task, number) for number in range(job.count)]
        # Raw bytes where they have to be gathered, coded bytes, and what a source that is stored itself reads into.
        threads = settings.pool.threads(settings.threads, thread_bytes(BLOCK_BYTES, buffers=3))
        parallel.run(tasks, threads, cancellation)
        return [job.result() for job in jobs]
    finally:
        for job in jobs:
            job.abort()


class _Job:
    """One data file, from plan to durable: open only while its tasks run, because a state may have a thousand parts."""

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        pool: BufferPool,
        meter: parallel.Meter,
        *,
        coded: bool,
        codec: Codec | None,
        direct: bool,
        cancellation: parallel.Cancellation,
    ) -> None:
        self._plan = plan
        self._groups = tasks_of(plan, BLOCK_BYTES)
        self.count = self._left = len(self._groups)
        self._room = len(self._header(widest(plan, BLOCK_BYTES) if coded else describe(plan, {}, BLOCK_BYTES), 0))
        self._begin: Callable[[], Stream]
        if coded:
            self._begin = functools.partial(
                CodedStream, path, plan, self._groups, self._room, pool, meter, codec, cancellation, direct=direct
            )
        else:
            self._begin = functools.partial(RawStream, path, plan, self._groups, self._room, pool, meter, direct=direct)
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._finished: FinishedStream | None = None

    def task(self, number: int) -> None:
        """Write the blocks of a task; the file exists from the first one on, and is durable after the last."""
        self._open().task(number)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finished = self._finish()

    def result(self) -> FinishedStream:
        """Return the file, when all tasks have run."""
        # A file without a byte of data has no task.
        return self._finished or self._finish()

    def abort(self) -> None:
        if self._stream is not None:
            self._stream.abort()

    def _open(self) -> Stream:
        with self._lock:
            if self._stream is None:
                self._stream = self._begin()
            return self._stream

    def _header(self, described: tuple[list[TensorRecord], dict[str, Any]], room: int) -> bytes:
        records, notes = described
        metadata = {FRAMEWORK_KEY: "pt", **self._plan.metadata}
        if notes:
            metadata[METADATA_KEY] = msgspec.json.encode(notes).decode()
        if self._plan.header_order:
            by_name = {record.name: record for record in records}
            records = [by_name[name] for name in self._plan.header_order]
        return safetensors_header.build(records, metadata, room=room or None)

    def _finish(self) -> FinishedStream:
        stream = self._open()
        described = describe(self._plan, stream.records, BLOCK_BYTES)
        header = self._header(described, self._room)
        stream.finish(header)
        record = FileRecord(self._plan.name, stream.size, len(header), sealed.digest(header))
        return FinishedStream(stream, record, {r.name: len(header) + r.start for r in described[0]})


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


def _manifest(
    flat: Flat[Source], streams: list[FinishedStream], files: list[FileRecord], settings: WriteSettings
) -> Manifest:
    records: dict[str, LeafRecord] = {}
    for number, finished in enumerate(streams):
        for leaf in finished.stream.plan.leaves:
            count = -(-leaf.source.nbytes // BLOCK_BYTES)
            records[leaf.source.name] = LeafRecord(
                name=leaf.source.name,
                part=leaf.part,
                key=leaf.key,
                dtype=leaf.source.dtype.name,
                shape=leaf.source.shape,
                file=number,
                offset=finished.offsets[leaf.key],
                blocks=[finished.stream.records[leaf.key, index] for index in range(count)],
            )
    aliases = {
        name: AliasRecord(alias.of, alias.offset_elements, alias.shape, alias.strides, *flat.parts[name])
        for name, alias in flat.aliases.items()
    }
    return Manifest(
        format="holdfast",
        version=manifests.VERSION,
        writer=f"holdfast {__version__}",
        features=[],
        block_bytes=BLOCK_BYTES,
        compression=settings.compression,
        files=files,
        leaves=[records[name] for name in flat.leaves],
        aliases=aliases,
        skeleton=flat.skeleton,
        metadata=settings.metadata,
    )
