"""Reading a corpus from end to end: documents, each a stream of decoded text, with one piece in memory at a time."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

from tensorkeep.errors import UsageError
from tensorkeep.formats.sealed import new_hasher
from tensorkeep.io.files import store_error
from tensorkeep.io.parallel import Meter
from tensorkeep.train.data.sources import Source
from tensorkeep.train.data.text_files import TextFile

PIECE = 1 << 16
"""Bytes, or characters, that are handled at once."""

LONGEST_RECORD = 1 << 26
"""Bytes of one line of a ``.jsonl`` file, which is parsed as a whole."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or all of a corpus that has none.

    Attributes
    ----------
    name : str
        The file's name; in a ``.jsonl`` file with the number of the line.
    texts : iterator of str
        Its text in pieces, to be read before the next document is asked for.
    """

    name: str
    texts: Iterator[str]


class _Record(msgspec.Struct):
    text: str


class Reading:
    """One reading of a source, which is hashed on the way.

    Parameters
    ----------
    source : Source
    meter : Meter
        Told of what is read, piece by piece.

    Attributes
    ----------
    nbytes : int
        Bytes read so far.
    """

    def __init__(self, source: Source, meter: Meter) -> None:
        self.source = source
        self.nbytes = 0
        self._meter = meter
        self._hasher = new_hasher(wide=False)
        self._untold = 0
        self._nul_is_one_byte = "\0".encode(source.encoding) == b"\0"

    def digest(self) -> str:
        """Return the xxh3-64 of the names and bytes read so far, as 16 hexadecimal digits."""
        return str(self._hasher.hexdigest())

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order.

        Raises
        ------
        UsageError
            If something is not text: the message names the file and the byte.
        StoreError
            If the operating system refuses.
        """
        for file in self.source.files:
            self._hasher.update(os.fsencode(file.name) + b"\0")
            with self.source.opened(file) as stream:
                if file.has_records:
                    yield from self._records(stream, file)
                else:
                    yield Document(file.name, self._texts(stream, file))
        self._tell()

    def _texts(self, stream: IO[bytes], file: TextFile) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(self.source.encoding)()
        begin = characters = 0
        while True:
            chunk = self._taken(stream.read, PIECE, file)
            if self._nul_is_one_byte and (place := chunk.find(b"\0")) >= 0:
                raise _binary(f"byte {begin + place:,}", file)
            begin += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                raise _undecodable(error, begin, file, self.source.encoding) from error
            if (place := text.find("\0")) >= 0:
                raise _binary(f"character {characters + place:,}", file)
            characters += len(text)
            if text:
                yield text
            if not chunk:
                return

    def _records(self, stream: IO[bytes], file: TextFile) -> Iterator[Document]:
        begin = number = 0
        while line := self._taken(stream.readline, LONGEST_RECORD + 1, file):
            number += 1
            if len(line) > LONGEST_RECORD:
                raise _refused(f"line {number:,} is longer than {LONGEST_RECORD:,} bytes", file, "split the document")
            if (place := line.find(b"\0")) >= 0:
                raise _binary(f"byte {begin + place:,}", file)
            text = _record_text(line, begin, number, file)
            if "\0" in text:
                raise _binary(f"a character of line {number:,}", file)
            yield Document(f"{file.name}:{number}", (text[at : at + PIECE] for at in range(0, len(text), PIECE)))
            begin += len(line)

    def _taken(self, read: Callable[[int], bytes], count: int, file: TextFile) -> bytes:
        try:
            chunk = read(count)
        except OSError as error:
            raise store_error(error, file.path, "read the file") from error
        self._hasher.update(chunk)
        self.nbytes += len(chunk)
        self._untold += len(chunk)
        if self._untold >= PIECE:  # a line may be short, and drawing a bar takes longer than reading one
            self._tell()
        return chunk

    def _tell(self) -> None:
        self._meter.add(self._untold)
        self._untold = 0


def _record_text(line: bytes, begin: int, number: int, file: TextFile) -> str:
    """Return the text of one line; none if the line is blank."""
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise _undecodable(error, begin + len(line), file, "utf-8") from error
    if not decoded.strip():
        return ""
    try:
        return msgspec.json.decode(decoded, type=_Record).text
    except (msgspec.DecodeError, RecursionError) as error:
        remedy = 'each line is to be an object such as {"text": "..."}'
        raise _refused(f"line {number:,} is no document ({error})", file, remedy) from error


def _undecodable(error: UnicodeError, end: int, file: TextFile, encoding: str) -> UsageError:
    """Return the error of bytes, of which the decoder has got all before ``end``, that are not in the encoding."""
    reason, place = str(error), end
    if isinstance(error, UnicodeDecodeError):
        # The decoder may have held back bytes of the piece before: what it complains of are the last ones it got.
        reason, place = error.reason, end - len(error.object) + error.start
    remedy = "say how it is encoded (--encoding latin-1), or leave the file out"
    return _refused(f"byte {place:,} is not {encoding} ({reason})", file, remedy)


def _binary(where: str, file: TextFile) -> UsageError:
    return _refused(f"{where} is NUL, so this is no text", file, "leave the file out, or say how it is encoded")


def _refused(message: str, file: TextFile, remedy: str) -> UsageError:
    return UsageError(message, path=file.path, remedy=remedy)
