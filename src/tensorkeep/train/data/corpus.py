"""The files of a corpus: a file, folder, glob, saved dataset, standard input or standard library."""

import codecs
import glob
import os
import shlex
import stat
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal

import msgspec

from tensorkeep.errors import NotACheckpointError, NotFoundError, PathLike, UsageError
from tensorkeep.paths import checked_path
from tensorkeep.storage.direct_io import store_error, store_errors
from tensorkeep.structs import prepared

STDIN = "-"
STDLIB = "stdlib"

# fmt: off
SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".adoc", ".org", ".tex", ".jsonl", ".ndjson", ".parquet", ".py", ".pyi", ".c",
    ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".js", ".jsx", ".mjs", ".ts",
    ".tsx", ".php", ".pl", ".rb", ".lua", ".r", ".jl", ".hs", ".ml", ".lisp", ".el", ".swift", ".sh",
    ".sql", ".html", ".css",
))
"""Endings of the files in a folder that are read as text; a pattern selects files of any name."""

# Tests, generated tables and whole texts: not source code written to be read.
_LEFT_OUT_OF_STDLIB = frozenset((
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "encodings", "pydoc_data",
))
# fmt: on

_RECORDS: dict[str, Literal["jsonl", "parquet", "arrow"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Endings of the files whose lines or rows are documents."""

DEFAULT_FIELD = "text"

_MAGIC = frozenset("*?[")
_COPIED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of a corpus, and its size when it was found.

    Its name is the path below the folder that was searched, which does not depend on the place of that folder.
    """

    name: str
    path: Path
    nbytes: int

    @property
    def records(self) -> Literal["jsonl", "parquet", "arrow"] | None:
        """The format of a file whose lines or rows are documents; None for a file of text."""
        return _RECORDS.get(self.path.suffix.lower())


@dataclass(frozen=True)
class Source:
    """The files of a corpus in the order in which they are read, found but not read; see `open_source`."""

    spec: str
    """What the user gave."""
    kind: str
    """``"file"``, ``"jsonl"``, ``"parquet"``, ``"arrow"``, ``"folder"``, ``"dataset"``, ``"pattern"``, ``"stdlib"`` or
    ``"stdin"``."""
    files: tuple[TextFile, ...]
    encoding: str
    field: str
    """The field of JSON objects, or the column of tables, that holds the text."""
    _open: ExitStack
    _stdin_copy: IO[bytes] | None = None

    @property
    def has_documents(self) -> bool:
        """Whether it consists of documents; otherwise it is one stream of text."""
        return self.kind not in ("file", "stdin")

    @property
    def nbytes(self) -> int:
        """The size of all files, when they were found."""
        return sum(file.nbytes for file in self.files)

    def left_out(self) -> Counter[str]:
        """Count the files of a folder that are not read, by the ends of their names; hidden ones do not count."""
        if self.kind != "folder":
            return Counter()
        found = (path.suffix.lower() for path in _walk(Path(self.spec), lambda name: True))
        return Counter(suffix for suffix in found if suffix not in SUFFIXES)

    @contextmanager
    def opened(self, file: TextFile) -> Iterator[IO[bytes]]:
        """Open a file from its beginning; StoreError if the operating system refuses."""
        if self._stdin_copy is not None:
            self._stdin_copy.seek(0)
            yield self._stdin_copy
            return
        with store_errors(file.path, "read the file"):
            stream = file.path.open("rb")
        # A generator that an error interrupts stays alive in the traceback: `open_source` then closes its file.
        with self._open:
            yield self._open.enter_context(stream)


@contextmanager
def open_source(spec: PathLike, *, encoding: str = "utf-8", field: str = DEFAULT_FIELD) -> Iterator[Source]:
    """Find the files of a corpus.

    The source is a file, a folder, a pattern such as ``books/*.txt``, a dataset that Hugging Face's ``datasets`` saved
    with ``save_to_disk``, ``"-"`` for standard input, or ``"stdlib"`` for the sources of Python's standard library. In
    ``.jsonl`` and ``.ndjson`` files each line is an object with a document under ``field``; in ``.parquet`` files and
    saved datasets each row has one in that column. A plain file and standard input are one stream of text; all others
    consist of documents.

    Raises NotACheckpointError if there is no such file, folder or match; StoreError if the operating system refuses;
    UsageError if the encoding is unknown, or something there cannot be read as text.
    """
    text = os.fspath(checked_path(spec))
    _check_encoding(encoding)
    with ExitStack() as stack:
        if text == STDIN:
            copy = _copy_stdin(stack)
            file = TextFile("standard input", Path(STDIN), copy.tell())
            yield Source(text, "stdin", (file,), encoding, field, stack, copy)
            return
        kind, files = ("stdlib", _standard_library()) if text == STDLIB else _find(text)
        lines = next((file for file in files if file.records == "jsonl"), None)
        if lines is not None and codecs.lookup(encoding).name != "utf-8":
            raise UsageError(f"JSON is UTF-8, not {encoding}", path=lines.path, remedy="prepare this file separately")
        yield Source(text, kind, tuple(files), encoding, field, stack)


def _find(text: str) -> tuple[str, list[TextFile]]:
    path = Path(text)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        if _MAGIC & set(text):
            return "pattern", _matching(text)
        raise NotFoundError(
            "there is no such file or folder",
            path=text,
            remedy='give a file, a folder, a pattern, "-" for standard input or "stdlib"',
        ) from error
    except OSError as error:
        raise store_error(error, path, "read the file") from error
    if stat.S_ISDIR(mode):
        return ("dataset", _of_dataset(path)) if (path / _DATASET).exists() else ("folder", _in_folder(path))
    file = _text_file(path, path.name)
    return file.records or "file", [file]


_DATASET = "state.json"


class _DataFile(msgspec.Struct):
    # A name, not a path: the files are in the folder of the dataset.
    filename: Annotated[str, msgspec.Meta(pattern=r"^[^/]+\.arrow$")]


class _DatasetState(msgspec.Struct):
    """What ``save_to_disk`` of Hugging Face's ``datasets`` writes beside its Arrow files."""

    data_files: Annotated[list[_DataFile], msgspec.Meta(min_length=1)] = msgspec.field(name="_data_files")


def _of_dataset(folder: Path) -> list[TextFile]:
    """Return the files of a saved dataset, in the order of their rows."""
    path = folder / _DATASET
    with store_errors(path, "read the file"):
        content = path.read_bytes()
    try:
        state = msgspec.json.decode(content, type=prepared(_DatasetState))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = f"remove {_DATASET} if the folder is none; name its files by a pattern otherwise"
        raise UsageError(f"does not describe a saved dataset ({error})", path=path, remedy=remedy) from error
    return [_text_file(folder / each.filename, each.filename) for each in state.data_files]


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise UsageError(f"{encoding!r} is not a text encoding", remedy="give utf-8, latin-1, utf-16, ...") from error


def _copy_stdin(stack: ExitStack) -> IO[bytes]:
    """Copy standard input to an unnamed temporary file, because it is read twice."""
    with store_errors(tempfile.gettempdir(), "copy standard input to a temporary file"):
        copy = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  # the stack closes it
        while chunk := sys.stdin.buffer.read(_COPIED_AT_ONCE):
            view = memoryview(chunk)
            while view:
                view = view[copy.write(view) :]
    return copy


def _text_file(path: Path, name: str) -> TextFile:
    with store_errors(path, "read the file"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("is not a regular file", path=path, remedy='give "-" and pipe its content into the command')
    return TextFile(name, path, status.st_size)


def pattern_of(folder: Path, name: str) -> str:
    """Return the pattern of the files of a name below a folder, quoted for a shell."""
    return shlex.quote(f"{glob.escape(str(folder))}/**/{name}")


def _in_folder(folder: Path) -> list[TextFile]:
    """Return the text files below a folder, by name. Names that begin with a dot are skipped."""
    splits = sorted(each.parent.name for each in folder.glob(f"*/{_DATASET}"))
    if (folder / "dataset_dict.json").exists() and splits:
        raise UsageError(
            f"holds several datasets: {', '.join(splits)}",
            path=folder,
            remedy=f"give one of them: {shlex.quote(str(folder / splits[0]))}",
        )
    found = _sorted(folder, (path for path in _walk(folder, lambda name: True) if path.suffix.lower() in SUFFIXES))
    if not found:
        raise NotACheckpointError(
            "holds no text files",
            path=folder,
            remedy=f"name them by a pattern such as {pattern_of(folder, '*.log')}; in a folder, only files that end in "
            f"{', '.join(sorted(SUFFIXES)[:4])}, ... are read",
        )
    return found


def _matching(pattern: str) -> list[TextFile]:
    """Return the files that a pattern matches, by name. ``**`` matches folders at any depth and follows no links."""
    parts = Path(pattern).parts
    fixed = next(place for place, part in enumerate(parts) if _MAGIC & set(part))
    root, rest = Path(*parts[:fixed]), "/".join(parts[fixed:])

    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.parts)

    try:
        paths = [path for path in root.glob(rest) if not path.is_dir() and not hidden(path.relative_to(root))]
    except (ValueError, NotImplementedError) as error:
        remedy = "`**` must be alone between slashes"
        raise UsageError(f"{pattern!r} is not a valid pattern: {error}", remedy=remedy) from error
    except OSError as error:
        raise store_error(error, root, "list the folder") from error
    if not paths:
        raise NotACheckpointError(f"the pattern {pattern!r} matches no file", remedy="check it, and quote it")
    return _sorted(root, paths)


def _standard_library() -> list[TextFile]:
    """Return the sources of the running Python's standard library, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[TextFile] = []
    if root.is_dir():
        walked = _walk(root, lambda name: name not in _LEFT_OUT_OF_STDLIB and not name.startswith("config-"))
        found = _sorted(root, (path for path in walked if path.suffix == ".py"))
    if not found:
        raise NotACheckpointError("this Python has no sources of its standard library", path=root)
    return found


def _sorted(root: Path, paths: Iterable[Path]) -> list[TextFile]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    return [_text_file(path, name) for name, path in named]


def _walk(root: Path, enters: Callable[[str], bool]) -> Iterator[Path]:
    """Yield everything below a folder except folders, in any order. Links are followed."""

    def refuse(error: OSError) -> None:
        raise store_error(error, error.filename, "list the folder") from error

    for name, folders, others in os.walk(root, onerror=refuse, followlinks=True):
        folder = Path(name)
        if folder.is_symlink() and any(
            folder.samefile(above) for above in folder.parents if above.is_relative_to(root)
        ):
            raise UsageError(
                "is a link that leads back to a folder above it",
                path=folder,
                remedy="remove the link, or name the files",
            )
        folders[:] = [each for each in folders if not each.startswith(".") and enters(each)]
        yield from (folder / each for each in others if not each.startswith("."))
