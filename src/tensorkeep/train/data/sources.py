"""What a corpus is read from: a file, a folder, a pattern, standard input, or the Python standard library."""

from __future__ import annotations

import codecs
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.errors import NotFoundError, PathLike, UsageError
from tensorkeep.io.files import store_error
from tensorkeep.train.data.text_files import MAGIC, TextFile, in_folder, matching, standard_library, text_file

STDIN = "-"
STDLIB = "stdlib"

_SPOOLED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Source:
    """A corpus, found but not read; a context manager that closes what it holds open.

    Attributes
    ----------
    spec : str
        What it was asked for by.
    kind : str
        ``"file"``, ``"jsonl"``, ``"folder"``, ``"pattern"``, ``"stdlib"`` or ``"stdin"``.
    files : tuple of TextFile
        In the order in which they are read.
    encoding : str
        How their bytes are to be read.
    """

    spec: str
    kind: str
    files: tuple[TextFile, ...]
    encoding: str
    _spool: IO[bytes] | None = None
    _being_read: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @property
    def has_documents(self) -> bool:
        """Whether it consists of documents; otherwise it is one stream of text."""
        return self.kind not in ("file", "stdin")

    @property
    def nbytes(self) -> int:
        """Bytes of all its files, as they were when it was opened."""
        return sum(file.nbytes for file in self.files)

    @contextmanager
    def opened(self, file: TextFile) -> Iterator[IO[bytes]]:
        """Open one of its files from the beginning; StoreError if the operating system refuses."""
        if self._spool is not None:
            self._spool.seek(0)
            yield self._spool
            return
        try:
            stream = file.path.open("rb")
        except OSError as error:
            raise store_error(error, file.path, "read the file") from error
        # A reader that gives up half-way may stay alive in the traceback of its error: the source closes the file then.
        with self._being_read:
            yield self._being_read.enter_context(stream)

    def close(self) -> None:
        """Close the file that is being read, and let go of what came from standard input."""
        self._being_read.close()
        if self._spool is not None:
            self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_source(spec: PathLike, *, encoding: str = "utf-8") -> Source:
    """Find a corpus.

    Parameters
    ----------
    spec : path-like
        A file (``.jsonl``: one JSON object with a document under ``"text"`` on each line), a folder, a pattern such as
        ``books/*.txt``, ``"-"`` for standard input, or ``"stdlib"`` for the sources of Python's standard library.
        Folders, patterns, ``stdlib`` and ``.jsonl`` consist of documents; a plain file and standard input are one
        stream.
    encoding : str
        How text is encoded; every byte must be.

    Returns
    -------
    Source
        A context manager.

    Raises
    ------
    NotACheckpointError
        If there is no such file, folder or match.
    StoreError
        If the operating system refuses.
    UsageError
        If the encoding is unknown, or something there cannot be read as text.
    """
    text = os.fspath(checked_path(spec))
    _check_encoding(encoding)
    if text == STDIN:
        spool, nbytes = _spool_stdin()
        return Source(text, "stdin", (TextFile("standard input", Path(STDIN), nbytes),), encoding, spool)
    kind, files = ("stdlib", standard_library()) if text == STDLIB else _find(text)
    records = next((file for file in files if file.has_records), None)
    if records is not None and codecs.lookup(encoding).name != "utf-8":
        raise UsageError(f"JSON is UTF-8, not {encoding}", path=records.path, remedy="prepare it by itself")
    return Source(text, kind, tuple(files), encoding)


def _find(text: str) -> tuple[str, list[TextFile]]:
    path = Path(text)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        if MAGIC & set(text):
            return "pattern", matching(text)
        raise NotFoundError(
            "there is no such file or folder",
            path=text,
            remedy='give a file, a folder, a pattern, "-" for standard input or "stdlib"',
        ) from error
    except OSError as error:
        raise store_error(error, path, "read the file") from error
    if stat.S_ISDIR(mode):
        return "folder", in_folder(path)
    file = text_file(path, path.name)
    return ("jsonl" if file.has_records else "file"), [file]


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise UsageError(f"{encoding!r} is no encoding of text", remedy="give utf-8, latin-1, utf-16, ...") from error


def _spool_stdin() -> tuple[IO[bytes], int]:
    """Copy standard input to an unnamed temporary file: it is read twice."""
    spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # the source closes it
    try:
        while chunk := sys.stdin.buffer.read(_SPOOLED_AT_ONCE):
            view = memoryview(chunk)
            while view:
                view = view[spool.write(view) :]
        return spool, spool.tell()
    except OSError as error:
        spool.close()
        raise store_error(error, tempfile.gettempdir(), "keep standard input in a temporary file") from error
    except BaseException:
        spool.close()
        raise
