"""Documents of a corpus: streams of decoded text, each assigned to a split."""

import codecs
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

import msgspec
import xxhash

from tensorkeep.errors import UsageError
from tensorkeep.formats.checksummed_json import new_hasher
from tensorkeep.storage.direct_io import store_error
from tensorkeep.storage.parallel import Meter
from tensorkeep.train.data.corpus import Source, TextFile
from tensorkeep.train.data.dataset import TRAIN, VALIDATION
from tensorkeep.train.data.tables import Table

UTF8_MARK = codecs.BOM_UTF8
_MARK = UTF8_MARK.decode()

CONVERSATION = '{"messages": [{"role": "user", "content": "..."}, ...]}'
"""A line with a conversation, for errors."""

_FIELD_OPTION = "--field NAME (tensorkeep train: --data.field NAME) states the field"
"""Part of a remedy."""

PIECE = 1 << 16
"""Bytes or characters that are handled at once."""

LONGEST_RECORD = 1 << 26
"""Bytes of a line of JSON, which is parsed as a whole."""

WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "train", "trainable", "train_detail")
"""Fields of other trainers that state what is trained."""
MASKS = ("mask", "masked")
"""Fields that state what is not trained."""

_MOST_SHOWN = 60
"""Characters of a value in an error."""


def contradicts_training(name: str, value: object, trained: bool) -> bool:
    """Return whether a field states that something is trained otherwise: not at all, or with another weight."""
    return (name in WEIGHTS and value not in (None, trained)) or (name in MASKS and value not in (None, not trained))


def shortened(value: object) -> str:
    """Return a value as JSON, for an error."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # decoding what is as deep succeeded by a hair
        text = "..."
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or the whole text of a corpus without documents.

    Its name is that of its file, followed by the number of the line or row if the file holds several. Its texts, pieces
    of the document, must be consumed before the next document.
    """

    name: str
    texts: Iterator[str]


class Reading:
    """One pass over a source, which counts bytes and characters, reports progress, and computes a checksum."""

    def __init__(self, source: Source, meter: Meter) -> None:
        self.source = source
        self.nbytes = self.characters = 0
        self._meter = meter
        self._hasher = new_hasher(wide=False)
        self._unreported = 0
        self._nul_is_one_byte = "\0".encode(source.encoding) == b"\0"
        stated = [(name, Any, None) for name in (*WEIGHTS, *MASKS) if name != source.field]
        record = msgspec.defstruct("_Record", [("_text", str), *stated], rename={"_text": source.field})
        self._decoder = msgspec.json.Decoder(record)

    def digest(self) -> str:
        """Return the xxh3-64 of the names and bytes read so far, as 16 hexadecimal digits; of tables, of the texts."""
        return str(self._hasher.hexdigest())

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order.

        Raises UsageError if something is not text; the message names the file and the byte; StoreError if the operating
        system refuses.
        """
        for file in self.source.files:
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
            text = self._record_text(line[mark:], begin + mark, number, file)
            yield self._record_document(text, f"line {number:,}", number, file)
            begin += len(line)

    def _rows(self, file: TextFile) -> Iterator[Document]:
        number = reported = 0
        with Table.open(file, self.source.field) as table:
            for text in table.texts():
                number += 1
                self._hasher.update(text.encode() + b"\0")
                yield self._record_document(text, f"row {number:,}", number, file)
                done = table.done(number)
                self._count(done - reported)
                reported = done
        self._count(file.nbytes - reported)

    def _record_document(self, text: str, place: str, number: int, file: TextFile) -> Document:
        if "\0" in text:
            raise _binary(f"a character of {place}", file)
        self.characters += len(text)
        return Document(f"{file.name}:{number}", (text[at : at + PIECE] for at in range(0, len(text), PIECE)))

    def _record_text(self, line: bytes, begin: int, number: int, file: TextFile) -> str:
        """Return the text of one line of JSON; an empty text if the line is blank."""
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            raise _undecodable(error, begin + len(line), file, "utf-8") from error
        if not decoded.strip():
            return ""
        try:
            record: Any = self._decoder.decode(decoded)
        except (msgspec.DecodeError, RecursionError) as error:
            remedy = (
                f'each line must be an object such as {{"{self.source.field}": "..."}}; {_FIELD_OPTION}; a '
                f"conversation, or a question and its answer, must be {CONVERSATION}"
            )
            raise UsageError(f"line {number:,} is not a document ({error})", path=file.path, remedy=remedy) from error
        for name in record.__struct_fields__[1:]:
            if contradicts_training(name, value := getattr(record, name), True):
                raise UsageError(
                    f'line {number:,} has "{name}": {shortened(value)}, which is not supported: all of a document is '
                    "trained",
                    path=file.path,
                    remedy="remove the field if that is right; else leave the document out",
                )
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
    """Which text is for training and which for validation: a fraction, and a seed that decides which documents it is.

    A stream is always cut at its end. Raises UsageError if the fraction or the seed is out of range.
    """

    validation: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise UsageError(f"validation is {self.validation}", remedy="give a fraction between 0 and 1, such as 0.1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise UsageError(f"the seed is {self.seed!r}", remedy="give an int of 0 or more, below 2**64")

    def of_document(self, name: str) -> str:
        """Return the split of a document, which does not depend on the other documents."""
        drawn = xxhash.xxh3_64_intdigest(os.fsencode(name), seed=self.seed) / 2**64
        return VALIDATION if drawn < self.validation else TRAIN

    def train_characters(self, characters: int) -> int:
        """Return the number of characters of a stream for training, as nanoGPT counts: ``data[: int(n * 0.9)]``."""
        return int(characters * (1 - self.validation))

    def split(self, reading: Reading, characters: int) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield (split, texts) for each document of a reading, or for both ends of a stream of ``characters``.

        The texts must be consumed before the next pair is requested.
        """
        for document in reading.documents():
            if reading.source.has_documents:
                yield self.of_document(document.name), document.texts
            else:
                yield from _cut(document.texts, self.train_characters(characters))


def _cut(texts: Iterator[str], characters: int) -> Iterator[tuple[str, Iterator[str]]]:
    rest: list[str] = []

    def first() -> Iterator[str]:
        left = characters
        for text in texts:
            if len(text) >= left:
                rest.append(text[left:])
                yield text[:left]
                return
            left -= len(text)
            yield text

    yield TRAIN, first()
    yield VALIDATION, chain(rest, texts)


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
