"""The files of a corpus and their documents: found, read as text, and assigned to a split."""

import codecs
import glob
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import msgspec
import xxhash

from chatgot.data.dataset import TRAIN, VALIDATION
from tensorkeep.errors import (
    NotACheckpointError,
    NotFoundError,
    OutOfMemoryError,
    PathLike,
    UsageError,
    first_line,
    import_extra,
)
from tensorkeep.ext import checked_path, prepared
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import Meter, store_error, store_errors

STDIN = "-"
STDLIB = "stdlib"
# fmt: off
# Endings of the files in a folder that are read as text; a pattern selects files of any name.
SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".adoc", ".org", ".tex", ".jsonl", ".ndjson", ".parquet", ".py", ".pyi", ".c",
    ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".js", ".jsx", ".mjs", ".ts",
    ".tsx", ".php", ".pl", ".rb", ".lua", ".r", ".jl", ".hs", ".ml", ".lisp", ".el", ".swift", ".sh",
    ".sql", ".html", ".css",
))
# Tests, generated tables and whole texts: not source code written to be read.
_LEFT_OUT_OF_STDLIB = frozenset((
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "encodings", "pydoc_data",
))
# fmt: on

# Endings of files with one document in each line or row.
_RECORDS: dict[str, Literal["jsonl", "parquet", "arrow"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
DEFAULT_FIELD = "text"
_MAGIC = frozenset("*?[")


class TextFile(NamedTuple):
    """A file of a corpus, and its size when it was found."""

    # The path below the folder that was searched, so that it does not depend on the place of that folder.
    name: str
    path: Path
    nbytes: int

    @property
    def records(self) -> Literal["jsonl", "parquet", "arrow"] | None:
        """The format of a file with one document in each line or row; None for a file of text."""
        return _RECORDS.get(self.path.suffix.lower())


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus in reading order, found but not read; see `open_source`."""

    # What the user gave.
    spec: str
    # ``"file"``, ``"jsonl"``, ``"parquet"``, ``"arrow"``, ``"folder"``, ``"dataset"``, ``"pattern"``, ``"stdlib"`` or
    # ``"stdin"``.
    kind: str
    files: tuple[TextFile, ...]
    encoding: str
    # The field of JSON objects, or the column of tables, that holds the text.
    field: str
    _open: ExitStack
    _stdin_copy: IO[bytes] | None = None

    @property
    def has_documents(self) -> bool:
        """Whether it consists of documents; otherwise it is one stream of text."""
        return self.kind not in ("file", "stdin")

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def left_out(self) -> Counter[str]:
        """Count the files of a folder that are not read, by the ends of their names; hidden ones do not count."""
        if self.kind != "folder":
            return Counter()
        found = (path.suffix.lower() for path in _walk(Path(self.spec)))
        return Counter(suffix for suffix in found if suffix not in SUFFIXES)

    @contextmanager
    def opened(self, file: TextFile) -> Iterator[IO[bytes]]:
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
def open_source(spec: PathLike, *, encoding: str = "utf-8", field: str = DEFAULT_FIELD) -> Iterator[Corpus]:
    """Find the files of a corpus.

    The source is a file, a folder, a pattern such as ``books/*.txt``, a dataset that Hugging Face's ``datasets`` saved
    with ``save_to_disk``, ``"-"`` for standard input, or ``"stdlib"`` for the sources of Python's standard library. In
    ``.jsonl`` and ``.ndjson`` files each line is an object with a document under ``field``; in ``.parquet`` files and
    saved datasets each row has one in that column. A plain file and standard input are one stream of text; all others
    consist of documents.
    """
    text = os.fspath(checked_path(spec))
    try:
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise UsageError(f"{encoding!r} is not a text encoding", remedy="give utf-8, latin-1, utf-16, ...") from error
    with ExitStack() as stack:
        if text == STDIN:
            copy = _copy_stdin(stack)
            file = TextFile("standard input", Path(STDIN), copy.tell())
            yield Corpus(text, "stdin", (file,), encoding, field, stack, copy)
            return
        kind, files = ("stdlib", _standard_library()) if text == STDLIB else _find(text)
        lines = next((file for file in files if file.records == "jsonl"), None)
        if lines is not None and codecs.lookup(encoding).name != "utf-8":
            raise UsageError(f"JSON is UTF-8, not {encoding}", path=lines.path, remedy="prepare this file separately")
        yield Corpus(text, kind, tuple(files), encoding, field, stack)


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
    path = folder / _DATASET
    with store_errors(path, "read the file"):
        content = path.read_bytes()
    try:
        state = msgspec.json.decode(content, type=prepared(_DatasetState))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        remedy = f"remove {_DATASET} if the folder is none; name its files by a pattern otherwise"
        raise UsageError(f"does not describe a saved dataset ({error})", path=path, remedy=remedy) from error
    return [_text_file(folder / each.filename, each.filename) for each in state.data_files]


def _copy_stdin(stack: ExitStack) -> IO[bytes]:
    with store_errors(tempfile.gettempdir(), "copy standard input to a temporary file"):
        # A copy, because standard input is read twice, and needs no name.
        copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
    return copy


def _text_file(path: Path, name: str) -> TextFile:
    with store_errors(path, "read the file"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("is not a regular file", path=path, remedy='give "-" and pipe its content into the command')
    return TextFile(name, path, status.st_size)


def pattern_of(folder: Path, name: str) -> str:
    return shlex.quote(f"{glob.escape(str(folder))}/**/{name}")


def _in_folder(folder: Path) -> list[TextFile]:
    """Return the text files below a folder, by name."""
    splits = sorted(each.parent.name for each in folder.glob(f"*/{_DATASET}"))
    if (folder / "dataset_dict.json").exists() and splits:
        raise UsageError(
            f"holds several datasets: {', '.join(splits)}",
            path=folder,
            remedy=f"give one, such as {shlex.quote(str(folder / splits[0]))}",
        )
    found = _sorted(folder, (path for path in _walk(folder) if path.suffix.lower() in SUFFIXES))
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
    root = Path(sysconfig.get_paths()["stdlib"])
    walked = _walk(root, _LEFT_OUT_OF_STDLIB) if root.is_dir() else ()
    # The folder of the build's configuration has scripts that are not part of the library.
    sources = (each for each in walked if each.suffix == ".py" and not each.parent.name.startswith("config-"))
    found = _sorted(root, sources)
    if not found:
        raise NotACheckpointError("this Python has no sources of its standard library", path=root)
    return found


def _sorted(root: Path, paths: Iterable[Path]) -> list[TextFile]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    return [_text_file(path, name) for name, path in named]


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """Yield everything below a folder except folders, in any order. Links are followed; hidden names are left out."""

    def refuse(error: OSError) -> None:
        raise store_error(error, error.filename, "list the folder") from error

    for name, folders, others in os.walk(root, onerror=refuse, followlinks=True):
        folder = Path(name)
        above = (each for each in folder.parents if each.is_relative_to(root))
        # Only a link can lead back to a folder above it.
        if folder.is_symlink() and any(map(folder.samefile, above)):
            remedy = "remove the link, or name the files"
            raise UsageError("is a link that leads back to a folder above it", path=folder, remedy=remedy)
        # In place: os.walk enters the folders that are left in this list.
        folders[:] = [each for each in folders if not each.startswith(".") and each not in left_out]
        yield from (folder / each for each in others if not each.startswith("."))


# Rows of a table that are in memory at once: the batches of an Arrow stream have any size, so they are sliced as well.
_ROWS_AT_ONCE = 256
# Bytes of a column of a parquet file; the library would read all of a row group.
_READ_AT_ONCE = 1 << 20
# Part of a remedy.
_OPTION_OF_TABLES = "--field NAME (tensorkeep train: --data.field NAME)"


@contextmanager
def open_table(file: TextFile, column: str) -> Iterator[tuple[list[str], Iterator[tuple[str, int]]]]:
    """Open a table: yield the names of its columns, and the texts of one column, each with the bytes done so far."""
    arrow = _library("pyarrow")
    with ExitStack() as stack:
        batches: Iterator[Any]
        done: Callable[[int], int]
        with _table_errors(file):
            if file.records == "parquet":
                library = _library("pyarrow.parquet")
                table = stack.enter_context(library.ParquetFile(file.path, buffer_size=_READ_AT_ONCE, pre_buffer=False))
                rows, schema = max(1, table.metadata.num_rows), table.schema_arrow
                batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column], use_threads=False)
                done = lambda number: file.nbytes * number // rows  # noqa: E731
            else:
                stream = stack.enter_context(arrow.OSFile(str(file.path)))
                batches = arrow.ipc.open_stream(stream)
                schema = batches.schema  # type: ignore[attr-defined]
                done = lambda number: min(stream.tell(), file.nbytes)  # noqa: E731
        _check_column(file, column, schema, arrow.types)
        yield schema.names, ((text, done(number)) for number, text in enumerate(_texts(file, batches, column), 1))


def _texts(file: TextFile, batches: Iterator[Any], column: str) -> Iterator[str]:
    number = 0
    while True:
        with _table_errors(file):
            batch = next(batches, None)
        if batch is None:
            return
        values = batch.column(column)
        for begin in range(0, len(values), _ROWS_AT_ONCE):
            for value in values.slice(begin, _ROWS_AT_ONCE):
                number += 1
                reason, remedy = None, "leave such rows out"
                try:
                    text = value.as_py()
                    if text is None:
                        reason = "has no text (null)"
                except UnicodeDecodeError as error:
                    reason, remedy = f"is not utf-8 ({error.reason})", f"write the column in UTF-8, or {remedy}"
                if reason is not None:
                    raise UsageError(f"row {number:,} {reason}", path=file.path, remedy=remedy)
                yield text


def _check_column(file: TextFile, column: str, schema: Any, types: Any) -> None:
    places = schema.get_all_field_indices(column)
    if len(places) != 1:
        raise UsageError(
            f"has {len(places) or 'no'} column{'s' * (len(places) > 1)} {column!r}; its columns are "
            f"{', '.join(map(repr, schema.names))}",
            path=file.path,
            remedy=f"name the column of the text: {_OPTION_OF_TABLES}",
        )
    kind = schema.field(places[0]).type
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise UsageError(
            f"the column {column!r} holds {kind}, not text",
            path=file.path,
            remedy=f"name another column: {_OPTION_OF_TABLES}",
        )


@contextmanager
def _table_errors(file: TextFile) -> Iterator[None]:
    arrow = _library("pyarrow")
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the rows of the file do not fit into memory ({error})",
            path=file.path,
            remedy="write it with smaller row groups or record batches",
        ) from error
    except (arrow.ArrowException, OSError) as error:
        # pyarrow raises OSError without a number for damaged files, too.
        if isinstance(error, OSError) and error.errno:
            raise store_error(error, file.path, "read the file") from error
        raise UsageError(
            f"is not a file of {file.records}, or is damaged ({first_line(error)})",
            path=file.path,
            remedy="write the file again, or leave it out",
        ) from error


def _library(name: str) -> Any:
    return import_extra(name, "chatgot[tables]", "parquet files and saved datasets need pyarrow")


UTF8_MARK = codecs.BOM_UTF8
_MARK = UTF8_MARK.decode()
# A line with a conversation, for errors.
CONVERSATION = '{"messages": [{"role": "user", "content": "..."}, ...]}'
# Part of a remedy.
_OPTION_OF_LINES = "--field NAME (tensorkeep train: --data.field NAME) states the field"
# Bytes or characters that are handled at once.
PIECE = 1 << 16
# Bytes of a line of JSON, which is parsed as a whole.
LONGEST_RECORD = 1 << 26
# Fields of other trainers that state what is trained.
WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "trainable", "train_detail")
# Fields that state what is not trained.
MASKS = ("mask", "masked")
_MOST_NAMED = 5
# Characters of a value in an error.
_MOST_SHOWN = 60


def contradicts_training(name: str, value: object, trained: bool) -> bool:
    """Return whether a field states that something is trained otherwise: not at all, or with another weight."""
    return (name in WEIGHTS and value not in (None, trained)) or (name in MASKS and value not in (None, not trained))


def listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join([*names[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def shortened(value: object) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # decoding what is as deep succeeded by a hair
        text = "..."
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Document(NamedTuple):
    """One document, or the whole text of a corpus without documents. Consume its texts before the next document."""

    # Of the file, with the number of the line or row if the file holds several documents.
    name: str
    texts: Iterator[str]
    # Of the texts, if they are the messages of a conversation.
    roles: tuple[str, ...] = ()


class CorpusReader:
    """One pass over a source, which counts bytes and characters, reports progress, and computes a checksum."""

    def __init__(self, source: Corpus, meter: Meter) -> None:
        self.source = source
        self.nbytes = self.characters = 0
        self._meter = meter
        self._hasher = checksummed_json.new_hasher(wide=False)
        self._unreported = 0
        self._nul_is_one_byte = "\0".encode(source.encoding) == b"\0"
        stated = [(name, Any, None) for name in (*WEIGHTS, *MASKS) if name != source.field]
        record = msgspec.defstruct("_Record", [("_text", str), *stated], rename={"_text": source.field})
        self._decoder = msgspec.json.Decoder(record)

    def digest(self) -> str:
        """Return the xxh3-64 of the names and bytes read so far, as 16 hexadecimal digits; of tables, of the texts."""
        return str(self._hasher.hexdigest())

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order; UsageError, with the file and the byte, if something is not text."""
        for file in self.source.files:
            # NUL ends a name, which cannot contain it, so that no other names and contents have the same checksum.
            self._hasher.update(os.fsencode(file.name) + b"\0")
            if file.records in ("parquet", "arrow"):
                yield from self._rows(file)
                continue
            with self.source.opened(file) as stream:
                if file.records:
                    yield from self._lines(stream, file)
                else:
                    yield Document(file.name, self._texts(stream, file))
        self._report()

    def _texts(self, stream: IO[bytes], file: TextFile) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(self.source.encoding)()
        may_be_marked = codecs.lookup(self.source.encoding).name == "utf-8"
        begin = characters = 0
        while True:
            chunk = self._read(stream.read, PIECE, file)
            # NUL is valid in most encodings, and a sign of a binary file in all.
            if self._nul_is_one_byte and (place := chunk.find(b"\0")) >= 0:
                raise _binary(f"byte {begin + place:,}", file)
            begin += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                raise _undecodable(error, begin, file, self.source.encoding) from error
            if text and may_be_marked:
                # The mark is not part of the text; the decoder of UTF-16 leaves its own out, too.
                text, may_be_marked = text.removeprefix(_MARK), False
            if (place := text.find("\0")) >= 0:
                raise _binary(f"character {characters + place:,}", file)
            characters += len(text)
            self.characters += len(text)
            if text:
                yield text
            if not chunk:
                return

    def _lines(self, stream: IO[bytes], file: TextFile) -> Iterator[Document]:
        begin = number = 0
        # One byte more than is allowed shows that a line is longer.
        while line := self._read(stream.readline, LONGEST_RECORD + 1, file):
            number += 1
            if len(line) > LONGEST_RECORD:
                raise UsageError(
                    f"line {number:,} is longer than {LONGEST_RECORD:,} bytes",
                    path=file.path,
                    remedy="split the document",
                )
            if (place := line.find(b"\0")) >= 0:
                raise _binary(f"byte {begin + place:,}", file)
            # Some programs mark UTF-8 at the start of a file; the mark is not part of the JSON.
            mark = len(UTF8_MARK) if number == 1 and line.startswith(UTF8_MARK) else 0
            yield self._line(line[mark:], begin + mark, number, file)
            begin += len(line)

    def _rows(self, file: TextFile) -> Iterator[Document]:
        reported = 0
        with open_table(file, self.source.field) as (_, texts):
            for number, (text, done) in enumerate(texts, 1):
                self._hasher.update(text.encode() + b"\0")
                yield self._document(text, f"row {number:,}", number, file)
                self._count(done - reported)
                reported = done
        self._count(file.nbytes - reported)

    def _document(self, text: str, place: str, number: int, file: TextFile) -> Document:
        if "\0" in text:
            raise _binary(f"a character of {place}", file)
        self.characters += len(text)
        return Document(f"{file.name}:{number}", (text[at : at + PIECE] for at in range(0, len(text), PIECE)))

    def _line(self, line: bytes, begin: int, number: int, file: TextFile) -> Document:
        """Return the document on a line of JSON, which has no text if the line is blank."""
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            raise _undecodable(error, begin + len(line), file, "utf-8") from error
        text = self._text_of(decoded, number, file) if decoded.strip() else ""
        return self._document(text, f"line {number:,}", number, file)

    def _text_of(self, line: str, number: int, file: TextFile) -> str:
        try:
            record: Any = self._decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            remedy = (
                f'each line must be an object such as {{"{self.source.field}": "..."}}; {_OPTION_OF_LINES}; a '
                f"conversation, or a question and its answer, must be {CONVERSATION}"
            )
            raise UsageError(f"line {number:,} is not a document ({error})", path=file.path, remedy=remedy) from error
        for name in record.__struct_fields__[1:]:
            if contradicts_training(name, value := getattr(record, name), True):
                what = f'line {number:,} has "{name}": {shortened(value)}, which is not supported'
                remedy = "remove the field if that is right; else leave the document out"
                raise UsageError(f"{what}: all of a document is trained", path=file.path, remedy=remedy)
        return str(record._text)

    def _read(self, read: Callable[[int], bytes], count: int, file: TextFile) -> bytes:
        try:
            chunk = read(count)
        except OSError as error:
            raise store_error(error, file.path, "read the file") from error
        self._hasher.update(chunk)
        self._count(len(chunk))
        return chunk

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._unreported += nbytes
        if self._unreported >= PIECE:  # updating a progress bar takes longer than reading a short line
            self._report()

    def _report(self) -> None:
        self._meter.add(self._unreported)
        self._unreported = 0


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A fraction, and a seed that decides which documents are for validation; UsageError if one is out of range."""

    validation: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise UsageError(f"validation is {self.validation}", remedy="give a fraction between 0 and 1, such as 0.1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise UsageError(f"the seed is {self.seed!r}", remedy="give an int of 0 or more, below 2**64")

    def of_document(self, name: str) -> str:
        # A hash of the name alone: the split does not depend on the other documents.
        drawn = xxhash.xxh3_64_intdigest(os.fsencode(name), seed=self.seed) / 2**64
        return VALIDATION if drawn < self.validation else TRAIN

    def train_characters(self, characters: int) -> int:
        # As nanoGPT counts: ``data[: int(n * 0.9)]``.
        return int(characters * (1 - self.validation))


def _undecodable(error: UnicodeError, end: int, file: TextFile, encoding: str) -> UsageError:
    """Return the error of bytes that are not in the encoding; ``end`` counts the bytes given to the decoder so far."""
    reason, place = str(error), end
    if isinstance(error, UnicodeDecodeError):
        # The decoder may have kept bytes of the piece before; its object ends with the last byte that it received.
        reason, place = error.reason, end - len(error.object) + error.start
    command = "tensorkeep data prepare SOURCE --encoding latin-1 --out NEW"
    remedy = f"prepare it with the encoding of the text, such as {command}; or leave the file out"
    if file.records:
        remedy = "convert the file to UTF-8, as JSON is, or leave it out"
    return UsageError(f"byte {place:,} is not {encoding} ({reason})", path=file.path, remedy=remedy)


def _binary(where: str, file: TextFile) -> UsageError:
    remedy = "leave the document out" if file.records else "leave the file out, or prepare it with its encoding"
    return UsageError(f"{where} is NUL, so this is not text", path=file.path, remedy=remedy)
