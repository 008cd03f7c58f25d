"""What a storage offers: files read in ranges, new files, directories, and the commit of a checkpoint.

`LocalStorage` (`storage/local.py`) and `ObjectStorage` (`storage/object_store.py`) implement `Storage`;
`tensorkeep.storage.storage_of` chooses by the class of the path. ``testing/storage_suite.py`` is the conformance suite.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np

from tensorkeep.closing import Closing
from tensorkeep.storage.buffers import Buffer, BufferPool
from tensorkeep.storage.direct_io import Bytes
from tensorkeep.storage.parallel import Cancellation

MANIFEST_NAME = "manifest.json"
"""The file that makes a directory or a prefix a native checkpoint."""
WELL_KNOWN = frozenset(
    (MANIFEST_NAME, "model.safetensors.index.json", "model.safetensors", "tensorkeep.json", ".metadata")
    + ("checkpoint", ".zarray", "zarr.json", "manifest.ocdbt")
)
"""File names that make a folder a checkpoint. A web server lists no names, so these are tried there."""


class SourceFile(Closing):
    """An open file that many threads read at once; a context manager.

    Attributes
    ----------
    path : Path
    size : int
        Bytes of the file.
    status : os.stat_result
        The status when the file was opened.
    """

    path: Path
    size: int
    status: os.stat_result

    ranges_are_requests: ClassVar[bool] = False
    """Whether each range that is read is one request over the network: few large ranges are then fastest."""

    @property
    @abstractmethod
    def fd_path(self) -> str:
        """A path of this very file, whatever its name becomes. UnsupportedError in an object store."""

    @abstractmethod
    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` from the file. Raises CorruptCheckpointError if the file ends too early."""

    @abstractmethod
    def bypasses_cache(self, offset: int, count: int) -> bool:
        """Return whether `fetch` reads a range around the page cache."""

    @abstractmethod
    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        """Return ``count`` bytes of the file, in a slice of ``scratch`` or in memory of their own.

        ``scratch`` is page-aligned, at least ``count`` bytes and two pages long.
        """

    @abstractmethod
    def map_private(self) -> Bytes:
        """Return the whole file as private memory. UnsupportedError in an object store."""

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the file."""
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> AbstractContextManager[object]:
        """Let this thread's reads within a range share one request, until the context ends."""
        return nullcontext()


class Directory(Closing):
    """An open directory with the files of one checkpoint; a context manager.

    A save may replace the checkpoint at the path meanwhile. Files opened by path could then belong to two checkpoints:
    the manifest to the old one, the data to the new one. Files opened through one `Directory` cannot.
    """

    path: Path

    @property
    @abstractmethod
    def fd_path(self) -> str:
        """A path of this very directory, whatever its name becomes. UnsupportedError in an object store."""

    @property
    @abstractmethod
    def stable_path(self) -> Path:
        """A path of this very directory, for functions that take a path of this storage."""

    def path_of(self, name: str) -> Path:
        """Return the path of a file of the directory."""
        return self.path / name

    @abstractmethod
    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        """Open a file of the directory.

        Without ``follow_links``, a symbolic link raises CorruptCheckpointError: a checkpoint has no links, so a link
        leads to foreign files. With ``page_cache``, the bytes remain in the page cache for the next reader.
        """

    @abstractmethod
    def open_one_of(self, count: int, name: str, *, follow_links: bool = True, page_cache: bool = True) -> SourceFile:
        """Open one of ``count`` files; of very many, each is opened again for each read."""

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


class PendingCommit(ABC):
    """A checkpoint that is being written: a context manager that removes it unless it was published.

    Attributes
    ----------
    destination : Path
        Where the checkpoint becomes visible.
    path : Path
        The folder, or the file, to write to until then.
    overwrite : bool
        Whether an existing checkpoint may be replaced.
    save_id : str
        A random id that the names of the files must hold; empty if ``path`` belongs to this save alone.
    """

    destination: Path
    path: Path
    overwrite: bool
    save_id: str = ""

    is_staged: ClassVar[bool] = True
    """Whether ``path`` is a place of this save alone, which becomes the destination by a rename."""

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

    remote: ClassVar[bool]
    """Whether every access is a request over a network."""
    writes_in_order: ClassVar[bool]
    """Whether the bytes of a new file are final once they are written, so that no header can be filled in later."""
    small_reads_at_once: ClassVar[int]
    """Threads that read small files at once."""

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
    def reads_again(self, attempt: int) -> bool:
        """Return whether a directory that was replaced during this attempt to read it is read again."""

    @abstractmethod
    def write_small(self, path: Path, content: bytes) -> None:
        """Create a small file with this content, durably."""

    @abstractmethod
    def create(
        self,
        path: Path,
        pool: BufferPool,
        cancellation: Cancellation,
        *,
        most_bytes: int,
        direct: bool = True,
        progress: Callable[[int], None] = lambda count: None,
    ) -> OutputFile:
        """Return a new file of at most ``most_bytes``. Each write calls ``progress`` with its ``counts``."""

    @abstractmethod
    def buffer_bytes(self, most_bytes: int) -> int:
        """Return the memory that a file of `create` takes besides the buffers of its writers."""

    @abstractmethod
    def check_writable(self, path: Path) -> None:
        """Raise UnsupportedError if nothing can be written to this kind of storage, UsageError for a bad path."""

    @abstractmethod
    def commit(
        self,
        destination: Path,
        *,
        directory: bool,
        overwrite: bool,
        replaceable: Callable[[Path], bool],
        listed: Callable[[Path], Iterable[str]] = lambda path: (),
        is_ours: Callable[[str], bool] = lambda name: True,
    ) -> PendingCommit:
        """Return the commit of a checkpoint: of a directory with a manifest, or of one file.

        ``replaceable`` returns whether an existing checkpoint may be replaced. A storage without a rename removes the
        files of the replaced checkpoint one by one: the names that ``listed`` returns, and leftovers of failed saves
        if ``is_ours`` accepts the name.
        """
