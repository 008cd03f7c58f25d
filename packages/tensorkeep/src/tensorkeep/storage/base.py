"""What a storage offers: files read in ranges, new files, directories, and the commit of a checkpoint.

`LocalStorage` (`storage/local.py`) and `ObjectStorage` (`storage/object_store.py`) implement `Storage`;
`tensorkeep.storage.storage_of` chooses by the class of the path. ``testing/storage_suite.py`` is the conformance suite.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Protocol, Required, Self, TypedDict, Unpack

import numpy as np

from tensorkeep.closing import Closing
from tensorkeep.errors import DestinationExistsError, UnsupportedError
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage.buffers import Buffer, BufferPool
from tensorkeep.storage.direct_io import OutputOptions
from tensorkeep.storage.parallel import Cancellation

MANIFEST_NAME = "manifest.json"
"""The file that makes a directory or a prefix a native checkpoint."""
WELL_KNOWN = frozenset(
    (MANIFEST_NAME, "model.safetensors.index.json", "model.safetensors", "tensorkeep.json", ".metadata")
    + ("checkpoint", ".zarray", "zarr.json", "manifest.ocdbt")
)
"""File names that make a folder a checkpoint. A web server lists no names, so these are tried there."""
CHOOSE = "choose another path, or ask to overwrite it (overwrite=True)"


class SourceFile(Closing):
    """An open file that many threads read at once; a context manager. ``status`` is the one at the opening."""

    path: Path
    size: int
    status: os.stat_result

    ranges_are_requests: ClassVar[bool] = False
    """Whether each range that is read is one request over the network: few large ranges are then fastest."""

    @property
    def fd_path(self) -> str:
        """A path of this very file, whatever its name becomes. UnsupportedError if it is not on a disk."""
        raise self._on_disks_only()

    @abstractmethod
    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` from the file. Raises CorruptCheckpointError if the file ends too early."""

    @abstractmethod
    def bypasses_cache(self, offset: int, count: int) -> bool:
        """Return whether `fetch` reads a range around the page cache."""

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the file, in a slice of ``scratch`` or in memory of their own.

        ``scratch`` is page-aligned, at least ``count`` bytes and two pages long.
        """
        self.read_into(offset, scratch[:count])
        return scratch[:count]

    def map_private(self) -> Bytes:
        """Return the whole file as private memory. UnsupportedError if it is not on a disk."""
        raise self._on_disks_only()

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the file."""
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> AbstractContextManager[object]:
        """Let this thread's reads within a range share one request, until the context ends."""
        return nullcontext()

    def _on_disks_only(self) -> UnsupportedError:
        remedy = "copy the checkpoint to a disk first"
        return UnsupportedError("this is not possible in an object store", path=self.path, remedy=remedy)


class Directory(Closing):
    """An open directory with the files of one checkpoint; a context manager.

    A save may replace the checkpoint at the path meanwhile. Files opened by path could then belong to two checkpoints:
    the manifest to the old one, the data to the new one. Files opened through one `Directory` cannot.
    """

    path: Path

    @property
    def stable_path(self) -> Path:
        """A path of this very directory, for functions that take a path; on a disk, whatever its name becomes."""
        return self.path

    def path_of(self, name: str) -> Path:
        """Return the path of a file of the directory."""
        return self.path / name

    @abstractmethod
    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True, one_of: int = 1) -> SourceFile:
        """Open a file of the directory.

        Without ``follow_links``, a symbolic link raises CorruptCheckpointError: a checkpoint has no links, so a link
        leads to foreign files. With ``page_cache``, the bytes remain in the page cache for the next reader. If the file
        is ``one_of`` very many, it is opened again for each read.
        """

    @abstractmethod
    def status(self, name: str) -> os.stat_result:
        """Return the status of a file, not of the target of a link. Raises OSError."""

    @abstractmethod
    def was_replaced(self) -> bool:
        """Return whether the path now leads to something else, or to nothing."""

    def changed(self, names: Iterable[str]) -> str | None:
        """Return the first name that now has other content or is missing; None if all files are unchanged."""
        return None


class OutputFile(Protocol):
    """A new file that many threads write at once. It exists durably after `finish`."""

    direct: bool
    """Whether its writes bypass the page cache."""

    def write(self, offset: int, data: Bytes, memory: Buffer | None = None, *, counts: int = 0) -> None:
        """Write ``data``, and report ``counts`` bytes as done when it is written.

        ``memory`` is the buffer that holds ``data``. An upload borrows the buffer until the data was sent.
        """

    def preallocate(self, size: int) -> None:
        """Reserve ``size`` bytes, so that a full disk is found before the data is written."""

    def finish(self, size: int) -> None:
        """Cut the file to ``size`` bytes and make it durable."""

    def close(self) -> None:
        """Close the file, finished or not; a second call does nothing."""


class CommitOptions(TypedDict, total=False):
    overwrite: Required[bool]
    # Whether an existing path is a checkpoint that may be replaced; may raise DestinationExistsError with a reason.
    replaceable: Required[Callable[[Path], bool]]
    # A storage without a rename removes the files of the replaced checkpoint one by one: the names that `listed`
    # returns, and leftovers of failed saves if `is_ours` accepts the name.
    listed: Callable[[Path], Iterable[str]]
    is_ours: Callable[[str], bool]


class PendingCommit(ABC):
    """A checkpoint that is being written: a context manager that removes it unless it was published.

    ``path`` is the folder, or the file, to write to until ``destination`` becomes visible.
    """

    save_id: str = ""
    """A random id that the names of the files must hold; empty if ``path`` belongs to this save alone."""
    is_staged: ClassVar[bool] = True
    """Whether ``path`` is a place of this save alone, which becomes the destination by a rename."""

    def __init__(self, destination: Path, **options: Unpack[CommitOptions]) -> None:
        self.destination = self.path = destination
        self.overwrite = options["overwrite"]
        self._replaceable = options["replaceable"]

    def _check_replaceable(self) -> None:
        if not self.overwrite:
            raise DestinationExistsError("exists already", path=self.destination, remedy=CHOOSE)
        if not self._replaceable(self.destination):
            raise DestinationExistsError(
                "is not a checkpoint of this format, so it is not replaced",
                path=self.destination,
                remedy="choose another path, or remove it yourself",
            )

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def publish(self, manifest: bytes | None = None) -> None:
        """Make the checkpoint visible, durably, in one step.

        ``manifest`` is the content of `MANIFEST_NAME`, for formats that have one; the other files are durable already.
        """

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class Storage(ABC):
    """Where files lie. All methods raise StoreError if the system, or the server, refuses."""

    remote: ClassVar[bool] = False
    """Whether every access is a request over a network."""
    writes_in_order: ClassVar[bool] = False
    """Whether the bytes of a new file are final once they are written, so that no header can be filled in later."""
    small_reads_at_once: ClassVar[int] = 1
    """Threads that read small files at once."""
    read_attempts: ClassVar[float] = math.inf
    """How often a directory is read that is replaced meanwhile."""

    @abstractmethod
    def mode(self, path: Path, *, follow_links: bool = True) -> int:
        """Return the mode bits of a path, for the functions of `stat`; 0 if it does not exist."""

    @abstractmethod
    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; an empty list if it is not a directory."""

    @abstractmethod
    def folders(self, directory: Path) -> list[str]:
        """Return the names of the directories in a directory, sorted."""

    def lists(self, directory: Path) -> bool:
        """Return whether names can be listed; a plain web server cannot."""
        return True

    @abstractmethod
    def first_bytes(self, path: Path, count: int) -> bytes | None:
        """Return the first bytes of a file; None if it is not a regular file."""

    @abstractmethod
    def is_taken(self, path: Path) -> bool:
        """Return whether a save there would meet something. The commit looks more closely."""

    @abstractmethod
    def open_file(self, path: Path) -> SourceFile:
        """Open a file. Raises NotFoundError if it does not exist."""

    @abstractmethod
    def open_directory(self, path: Path) -> Directory:
        """Open a directory. Raises NotFoundError if it does not exist."""

    @abstractmethod
    def write_small(self, path: Path, content: bytes) -> None:
        """Create a small file with this content, durably."""

    @abstractmethod
    def append_lines(self, path: Path, lines: bytes) -> None:
        """Append whole lines to a small file, durably. A line that an earlier writer has cut is ended first."""

    @abstractmethod
    def create(
        self, path: Path, pool: BufferPool, cancellation: Cancellation, **options: Unpack[OutputOptions]
    ) -> OutputFile:
        """Return a new file."""

    def buffer_bytes(self, most_bytes: int) -> int:
        """Return the memory that a file of `create` takes besides the buffers of its writers."""
        return 0

    @abstractmethod
    def check_writable(self, path: Path) -> None:
        """Raise UnsupportedError if nothing can be written to this kind of storage, UsageError for a bad path."""

    @abstractmethod
    def commit(self, destination: Path, *, directory: bool, **options: Unpack[CommitOptions]) -> PendingCommit:
        """Return the commit of a checkpoint: of a directory with a manifest, or of one file."""
