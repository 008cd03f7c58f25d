"""Writing of the token files of prepared data, and of what ``data.json`` says of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from tensorkeep.closing import Closing
from tensorkeep.formats.checksummed_json import new_hasher
from tensorkeep.storage.direct_io import DirectFile
from tensorkeep.train.data.dataset import (
    FORMAT,
    MIXTURE_VERSION,
    SPLITS,
    VERSION,
    Layout,
    MixturePart,
    Origin,
    Split,
    file_name,
)
from tensorkeep.train.data.documents import Reading, SplitRule
from tensorkeep.train.data.encoding import Piece, default_processes, encoded
from tensorkeep.train.data.tokenizers.base import Tokenizer, Tokens
from tensorkeep.version import __version__

_WRITTEN_AT_ONCE = 1 << 20


def write_tokens(
    reading: Reading,
    folder: Path,
    tokenizer: Tokenizer,
    rule: SplitRule,
    *,
    characters: int,
    processes: int | None,
) -> dict[str, Split]:
    """Read a corpus, write the tokens of its splits, and return what was written.

    A corpus that is one stream has ``characters``. By default it is encoded on all processors if it is large.
    """
    if processes is None:
        processes = default_processes(tokenizer, reading.source.nbytes)
    has_documents = reading.source.has_documents
    documents = dict.fromkeys(SPLITS, 0)
    end = np.array([tokenizer.end_of_document if has_documents else 0], tokenizer.dtype)
    begin, begins = np.array(tokenizer.opening, tokenizer.dtype), True
    pieces = encoded(tokenizer, _pieces(reading, tokenizer, rule, characters), processes)
    with token_files(folder, tokenizer) as files, closing(pieces):
        for piece, tokens in pieces:
            if begins:
                files[piece.split].add(begin)
            files[piece.split].add(tokens)
            begins = piece.ends_document
            if piece.ends_document:
                files[piece.split].add(end)
                documents[piece.split] += 1
        return splits_of(files, documents if has_documents else dict.fromkeys(SPLITS))


def _pieces(reading: Reading, tokenizer: Tokenizer, rule: SplitRule, characters: int) -> Iterator[Piece]:
    """Yield all text of a corpus but empty documents, in pieces that the tokenizer may encode by themselves."""
    for split, texts in rule.split(reading, characters):
        before = None
        for text in filter(None, tokenizer.pieces(texts)):
            if before is not None:
                yield Piece(split, before, False)
            before = text
        if before is not None:
            yield Piece(split, before, reading.source.has_documents)


class TokenFile(Closing):
    """Appends tokens to a new file and computes their checksum; a context manager that closes the file."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = DirectFile(path, direct=False)
        self._hasher = new_hasher(wide=False)
        self._waiting: list[Tokens] = []
        self._waiting_bytes = 0
        self._written = 0

    def add(self, tokens: Tokens) -> None:
        """Append tokens."""
        self._waiting.append(tokens)
        self._waiting_bytes += tokens.nbytes
        self.tokens += len(tokens)
        if self._waiting_bytes >= _WRITTEN_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            content = np.concatenate(self._waiting, dtype=self._dtype).view(np.uint8)
            self._hasher.update(content)
            self._file.write(self._written, content)
            self._written += content.nbytes
            self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> str:
        """Make the file durable, close it, and return the xxh3-64 of its bytes as 16 hexadecimal digits."""
        self._write()
        self._file.finish(self._written)
        return str(self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def token_files(folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, TokenFile]]:
    """Open new token files for the splits."""
    with ExitStack() as stack:
        yield {split: stack.enter_context(TokenFile(folder / file_name(split), tokenizer.dtype)) for split in SPLITS}


def origin_of(reading: Reading, splits: dict[str, Split], kind: str | None = None) -> Origin:
    """Return what is recorded of a corpus that was read; the kind is that of its source by default."""
    source = reading.source
    return Origin(
        spec=recorded_path(source.spec),
        kind=kind or source.kind,
        encoding=source.encoding,
        files=len(source.files),
        bytes=reading.nbytes,
        characters=reading.characters,
        documents=sum(each.documents or 0 for each in splits.values()) if source.has_documents else None,
        xxh3_64=reading.digest(),
    )


def splits_of(files: dict[str, TokenFile], documents: Mapping[str, int | None]) -> dict[str, Split]:
    """Make the token files of the splits durable, and return what is recorded of them and their documents."""
    return {
        split: Split(tokens=file.tokens, documents=documents[split], xxh3_64=file.finish())
        for split, file in files.items()
    }


def recorded_path(path: str) -> str:
    """Return a path as JSON requires it: as valid text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def layout_of(
    origin: Origin,
    tokenizer: Tokenizer,
    splits: dict[str, Split],
    rule: SplitRule,
    mixture: Sequence[MixturePart] | None = None,
) -> Layout:
    """Return the description of token files."""
    return Layout(
        format=FORMAT,
        version=VERSION if mixture is None else MIXTURE_VERSION,
        tensorkeep=__version__,
        source=origin,
        tokenizer=tokenizer.as_dict(),
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.name,
        validation=rule.validation,
        seed=rule.seed,
        splits=splits,
        mixture=None if mixture is None else [*mixture],
    )
