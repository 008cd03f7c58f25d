"""Tokenizers without merges: one token per character, as in nanoGPT, or one per UTF-8 byte."""

import sys
from itertools import chain
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from chatgot.data.tokenizers.base import Documents, Ids, Tokenizer, TokenizerFactory, Tokens
from tensorkeep.errors import UsageError

_BYTES = 256


class CharTokenizer(Tokenizer):
    """Characters (Unicode code points), numbered in their order; with ``documents``, one more token ends a document."""

    class Stored(msgspec.Struct):
        characters: str
        documents: bool = msgspec.field(name="end_of_document")

    kind = name = "char"
    encodes_any_text = False

    def __init__(self, characters: str, *, documents: bool) -> None:
        codes = _codes(characters)
        if not codes.size or (np.diff(codes.astype(np.int64)) <= 0).any():
            raise ValueError("the characters are not in ascending order")
        self.characters = characters
        self.end_of_document = len(characters) if documents else None
        self.vocab_size = len(characters) + documents
        # Indexed by code point; the last entry is for all code points above the largest of the vocabulary.
        self._ids = np.full(int(codes[-1]) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes))
        self._codes = codes

    @classmethod
    def factory(cls, argument: str, vocab_size: int | None) -> TokenizerFactory | None:
        return None if argument else TokenizerFactory(cls.learn, reads=True)

    @classmethod
    def learn(cls, corpus: Documents, documents: bool) -> Self:
        """Return a tokenizer of all characters of a corpus."""
        occurs = np.zeros(sys.maxunicode + 1, bool)
        for text in chain.from_iterable(corpus):
            occurs[_codes(text)] = True
        return cls("".join(map(chr, np.flatnonzero(occurs))), documents=documents)

    def as_dict(self) -> dict[str, Any]:
        end = self.end_of_document is not None
        return {"kind": self.kind, "characters": self.characters, "end_of_document": end}

    def _encode(self, text: str) -> Tokens:
        ids = self._ids[np.minimum(_codes(text), len(self._ids) - 1)]
        if ids.size and ids.min() < 0:
            unknown = text[int(np.argmin(ids))]
            raise UsageError(
                f"the character {unknown!r} (U+{ord(unknown):04X}) is not in the vocabulary",
                remedy='leave it out, or prepare the data with the tokenizer "byte" or "bpe", for all text',
            )
        return ids.astype(self.dtype)

    def _decode(self, ids: Ids) -> str:
        return self._codes[ids].tobytes().decode("utf-32-le")

    def _bytes(self, id: int) -> bytes:
        return self.characters[id].encode()


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, which encode every text; with ``documents``, a 257th token ends a document."""

    class Stored(msgspec.Struct):
        documents: bool = msgspec.field(name="end_of_document")

    kind = name = "byte"

    def __init__(self, *, documents: bool) -> None:
        self.end_of_document = _BYTES if documents else None
        self.vocab_size = _BYTES + documents

    @classmethod
    def factory(cls, argument: str, vocab_size: int | None) -> TokenizerFactory | None:
        return None if argument else TokenizerFactory(lambda corpus, documents: cls(documents=documents), reads=False)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "end_of_document": self.end_of_document is not None}

    def _encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def _decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def _bytes(self, id: int) -> bytes:
        return bytes([id])


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
