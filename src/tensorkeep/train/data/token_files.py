"""Writing of the token files of prepared data."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from tensorkeep.formats.sealed import new_hasher
from tensorkeep.io.files import DirectFile
from tensorkeep.train.data.dataset import SPLITS, Split, file_name
from tensorkeep.train.data.documents import Reading, SplitRule
from tensorkeep.train.data.encoding import Piece, default_processes, encoded
from tensorkeep.train.data.tokenizers.base import Tokenizer, Tokens

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
    with ExitStack() as stack:
        files = {split: TokenFile(folder / file_name(split), tokenizer.dtype, stack) for split in SPLITS}
        pieces = encoded(tokenizer, _pieces(reading, tokenizer, rule, characters), processes)
        for piece, tokens in stack.enter_context(closing(pieces)):
            files[piece.split].add(tokens)
            if piece.ends_document:
                files[piece.split].add(end)
                documents[piece.split] += 1
        return {
            split: Split(
                tokens=file.tokens, documents=documents[split] if has_documents else None, xxh3_64=file.finish()
            )
            for split, file in files.items()
        }


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


class TokenFile:
    """Appends tokens to a new file, which a stack closes, and computes their checksum."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], stack: ExitStack) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = DirectFile(path, direct=False)
        stack.callback(self._file.close)
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
