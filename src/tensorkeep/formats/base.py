"""The contract of a format: how a checkpoint lies on disk.

A format is one object with a name, registered under the entry point ``tensorkeep.formats``. It recognises its own
files, opens them as a `Reader`, and writes a flattened state. Loading, slicing, verifying, comparing and
converting are built on `Reader.read` alone, so that they work on every format. The exam is
``tensorkeep.testing.format_suite.FormatSuite``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import msgspec

from tensorkeep.errors import UsageError
from tensorkeep.io.buffers import ALIGNMENT, BufferPool, buffer_bytes
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Progress, default_threads
from tensorkeep.state.dtypes import DType
from tensorkeep.state.source import Source
from tensorkeep.state.tree import Flat

BLOCK_BYTES = 16 * 1024**2
"""The unit of reading, writing, checking and compressing, in raw bytes."""


def thread_bytes(block_bytes: int, *, buffers: int) -> int:
    """Return what one thread may hold of a pool at once, in buffers of a block and the pages around it."""
    return buffers * buffer_bytes(block_bytes + 2 * ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint, as `info`, `ls` and `diff` show it.

    Attributes
    ----------
    name, part : str
        The full dotted name, and the part of the state that it belongs to.
    dtype : DType
    shape : tuple of int
    nbytes : int
        Raw bytes.
    stored_bytes : int
        Bytes on disk.
    codec : str
        ``"raw"``, or the codecs of its blocks joined by ``+``.
    file : str
        The file that holds it, relative to the checkpoint.
    alias_of : str or None
        The tensor whose storage it shares; it then takes no bytes of its own.
    """

    name: str
    part: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    stored_bytes: int
    codec: str
    file: str
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that `verify` found: which file, which tensor and block if any, and what is wrong."""

    message: str
    file: str | None = None
    name: str | None = None
    block: int | None = None


class StepRecord(msgspec.Struct, frozen=True):
    """A step of a training run.

    Attributes
    ----------
    number : int
    saved_at : float
        Seconds since 1970 (UTC).
    metrics : dict of str to (float or str)
        ``"nan"``, ``"inf"`` and ``"-inf"`` are texts, because JSON has no such numbers.
    """

    number: int
    saved_at: float
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]


@dataclass(frozen=True)
class WriteSettings:
    """How to write; the same for every format.

    Attributes
    ----------
    overwrite : bool
    metadata : dict
        The user's own, JSON-able.
    compression : str
        ``"none"``, ``"lossless"`` or a codec's name; a format that cannot compress refuses the others.
    threads : int
    pool : BufferPool
        What all buffers come from.
    progress : callable or None
        Called with (bytes done, bytes in all).
    options : dict
        The format's own; it refuses those that it does not know.
    step : StepRecord or None
        Which step of a training run this is, for formats that keep it.
    """

    overwrite: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    compression: str = "none"
    threads: int = field(default_factory=default_threads)
    pool: BufferPool = field(default_factory=BufferPool)
    progress: Progress | None = None
    options: dict[str, Any] = field(default_factory=dict)
    step: StepRecord | None = None

    def only(self, format_name: str, *known: str) -> dict[str, Any]:
        """Return the options.

        Raises
        ------
        UsageError
            If one is not among the known.
        """
        for option in self.options:
            if option not in known:
                remedy = f"known: {', '.join(sorted(known))}" if known else "it takes none"
                raise UsageError(f"format {format_name!r} has no option {option!r}", remedy=remedy)
        return self.options


@dataclass(frozen=True, slots=True)
class Written:
    """What a format says after writing.

    Attributes
    ----------
    stored_bytes : int
        Bytes of all files of the checkpoint.
    peak_buffer_bytes : int
        The most buffer memory held.
    direct_io : bool
        Whether O_DIRECT was used.
    new_bytes : int or None
        Bytes written for it, where that is not all of them.
    base, base_refused : str or None
        The earlier checkpoint that the others were taken from, and why not all that could have been.
    """

    stored_bytes: int
    peak_buffer_bytes: int = 0
    direct_io: bool = False
    new_bytes: int | None = None
    base: str | None = None
    base_refused: str | None = None


class Write(ABC):
    """The writing of one checkpoint in two halves, so that the caller waits for the first only.

    `prepare` comes first. Then `stage` runs in the caller's thread and `run` in another one, at the same time or
    afterwards.
    """

    @abstractmethod
    def staging_bytes(self) -> int:
        """Return the bytes of buffers with which `stage` need not wait for `run`."""

    @abstractmethod
    def prepare(self, pool: BufferPool) -> None:
        """Take the pool that the copies of the state's bytes come from.

        Raises
        ------
        UsageError
            If its budget is too small for this format.
        """

    @abstractmethod
    def stage(self, threads: int) -> None:
        """Copy the state; when this returns, it may change.

        Raises
        ------
        Cancelled
            If `run` has failed.
        """

    @abstractmethod
    def run(self) -> Written:
        """Write what was staged, or, where `prepare` was never called, the state itself; see `Format.write`.

        Raises
        ------
        Cancelled
            If the writing was cancelled.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Let `run` end as soon as it can, and leave nothing behind."""

    @abstractmethod
    def abandon(self) -> None:
        """Give back what was staged, where `run` is never called."""


class Reader(ABC):
    """An open checkpoint; a context manager.

    Attributes
    ----------
    path : Path
    format : str
        Name of the format.
    flat : Flat
        Skeleton, leaves (as `StoredLeaf`), aliases and parts.
    entries : dict of str to Entry
        Every tensor by name, aliases included, in the state's order.
    metadata : dict
        What the user gave when saving.
    details : dict
        What else `info` shows: version, writer, files...
    verifiable : str or None
        What `verify` can check here ("xxh3-64 of every block"), or None when the format stores no checksum.
    buffers : int
        Buffers of a block's size that one reading thread may hold at once, its destination among them.
    step : StepRecord or None
        Which step of a training run it is, where the format keeps that.
    """

    path: Path
    format: str
    flat: Flat[Source]
    entries: dict[str, Entry]
    metadata: dict[str, Any]
    details: dict[str, Any]
    verifiable: str | None = None
    buffers: int = 2
    step: StepRecord | None = None

    @abstractmethod
    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes ``start:stop`` of a leaf's C-order stream, checked; from any thread.

        Raises
        ------
        CorruptCheckpointError
            If what is stored is not what was written; ``out`` must then not be used.
        """

    def block_bytes(self, name: str) -> int:
        """Return the grid on which reading a leaf is cheapest."""
        return BLOCK_BYTES

    def bytes_to_check(self, name: str) -> int:
        """Return how many of a leaf's bytes, from its start, `verify` must read for all that is stored to be checked.

        Fewer than all where a read checks more than it returns.
        """
        return self.flat.leaves[name].nbytes

    def audit(self) -> Iterator[Problem]:
        """Yield what is wrong besides the tensors' own bytes: other files, sizes, containers."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Close the files; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class StoredLeaf:
    """A leaf that lies in a checkpoint; a `Source` for writers, so that converting never holds a whole state."""

    def __init__(self, reader: Reader, name: str, dtype: DType, shape: tuple[int, ...], nbytes: int) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes
        self._reader = reader

    def host_bytes(self) -> Bytes | None:
        return None

    def read(self, start: int, stop: int, out: Bytes) -> None:
        self._reader.read(self.name, start, stop, out)


@dataclass(frozen=True, slots=True)
class OpenSettings:
    """How to open.

    Attributes
    ----------
    verify : bool
        Check what is read.
    pool : BufferPool
        What the reader takes its buffers from. The caller has the same pool, so that one budget holds for both.
    page_cache : bool
        Read everything through the page cache; otherwise only what lies there already, and the rest around it.
    """

    verify: bool = True
    pool: BufferPool = field(default_factory=BufferPool)
    page_cache: bool = False


class Format(ABC):
    """How a checkpoint lies on disk.

    Attributes
    ----------
    name : str
        What ``format=`` and ``--to`` call it.
    """

    name: ClassVar[str]

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Say whether the path holds a checkpoint of this format, by looking at names and first bytes only.

        Raises
        ------
        StoreError
            If the operating system does not let one look, which is no answer.
        """

    @abstractmethod
    def open(self, path: Path, settings: OpenSettings) -> Reader:
        """Open for reading.

        Raises
        ------
        CorruptCheckpointError, UnsupportedError, StoreError
        """

    @abstractmethod
    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> Written:
        """Write a flattened state so that it is visible whole or not at all, and durable on return.

        Raises
        ------
        DestinationExistsError, BusyError, StoreError, UnsupportedError, UsageError
        """

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> Write:
        """Return a write whose first half copies the state and whose second half writes the copy.

        By default the whole state is copied first.
        """
        from tensorkeep.formats.write import WholeCopy

        return WholeCopy(self, flat, destination, settings)
