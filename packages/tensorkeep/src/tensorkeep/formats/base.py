"""The contract of a format: how it describes a state, its writer and its reader."""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from tensorkeep.closing import Closing
from tensorkeep.errors import (
    CorruptCheckpointError,
    PathLike,
    UnsupportedError,
    UnsupportedLeafError,
    UsageError,
    did_you_mean,
)
from tensorkeep.formats.boxes import read_box
from tensorkeep.paths import absolute
from tensorkeep.plugins import Registry
from tensorkeep.state.aliases import Alias
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Bytes, Leaf, Source, side_stream
from tensorkeep.state.skeleton import LeafSpec
from tensorkeep.state.tree import Flat, leaf_specs, renamed
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import ALIGNMENT, Buffer, BufferPool, buffer_bytes
from tensorkeep.storage.parallel import POLL_SECONDS, Cancellation, Pace, Progress, default_threads
from tensorkeep.structs import prepared
from tensorkeep.units import format_bytes

# Sizes in raw bytes. A block is the unit of reading, writing, checksums and compression; one process cuts a tensor into
# blocks of this size.
BLOCK_BYTES = 16 * 1024**2
# The largest blocks that a reader accepts.
MAX_BLOCK_BYTES = 64 * 1024**2
# Where many ranks save: the size of a block, and the least size if a tensor is cut into a number of parts.
RANK_BLOCK_BYTES = 4 * 1024**2
LEAST_BLOCK_BYTES = 128 * 1024  # a power of two

_MOST = 2**63
# Bytes of a tensor, where a length of 0 counts as 1: libraries count so, and some keep a few bits for themselves.
_MOST_SAVED = 2**61
# Part of the state, and key within the part.
PartKey = tuple[str, str]
SourceT = TypeVar("SourceT", bound=Source)


class AliasRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An `Alias` as JSON: offset and strides count elements."""

    of: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    part: str
    # Only manifests store the key; elsewhere, `Structure.parts` has it.
    key: str = ""

    @classmethod
    def of_alias(cls, alias: Alias, part: str, key: str = "") -> "AliasRecord":
        return cls(alias.of, alias.offset_elements, alias.shape, alias.strides, part, key)

    def alias(self) -> Alias:
        return Alias(self.of, self.offset, self.shape, self.strides)


class Structure(msgspec.Struct, frozen=True):
    """How tensors form a nested state: the skeleton, views of stored tensors, part and key of every tensor."""

    skeleton: Any
    aliases: dict[str, AliasRecord]
    parts: dict[str, PartKey]

    @classmethod
    def of_state(cls, flat: Flat[Source]) -> "Structure":
        aliases = {name: AliasRecord.of_alias(alias, flat.parts[name][0]) for name, alias in flat.aliases.items()}
        return cls(flat.skeleton, aliases, flat.parts)

    def flat(self, leaves: Mapping[str, SourceT]) -> Flat[SourceT]:
        """Return the flattened state with these stored tensors, unchecked: see `check_structure`."""
        aliases = {name: record.alias() for name, record in self.aliases.items()}
        return Flat(self.skeleton, leaves, aliases, self.parts)


def check_saveable(flat: Flat[Source]) -> None:
    """Check a state with the readers' rules; UnsupportedLeafError for the first rule that is broken."""
    tensors = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in flat.leaves.items()}
    for name, (dtype, shape) in tensors.items():
        if _extent(shape) * dtype.itemsize >= _MOST_SAVED:
            text = f"a tensor of shape {list(shape)} cannot be saved: not every library can have it"
            raise UnsupportedLeafError(text, name=name, remedy="save it in another shape, x.flatten() for example")
    try:
        # No save may succeed that no load accepts.
        check_structure(flat.skeleton, tensors, flat.aliases, flat.parts)
    except ValueError as error:
        remedy = "rename or leave out what the message names, and report this: it should have had a better message"
        raise UnsupportedLeafError(f"a load would refuse this state: {error}", remedy=remedy) from error


def check_structure(
    skeleton: object,
    tensors: Mapping[str, tuple[DType, tuple[int, ...]]],
    aliases: Mapping[str, Alias],
    parts: Mapping[str, PartKey],
) -> dict[str, LeafSpec]:
    """Return the leaves that a skeleton names, in its order; ValueError if the state cannot be rebuilt."""
    specs = leaf_specs(skeleton)
    known = tensors.keys() | aliases.keys()
    if specs.keys() != known:
        raise ValueError("the structure and the table of tensors do not name the same tensors")
    for name, (dtype, shape) in tensors.items():
        _check_leaf(name, specs[name], dtype, shape)
    for name, alias in aliases.items():
        if alias.of not in tensors or name in tensors:
            raise ValueError(f"{name!r} cannot be a view of {alias.of!r}")
        dtype, shape = tensors[alias.of]
        # Offsets and strides come from the file: a view must not reach outside of its storage.
        alias.validate(shape)
        _check_alias(name, specs[name], alias, specs[alias.of])
        _check_leaf(name, specs[name], dtype, alias.shape)
    # Two tensors with one key would overwrite each other in a file of their part.
    places = list(parts.values())
    if parts.keys() != known:
        raise ValueError("the parts and the table of tensors do not name the same tensors")
    if len(set(places)) != len(places):
        raise ValueError("two tensors have the same part and key")
    # `__metadata__` is not a tensor in a safetensors header.
    if any(not part or not key or key == "__metadata__" for part, key in places):
        raise ValueError("a part or a key has an impossible name")
    return specs


def _check_leaf(name: str, spec: LeafSpec, dtype: DType, shape: tuple[int, ...]) -> None:
    numpy = spec.kind in ("ndarray", "npscalar")
    # The spec comes from the file: an impossible kind would only fail deep inside of torch or numpy.
    if not (dtype.has_numpy if numpy else dtype.has_torch):
        raise ValueError(f"{name!r} cannot be a {spec.kind} of {dtype}")
    if _extent(shape) * (dtype.itemsize if numpy else 1) >= _MOST:
        raise ValueError(f"{name!r} has the impossible shape {list(shape)}")
    if spec.kind == "npscalar" and shape:
        raise ValueError(f"{name!r} is a scalar of shape {list(shape)}")
    if spec.requires_grad and not (dtype.kind in ("float", "complex") or dtype.name.startswith("float")):
        raise ValueError(f"{name!r} cannot track gradients in {dtype}")


def _extent(shape: tuple[int, ...]) -> int:
    # Without lengths of 0: libraries compute this product for an empty tensor, too, and it must not overflow.
    return prod(length for length in shape if length)


def _check_alias(name: str, spec: LeafSpec, alias: Alias, base: LeafSpec) -> None:
    torch_kinds = ("tensor", "parameter")
    # A view has the memory of its base, which belongs either to torch or to numpy.
    if (spec.kind in torch_kinds) != (base.kind in torch_kinds):
        raise ValueError(f"{name!r}, of kind {spec.kind}, cannot be a view of the {base.kind} {alias.of!r}")
    if spec.kind in torch_kinds and min(alias.strides, default=0) < 0:
        raise ValueError(f"{name!r} is a tensor of negative strides")


# Writing: options, settings, results, and writes in two stages.


def thread_bytes(block_bytes: int, *, buffers: int) -> int:
    """Return the pool memory that one thread may use at once, for this many blocks."""
    # A direct read or write covers whole pages, so up to a page more at either end.
    return buffers * buffer_bytes(block_bytes + 2 * ALIGNMENT)


# The years 1 to 9999, in seconds since 1970: the range of Python's calendar.
_FIRST_YEAR, _YEAR_10000 = -62_135_596_800.0, 253_402_300_799.0


class StepRecord(msgspec.Struct, frozen=True):
    """A step of a training run."""

    number: Annotated[int, Meta(ge=0)]
    # Seconds since 1970 (UTC).
    saved_at: Annotated[float, Meta(ge=_FIRST_YEAR, lt=_YEAR_10000)]
    # JSON has no NaN and no infinities.
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]


class FormatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a format; ``__post_init__`` may raise UsageError for options that contradict each other."""


OptionsT = TypeVar("OptionsT", bound=FormatOptions)


def _choices(kind: object) -> str | None:
    """Return a remedy with the values of a `Literal` type; None for other types."""
    # The type may also be a union, such as `Literal["a", "b"] | None`.
    inner = kind if get_origin(kind) is Literal else next((a for a in get_args(kind) if get_origin(a) is Literal), None)
    return None if inner is None else f"choose one of: {', '.join(map(repr, get_args(inner)))}"


@dataclass(frozen=True)
class WriteSettings:
    """How to write; the same for every format."""

    # Replace a checkpoint of the same format at the destination.
    overwrite: bool = False
    # The user's JSON values.
    metadata: dict[str, Any] = field(default_factory=dict)
    # "none", "lossless" or a codec's name; a format that cannot compress refuses all but "none".
    compression: str = "none"
    threads: int = field(default_factory=default_threads)
    # The source of all buffers; its budget limits their memory.
    pool: BufferPool = field(default_factory=BufferPool)
    # Called with (bytes done, bytes in total).
    progress: Progress | None = None
    # An instance of `Format.options`; None means the defaults.
    options: FormatOptions | None = None
    # The step of a training run, for formats that store it.
    step: StepRecord | None = None

    def options_as(self, kind: type[OptionsT]) -> OptionsT:
        """Return the options, or a format's defaults; raises UsageError for the options of another format."""
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
    """The result of writing a checkpoint; `tensorkeep.SaveReport` extends and explains it."""

    stored_bytes: int
    new_bytes: int
    peak_buffer_bytes: int = 0
    direct_io: bool = False
    base: str | None = None
    base_refused: str | None = None


class StagedWrite(ABC):
    """The writing of one checkpoint: `prepare`, `stage`, which copies the state, and `run` in another thread."""

    def __init__(self, destination: Path, settings: WriteSettings) -> None:
        self._destination = destination
        self._settings = settings
        self._cancellation = Cancellation()
        self._pace = Pace(self._cancellation)

    @abstractmethod
    def staging_bytes(self) -> int:
        """Return the buffer bytes for a copy of the whole state; with so many, `stage` never waits for `run`."""

    @abstractmethod
    def prepare(self, pool: BufferPool) -> None:
        """Set the pool for the buffers of the copy; UsageError if its budget is too small for this format."""

    @abstractmethod
    def stage(self, threads: int) -> None:
        """Copy the state; when this returns, the state may change. Raises Cancelled if `run` has failed."""

    def run(self) -> WriteResult:
        """Write the copy or, without `prepare`, the state itself; see `Format.write`. Raises Cancelled if cancelled."""
        try:
            return self._write()
        except BaseException:
            # `stage` may wait in another thread for a buffer that this one will never release.
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
        """Release the copy if `run` will never be called."""


class FullCopyWrite(StagedWrite):
    """A staged write for formats that do not write block by block: `stage` copies the whole state."""

    def __init__(self, format: "Format", flat: Flat[Source], destination: Path, settings: WriteSettings) -> None:
        super().__init__(destination, settings)
        self._format = format
        self._flat = flat
        self._pool: BufferPool | None = None
        self._copies: dict[str, _HostCopy] = {}
        self._copied = threading.Event()

    def staging_bytes(self) -> int:
        return sum(buffer_bytes(leaf.nbytes) for leaf in self._flat.leaves.values())

    def prepare(self, pool: BufferPool) -> None:
        needed = self.staging_bytes()
        if needed > pool.budget:
            raise UsageError(
                f"format {self._format.name!r} copies the whole state to save it in the background, which takes "
                f"{format_bytes(needed)}; the memory budget allows {format_bytes(pool.budget)}",
                path=self._destination,
                remedy="give a larger memory_budget, save in the native format, or call tensorkeep.save",
            )
        self._pool = pool

    def stage(self, threads: int) -> None:
        assert self._pool is not None, "prepare comes before stage"
        tasks: list[Callable[[], None]] = []
        for name, leaf in self._flat.leaves.items():
            # All buffers at once: `prepare` has checked that they fit, so that nothing waits for the writing.
            buffer = self._pool.acquire(leaf.nbytes, self._cancellation)
            self._copies[name] = _HostCopy(leaf.name, leaf.dtype, leaf.shape, leaf.nbytes, buffer)
            for start in range(0, leaf.nbytes, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, leaf.nbytes)
                tasks.append(functools.partial(_copy, leaf, start, stop, buffer.array[start:stop]))
        parallel.run(tasks, threads, self._cancellation)
        self._cancellation.check()
        # Drop the leaves, so that the caller can free their memory.
        self._flat = replace(self._flat, leaves=self._copies)
        self._copied.set()

    def _write(self) -> WriteResult:
        # A failed `stage` sets no event, so the wait looks at the cancellation now and then.
        while self._pool is not None and not self._copied.wait(POLL_SECONDS):
            self._cancellation.check()
        return self._format.write(self._flat, self._destination, self._settings)

    def abandon(self) -> None:
        for copy in self._copies.values():
            copy.buffer.release()


@dataclass(frozen=True, slots=True, eq=False)
class _HostCopy:
    """A copied leaf, as a `tensorkeep.state.leaf.Source`."""

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
    # On a stream of its own: the copy neither waits for kernels that are queued later nor delays them.
    with side_stream(source):
        source.read(start, stop, out)


# Reading.


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint, as `info`, `ls` and `diff` show it."""

    name: str
    part: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    # On disk.
    stored_bytes: int
    # "raw", or the codecs of its blocks joined by "+"; "alias" for a view of another tensor.
    codec: str
    # Relative to the checkpoint.
    file: str
    # The tensor that it is a view of; a view takes no bytes of its own.
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that `verify` found: the file, the tensor and block if known, and what is wrong."""

    message: str
    file: str | None = None
    name: str | None = None
    block: int | None = None


class Reader(Closing, ABC):
    """An open checkpoint; a context manager.

    A subclass sets ``path``, ``metadata`` and ``details``, and calls `_set_state`, which sets ``flat`` and
    ``leaf_specs``.

    Attributes
    ----------
    path : Path
    format : str
        Name of the format.
    flat : Flat of StoredLeaf
        Skeleton, stored tensors, aliases and parts; the tensors in the state's order.
    leaf_specs : dict of str to LeafSpec
        Kind and ``requires_grad`` of every tensor, aliases included, in the state's order: the checked skeleton.
    entries : dict of str to Entry
        Every tensor by name, aliases included, in the state's order.
    metadata, details : dict
        The user's metadata, and what else `info` shows: version, writer, files...
    verifiable : str or None
        What `verify` can check here ("xxh3-64 of every block"), or None if the format stores no checksum.
    buffers : int
        The most block-sized buffers that one reading thread uses at once, its destination included.
    step : StepRecord or None
        The step of a training run, if the format stores it.
    notes : sequence of str
        Warnings for the user, such as files that are not read; each is logged.
    refusal : UnsupportedError or None
        The error of a load that selects placeholders in the state. Without one, a load returns placeholders.
    """

    path: Path
    format: str
    flat: "Flat[StoredLeaf]"
    leaf_specs: dict[str, LeafSpec]
    metadata: dict[str, Any]
    details: dict[str, Any]
    verifiable: str | None = None
    buffers: int = 2
    step: StepRecord | None = None
    notes: Sequence[str] = ()
    refusal: UnsupportedError | None = None

    @abstractmethod
    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes ``start:stop`` of a tensor in C order, verified; from any thread.

        Raises
        ------
        CorruptCheckpointError
            If the stored bytes are not what was written; the content of ``out`` is then undefined.
        """

    def read_box(self, name: str, offsets: Sequence[int], out: Leaf, pool: BufferPool) -> None:
        """Fill a leaf with the box of a tensor that begins at ``offsets`` and has the leaf's shape; from any thread.

        The leaf's memory may have any layout, on any device. To read a large box in several threads, cut it into rows
        at multiples of `block_bytes`. ``pool`` is the pool of `OpenSettings`; a thread takes at most ``buffers``
        buffers from it. Raises the errors of `read`.
        """
        read_box(partial(self.read, name), self.flat.leaves[name].shape, offsets, out, pool, BLOCK_BYTES)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        """Return a context for reading these ranges in this thread; one request may then fetch neighbours."""
        return nullcontext()

    def mapped(self, name: str) -> Bytes | None:
        """Return a stored tensor's bytes as memory mapped over the file, unverified; None if they cannot be mapped.

        The mapping is private: writes to it stay in memory. The mapping outlives the reader.
        """
        return None

    def block_bytes(self, name: str) -> int:
        """Return the alignment, in bytes, of the cheapest reads of a tensor."""
        return BLOCK_BYTES

    def bytes_to_check(self, name: str) -> int:
        """Return how many bytes of a tensor `verify` must read, from its start, to check all stored bytes.

        Fewer than ``nbytes`` where a read checks more than it returns.
        """
        return self.flat.leaves[name].nbytes

    def identity(self) -> str:
        """Return a string that all ranks of a load must agree on: the path, or a checksum of the content."""
        return str(absolute(self.path))

    def audit(self) -> Iterator[Problem]:
        """Yield problems outside the tensors' bytes: in other files, sizes, containers."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Close the files; a second call does nothing."""

    def _set_state(self, flat: "Flat[StoredLeaf]", source: Path, leaf_specs: dict[str, LeafSpec] | None = None) -> None:
        """Check that a state can be rebuilt from its description in ``source``, and set `flat` and `leaf_specs`.

        ``leaf_specs`` is the result of `check_structure`, if it was called already.
        """
        try:
            tensors = {name: (leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items()}
            self.leaf_specs = leaf_specs or check_structure(flat.skeleton, tensors, flat.aliases, flat.parts)
        # RecursionError: a skeleton that is nested too deeply, as only a hostile file has one.
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"its description of the state is wrong: {error}", path=source) from error
        # The skeleton has the state's order; the files of many formats have another one.
        leaves = {name: flat.leaves[name] for name in self.leaf_specs if name in flat.leaves}
        self.flat = Flat(flat.skeleton, leaves, flat.aliases, flat.parts)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return {name: self._entry(name) for name in self.leaf_specs}

    def _entry(self, name: str) -> Entry:
        part, _ = self.flat.parts[name]
        alias = self.flat.aliases.get(name)
        leaf = self.flat.leaves[alias.of if alias else name]
        if alias is None:
            return Entry(name, part, leaf.dtype, leaf.shape, leaf.nbytes, leaf.stored_bytes, leaf.codec, leaf.file)
        nbytes = prod(alias.shape) * leaf.dtype.itemsize
        # A view has no stored bytes of its own: sums over all entries count each byte once.
        return Entry(name, part, leaf.dtype, alias.shape, nbytes, 0, "alias", leaf.file, alias.of)


class RenamedReader(Reader):
    """An open checkpoint under other names: ``names`` maps its own names to them. Closing it closes the checkpoint."""

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._own = {new: own for own, new in names.items()}
        self.path, self.format, self.buffers = reader.path, reader.format, reader.buffers
        self.metadata, self.details = reader.metadata, reader.details
        self._set_state(renamed(reader.flat, names), reader.path)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._reader.read(self._own.get(name, name), start, stop, out)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        return self._reader.ahead([(self._own.get(name, name), start, stop) for name, start, stop in ranges])

    def block_bytes(self, name: str) -> int:
        return self._reader.block_bytes(self._own.get(name, name))

    def close(self) -> None:
        self._reader.close()


class StoredLeaf(msgspec.Struct, frozen=True, eq=False):
    """A tensor in a checkpoint, as a `Source` for writers: converting never holds a whole state."""

    reader: Reader
    name: str
    dtype: DType
    shape: tuple[int, ...]
    stored_bytes: int
    file: str
    codec: str = "raw"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def host_bytes(self) -> Bytes | None:
        return None

    def read(self, start: int, stop: int, out: Bytes) -> None:
        self.reader.read(self.name, start, stop, out)


@dataclass(frozen=True, slots=True)
class OpenSettings:
    """How to open a checkpoint."""

    # Check what is read against its checksums.
    verify: bool = True
    # The source of the reader's buffers. The caller uses the same pool, so that one budget holds for both.
    pool: BufferPool = field(default_factory=BufferPool)
    # Read everything through the page cache; otherwise only what is cached already, and the rest around it.
    page_cache: bool = False
    # Names of classes in pickles; their objects are read as dicts of their attributes.
    allow: frozenset[str] = frozenset()


# A third party adds a format with one file: a `Format` and a `Reader`, imported from `tensorkeep.ext.formats`; an entry
# point in the group `tensorkeep.formats`; and a subclass of `tensorkeep.testing.format_suite.FormatSuite`.
class Format(ABC):
    """How a checkpoint is laid out on disk.

    Attributes
    ----------
    name : str
        The name for ``format=`` and ``--to``.
    options : type of FormatOptions
        The options that `write` takes.
    suffixes : tuple of str
        File name suffixes that mean this format to every tool, the usual one first. `tensorkeep.save` chooses the
        format by them. ``.ckpt`` does not belong to any format: every trainer uses it.
    writes_to_stores : bool
        Whether `write` takes the URL of an object store, a `tensorkeep.paths.StorePath`.
    """

    name: ClassVar[str]
    options: ClassVar[type[FormatOptions]] = FormatOptions
    suffixes: ClassVar[tuple[str, ...]] = ()
    writes_to_stores: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether the path holds a checkpoint of this format, from names and first bytes only.

        Raises
        ------
        StoreError
            If the operating system refuses access, so that the answer is unknown.
        """

    @abstractmethod
    def open(self, path: Path, settings: OpenSettings) -> Reader:
        """Open a checkpoint for reading.

        Raises
        ------
        NotACheckpointError
            If the path does not hold a checkpoint of this format.
        CorruptCheckpointError
            If it is damaged or breaks the rules of the format.
        UnsupportedError
            If it needs a later version, a codec that is not installed, or code from the file.
        StoreError
            If the operating system refuses access.
        """

    @abstractmethod
    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        """Write a flattened state so that it becomes visible completely or not at all, and is durable on return.

        Raises
        ------
        DestinationExistsError
            If something is at the destination that may not be replaced.
        BusyError
            If another process is writing there.
        StoreError
            If the disk fails.
        UnsupportedError
            If the format cannot hold the state, its metadata or the compression.
        UsageError
            If options contradict each other.
        """

    def check(self, destination: Path, settings: WriteSettings) -> None:
        """Check the arguments of a save before the state is looked at; UsageError if they contradict each other.

        The compression may still be ``"auto"``. The default accepts everything.
        """
        return

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> StagedWrite:
        """Return a staged write, which first copies the state and then writes the copy.

        The default copies the whole state before anything is written.
        """
        return FullCopyWrite(self, flat, destination, settings)

    def parse_options(self, given: Mapping[str, object]) -> FormatOptions:
        """Return the options in the keyword arguments of `tensorkeep.save`; their types are checked.

        Raises
        ------
        UsageError
            If an option is unknown, or its value is of the wrong type or contradicts another one.

        Examples
        --------
        >>> FORMATS.get("native").parse_options({"direct_io": False})
        NativeOptions(shard_bytes=None, direct_io=False, incremental=None, base=None, delta=False, files=None)
        """
        types = {field.name: field.type for field in msgspec.structs.fields(self.options)}
        values: dict[str, object] = {}
        for option, value in given.items():
            if option not in types:
                remedy = did_you_mean(option, [*sorted(types), *_SAVE_KEYWORDS], "known options")
                raise UsageError(f"format {self.name!r} has no option {option!r}", remedy=remedy)
            try:
                values[option] = msgspec.convert(value, prepared(types[option]))
            except (msgspec.ValidationError, TypeError, RecursionError) as error:
                remedy = _choices(types[option]) or str(error)
                raise UsageError(f"the option {option} is {value!r:.80}", remedy=remedy) from error
        # Not by msgspec.convert: it would wrap the UsageError of a `__post_init__`.
        return self.options(**values)


# The other keywords of `tensorkeep.save`: a misspelt one arrives as an option of the format.
_SAVE_KEYWORDS = (
    *("compression", "format", "group", "memory_budget", "metadata", "overwrite", "progress", "settings"),
    *("threads", "timeout"),
)

# The package of formats that may not be installed, and the formats of suffixes then.
PACKAGE_ELSEWHERE = "tensorkeep-formats"
SUFFIXES_ELSEWHERE = {".zarr": "tensorstore"}
# All formats that are installed; an entry point of ``tensorkeep.formats`` adds one.
FORMATS: Registry[Format] = Registry(
    "format",
    "tensorkeep",
    PACKAGE_ELSEWHERE,
    elsewhere={"tensorstore": PACKAGE_ELSEWHERE, "t5x": PACKAGE_ELSEWHERE},
)


def format_by_suffix(path: PathLike) -> Format | None:
    """Return the format that the suffix of a path means; None for all other suffixes."""
    suffix = Path(path).suffix.lower()
    return next((format for format in FORMATS if suffix in format.suffixes), None) if suffix else None
