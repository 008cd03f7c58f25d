"""Writing one data file: its stream, from the first task to the header and durability."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tensorkeep.formats import sealed
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.coded import (
    FRAMEWORK_KEY,
    METADATA_KEY,
    Described,
    describe,
    describe_changes,
    widest,
)
from tensorkeep.formats.blockfile.plan import FilePlan, tasks_of
from tensorkeep.formats.blockfile.records import FileRecord
from tensorkeep.formats.blockfile.stream import CodedStream, How, RawStream, Stream
from tensorkeep.formats.native.assembly import FinishedStream
from tensorkeep.formats.native.history import CHANGES_PREFIX
from tensorkeep.formats.native.incremental import ChangesStream
from tensorkeep.formats.native.previous import Previous
from tensorkeep.io.buffers import Buffer


class DataFile:
    """One data file, from plan to durable: open only while its tasks run, because a state may have a thousand parts."""

    def __init__(self, directory: Path, plan: FilePlan, how: How, *, coded: bool, previous: Previous | None) -> None:
        self._plan = plan
        self._groups = tasks_of(plan, BLOCK_BYTES)
        self.count = self._left = len(self._groups)
        self._previous = previous
        # A file that other tools would take for the whole part must not have its name.
        self._path = directory / (plan.name if previous is None else f"{CHANGES_PREFIX}{plan.name}")
        widened = coded or previous is not None
        self._room = len(self._header(self._widest() if widened else describe(plan, {}, BLOCK_BYTES), 0))
        given = self._path, plan, self._groups, self._room, how
        self._begin: Callable[[], Stream]
        if previous is not None:
            self._begin = functools.partial(ChangesStream, *given, previous)
        else:
            self._begin = functools.partial(CodedStream if coded else RawStream, *given)
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._finished: FinishedStream | None = None

    def task(self, number: int, take: Callable[[], Buffer] | None) -> None:
        """Write the blocks of a task; the file exists from the first one on, and is durable after the last."""
        staged = take() if take else None
        try:
            self._open().task(number, staged)
        finally:
            if staged:
                staged.release()
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

    def _widest(self) -> Described:
        delta = self._previous is not None and self._previous.delta
        return widest(self._plan, BLOCK_BYTES, changes=self._previous is not None, delta=delta)

    def _header(self, described: Described, room: int) -> bytes:
        records, notes = described
        metadata = {FRAMEWORK_KEY: "pt", **self._plan.metadata}
        if notes:
            metadata[METADATA_KEY] = msgspec.json.encode(notes).decode()
        if self._plan.header_order:
            by_name = {record.name: record for record in records}
            records = [by_name[name] for name in self._plan.header_order]
        return header.build(records, metadata, room=room or None)

    def _finish(self) -> FinishedStream:
        stream = self._open()
        if isinstance(stream, ChangesStream):
            described = describe_changes(self._plan, stream.records, stream.bases, BLOCK_BYTES)
        else:
            described = describe(self._plan, stream.records, BLOCK_BYTES)
        header = self._header(described, self._room)
        stream.finish(header)
        record = FileRecord(self._path.name, stream.size, len(header), sealed.digest(header))
        return FinishedStream(stream, record, {r.name: len(header) + r.start for r in described[0]})
