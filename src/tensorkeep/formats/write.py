"""The writing half of a format's contract: settings, options, results, two-stage writes."""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from tensorkeep.errors import UsageError
from tensorkeep.io import parallel
from tensorkeep.io.buffers import ALIGNMENT, Buffer, BufferPool, buffer_bytes
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import POLL_SECONDS, Cancellation, Pace, Progress, default_threads
from tensorkeep.state.cuda import side_stream
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.structs import prepared
from tensorkeep.units import format_bytes

BLOCK_BYTES = 16 * 1024**2
"""The unit of reading, writing, checksums and compression, in raw bytes."""


def thread_bytes(block_bytes: int, *, buffers: int) -> int:
    """Return the pool memory that one thread may use at once: ``buffers`` blocks, each with the pages around it."""
    return buffers * buffer_bytes(block_bytes + 2 * ALIGNMENT)


# The years 1 to 9999, in seconds since 1970: the range of Python's calendar.
_FIRST_YEAR, _YEAR_10000 = -62_135_596_800.0, 253_402_300_799.0


class StepRecord(msgspec.Struct, frozen=True):
    """A step of a training run.

    Attributes
    ----------
    saved_at : float
        Seconds since 1970 (UTC).
    metrics : dict of str to (float or str)
        JSON has no NaN and no infinities: they are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
    """

    number: Annotated[int, Meta(ge=0)]
    saved_at: Annotated[float, Meta(ge=_FIRST_YEAR, lt=_YEAR_10000)]
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]


class FormatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a format: a subclass has one field for each, with a default.

    A format without options uses this class itself. `Format.parse_options` makes an instance from keyword arguments
    and checks the types of the fields; ``__post_init__`` may raise UsageError for options that contradict each other.
    """


OptionsT = TypeVar("OptionsT", bound=FormatOptions)


def parse_options(format_name: str, kind: type[FormatOptions], given: Mapping[str, object]) -> FormatOptions:
    """Return the options of a format that keyword arguments stand for; see `Format.parse_options`."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, object] = {}
    for option, value in given.items():
        if option not in types:
            remedy = f"known options: {', '.join(sorted(types))}" if types else "it takes no options"
            raise UsageError(f"format {format_name!r} has no option {option!r}", remedy=remedy)
        try:
            values[option] = msgspec.convert(value, prepared(types[option]))
        except (msgspec.ValidationError, TypeError, RecursionError) as error:
            remedy = _choices(types[option]) or str(error)
            raise UsageError(f"the option {option} is {value!r:.80}", remedy=remedy) from error
    # Not by msgspec.convert: it would wrap the UsageError of a `__post_init__`.
    return kind(**values)


def _choices(kind: object) -> str | None:
    """Return the valid values of a `Literal` type, or None if it is not one."""
    inner = kind if get_origin(kind) is Literal else next((a for a in get_args(kind) if get_origin(a) is Literal), None)
    return None if inner is None else f"choose one of: {', '.join(map(repr, get_args(inner)))}"


@dataclass(frozen=True)
class WriteSettings:
    """How to write; the same for every format.

    Attributes
    ----------
    overwrite : bool
        Whether to replace a checkpoint of the same format at the destination.
    metadata : dict
        The user's JSON values.
    compression : str
        ``"none"``, ``"lossless"`` or a codec's name; a format that cannot compress refuses all but ``"none"``.
    pool : BufferPool
        Where all buffers come from.
    progress : callable or None
        Called with (bytes done, bytes in total).
    options : FormatOptions or None
        An instance of `Format.options`; None stands for the defaults.
    step : StepRecord or None
        The step of a training run, for formats that store it.
    """

    overwrite: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    compression: str = "none"
    threads: int = field(default_factory=default_threads)
    pool: BufferPool = field(default_factory=BufferPool)
    progress: Progress | None = None
    options: FormatOptions | None = None
    step: StepRecord | None = None

    def options_as(self, kind: type[OptionsT]) -> OptionsT:
        """Return the options, or a format's defaults; raises UsageError if they are those of another format."""
        if self.options is None:
            return kind()
        if not isinstance(self.options, kind):
            raise UsageError(
                f"the options are {type(self.options).__name__}, not {kind.__name__}",
                remedy="make them with the format's parse_options",
            )
        return self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """The result of writing a checkpoint; a report of the save extends it.

    Attributes
    ----------
    stored_bytes : int
        Bytes of all files of the checkpoint.
    new_bytes : int
        Bytes written by this save. In an incremental save, the rest of ``stored_bytes`` is shared with earlier ones.
    peak_buffer_bytes : int
        The most host buffer memory in use at one moment.
    direct_io : bool
        Whether the page cache was bypassed (O_DIRECT); some file systems refuse that.
    base : str or None
        The earlier checkpoint that unchanged blocks were taken from.
    base_refused : str or None
        Why not all blocks that could have been were taken from there.
    """

    stored_bytes: int
    new_bytes: int
    peak_buffer_bytes: int = 0
    direct_io: bool = False
    base: str | None = None
    base_refused: str | None = None


class StagedWrite(ABC):
    """The writing of one checkpoint in two stages, so that the caller waits for the first only.

    `prepare` comes first. Then `stage` copies the state in the caller's thread, and `run` writes it in another thread,
    at the same time or afterwards.
    """

    def __init__(self, destination: Path, settings: WriteSettings) -> None:
        self._destination = destination
        self._settings = settings
        self._cancellation = Cancellation()
        self._pace = Pace(self._cancellation)

    @abstractmethod
    def staging_bytes(self) -> int:
        """Return the buffer bytes that hold a copy of the whole state, so that `stage` never waits for `run`."""

    @abstractmethod
    def prepare(self, pool: BufferPool) -> None:
        """Set the pool that the buffers for the copy come from.

        Raises UsageError if its budget is too small for this format.
        """

    @abstractmethod
    def stage(self, threads: int) -> None:
        """Copy the state; when this returns, the state may change.

        Raises Cancelled if `run` has failed.
        """

    def run(self) -> WriteResult:
        """Write the copy or, if `prepare` was never called, the state itself; see `Format.write`.

        Raises Cancelled if the writing was cancelled.
        """
        try:
            return self._write()
        except BaseException:
            self.cancel()
            raise
        finally:
            self.abandon()

    @abstractmethod
    def _write(self) -> WriteResult:
        """Write the checkpoint; `run` handles failures."""

    def cancel(self) -> None:
        """Make `run` stop as soon as it can; it removes its files."""
        self._cancellation.cancel()

    def hurry(self) -> None:
        """Let `run` use all processors, as the caller waits for it now."""
        self._pace.beside.clear()

    @abstractmethod
    def abandon(self) -> None:
        """Release the copy when `run` will never be called."""


class FullCopyWrite(StagedWrite):
    """A staged write for formats that do not write block by block: the whole state is copied before it is written."""

    def __init__(
        self,
        format_name: str,
        write: Callable[[Flat[Source], Path, WriteSettings], WriteResult],
        flat: Flat[Source],
        destination: Path,
        settings: WriteSettings,
    ) -> None:
        super().__init__(destination, settings)
        self._flat = flat
        self._format_name = format_name
        self._write_format = write
        self._pool: BufferPool | None = None
        self._copies: dict[str, _HostCopy] = {}
        self._copied = threading.Event()

    def staging_bytes(self) -> int:
        return sum(buffer_bytes(leaf.nbytes) for leaf in self._flat.leaves.values())

    def prepare(self, pool: BufferPool) -> None:
        needed = self.staging_bytes()
        if needed > pool.budget:
            raise UsageError(
                f"format {self._format_name!r} copies the whole state to save it in the background, which takes "
                f"{format_bytes(needed)}; the memory budget allows {format_bytes(pool.budget)}",
                path=self._destination,
                remedy="give a larger memory_budget, save in the native format, or call tensorkeep.save",
            )
        self._pool = pool

    def stage(self, threads: int) -> None:
        if self._pool is None:
            raise AssertionError("prepare comes before stage")
        tasks: list[Callable[[], None]] = []
        for name, leaf in self._flat.leaves.items():
            buffer = self._pool.acquire(leaf.nbytes, self._cancellation)
            self._copies[name] = _HostCopy(leaf.name, leaf.dtype, leaf.shape, leaf.nbytes, buffer)
            for start in range(0, leaf.nbytes, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, leaf.nbytes)
                tasks.append(functools.partial(_copy, leaf, start, stop, buffer.array[start:stop]))
        parallel.run(tasks, threads, self._cancellation)
        self._cancellation.check()
        # Without the leaves, so that the caller can free their memory.
        self._flat = replace(self._flat, leaves=self._copies)
        self._copied.set()

    def _write(self) -> WriteResult:
        while self._pool is not None and not self._copied.wait(POLL_SECONDS):
            self._cancellation.check()
        return self._write_format(self._flat, self._destination, self._settings)

    def abandon(self) -> None:
        for copy in self._copies.values():
            copy.buffer.release()


@dataclass(frozen=True, slots=True, eq=False)
class _HostCopy:
    """A leaf's bytes in a buffer; a `tensorkeep.state.leaf.Source`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    buffer: Buffer

    def host_bytes(self) -> Bytes | None:
        return self.buffer.array[: self.nbytes]

    def read(self, start: int, stop: int, out: Bytes) -> None:
        out[:] = self.buffer.array[start:stop]


def _copy(source: Source, start: int, stop: int, out: Bytes) -> None:
    with side_stream(source):
        source.read(start, stop, out)
