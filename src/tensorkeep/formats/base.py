"""The contract of a format: its layout on disk, its reader and its writer.

A format is one object with a name, registered under the entry point ``tensorkeep.formats``. It recognises its own
files, opens them as a `Reader`, and writes a flattened state. Loading, slicing, verifying, comparing and converting
use `Reader.read` alone, so they work with every format. ``tensorkeep.testing.format_suite.FormatSuite`` is the
conformance suite. ``formats/write.py`` is the writing half of the contract: settings, options and results.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tensorkeep.closing import Closing
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.box_copies import read_box
from tensorkeep.formats.structure import check_structure
from tensorkeep.formats.write import (
    BLOCK_BYTES,
    FormatOptions,
    FullCopyWrite,
    StagedWrite,
    StepRecord,
    WriteResult,
    WriteSettings,
    parse_options,
)
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.paths import StorePath, absolute
from tensorkeep.plugins import Registry
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Leaf, Source
from tensorkeep.state.skeleton_reader import LeafSpec
from tensorkeep.state.tree import Flat


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint, as `info`, `ls` and `diff` show it.

    Attributes
    ----------
    name, part : str
        The full dotted name, and the part of the state that it belongs to.
    dtype : DType
    shape : tuple of int
    nbytes, stored_bytes : int
        Raw bytes, and bytes on disk.
    codec : str
        ``"raw"``, or the codecs of its blocks joined by ``+``; ``"alias"`` for a view of another tensor.
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
        What the user gave when saving, and what else `info` shows: version, writer, files...
    verifiable : str or None
        What `verify` can check here ("xxh3-64 of every block"), or None if the format stores no checksum.
    buffers : int
        The most block-sized buffers that one reading thread uses at once, its destination included.
    step : StepRecord or None
        The step of a training run, if the format stores it.
    notes : sequence of str
        What a user should know of it, such as files that are not read; each is logged as a warning.
    refusal : UnsupportedError or None
        The error of a load that does not leave out the placeholders in the state. Without one, a load returns them.
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

        The leaf's memory may be of any layout, on any device. To read a large box in several threads, cut it into rows
        at multiples of `block_bytes`. ``pool`` is that of `OpenSettings`; a thread takes no more from it than the
        ``buffers`` above. Raises the errors of `read`.
        """
        read_box(partial(self.read, name), self.flat.leaves[name].shape, offsets, out, pool)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        """Return a context in which this thread reads ranges of tensors; neighbours may then be read by one request."""
        return nullcontext()

    def mapped(self, name: str) -> Bytes | None:
        """Return a stored tensor's bytes as memory mapped over the file, unverified; None if they cannot be mapped.

        The mapping is private: what is written to it stays in memory. It outlives the reader.
        """
        return None

    def block_bytes(self, name: str) -> int:
        """Return the alignment, in bytes, at which reading a tensor is cheapest."""
        return BLOCK_BYTES

    def bytes_to_check(self, name: str) -> int:
        """Return the number of bytes of a tensor that `verify` must read, from its start, to check all stored bytes.

        Less than all of them where a read checks more than it returns.
        """
        return self.flat.leaves[name].nbytes

    def identity(self) -> str:
        """Return what the ranks of a load compare: the path, or where the format has one a checksum of all content."""
        return str(self.path) if isinstance(self.path, StorePath) else str(absolute(self.path))

    def audit(self) -> Iterator[Problem]:
        """Yield problems outside the tensors' bytes: in other files, sizes, containers."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Close the files; a second call does nothing."""

    def _set_state(self, flat: "Flat[StoredLeaf]", source: Path, leaf_specs: dict[str, LeafSpec] | None = None) -> None:
        """Check that a state can be rebuilt from its description, and set `flat` and `leaf_specs`.

        The stored tensors may be in any order. ``source`` is the file that describes the state, for errors;
        ``leaf_specs`` is the result of `check_structure`, if it was called already. Raises CorruptCheckpointError if
        skeleton, tensors, aliases and parts contradict each other.
        """
        try:
            tensors = {name: (leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items()}
            self.leaf_specs = leaf_specs or check_structure(flat.skeleton, tensors, flat.aliases, flat.parts)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"its description of the state is wrong: {error}", path=source) from error
        leaves = {name: flat.leaves[name] for name in self.leaf_specs if name in flat.leaves}
        self.flat = Flat(flat.skeleton, leaves, flat.aliases, flat.parts)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every tensor by name, aliases included, in the state's order; made on first use."""
        return {name: self._entry(name) for name in self.leaf_specs}

    def _entry(self, name: str) -> Entry:
        part, _ = self.flat.parts[name]
        alias = self.flat.aliases.get(name)
        leaf = self.flat.leaves[alias.of if alias else name]
        if alias is None:
            return Entry(name, part, leaf.dtype, leaf.shape, leaf.nbytes, leaf.stored_bytes, leaf.codec, leaf.file)
        nbytes = prod(alias.shape) * leaf.dtype.itemsize
        return Entry(name, part, leaf.dtype, alias.shape, nbytes, 0, "alias", leaf.file, alias.of)


class StoredLeaf(msgspec.Struct, frozen=True, eq=False):
    """A tensor stored in a checkpoint; a `Source` for writers, so that converting never holds a whole state.

    ``stored_bytes`` are its bytes on disk, and ``file`` is the file that holds it, relative to the checkpoint;
    ``codec`` is ``"raw"``, or the codecs of its blocks joined by ``+``.
    """

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
    """How to open a checkpoint.

    Attributes
    ----------
    verify : bool
        Check what is read against its checksums.
    pool : BufferPool
        Where the reader takes its buffers from; the caller uses the same pool, so that one budget holds for both.
    page_cache : bool
        Read everything through the page cache; otherwise only what is cached already, and the rest around it.
    allow : frozenset of str
        Names of classes in pickles whose objects are read as dicts of their attributes.
    """

    verify: bool = True
    pool: BufferPool = field(default_factory=BufferPool)
    page_cache: bool = False
    allow: frozenset[str] = frozenset()


class Format(ABC):
    """How a checkpoint is laid out on disk.

    Attributes
    ----------
    name : str
        The name for ``format=`` and ``--to``.
    options : type of FormatOptions
        The options that `write` takes.
    writes_to_stores : bool
        Whether `write` takes the URL of an object store, a `tensorkeep.paths.StorePath`.
    """

    name: ClassVar[str]
    options: ClassVar[type[FormatOptions]] = FormatOptions
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
        """Check the arguments of a save before the state is looked at; UsageError if they do not fit together.

        The compression may still be ``"auto"``. The default accepts everything.
        """
        return

    def begin(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> StagedWrite:
        """Return a staged write, which first copies the state and then writes the copy.

        The default copies the whole state before anything is written.
        """
        return FullCopyWrite(self.name, self.write, flat, destination, settings)

    def parse_options(self, given: Mapping[str, object]) -> FormatOptions:
        """Return the options that keyword arguments of `tensorkeep.save` stand for; their types are checked.

        Raises
        ------
        UsageError
            If an option is unknown, or its value is of the wrong type or contradicts another one.

        Examples
        --------
        >>> FORMATS.get("native").parse_options({"direct_io": False})
        NativeOptions(shard_bytes=None, direct_io=False, incremental=None, base=None, delta=False)
        """
        return parse_options(self.name, self.options, given)


FORMATS: Registry[Format] = Registry("format")
"""All formats that are installed; an entry point of ``tensorkeep.formats`` adds one."""
