"""One token per UTF-8 byte: 256 tokens, which can encode every text."""

from typing import Any, Self

import msgspec
import numpy as np

from tensorkeep.train.data.tokenizers.base import Ids, Tokenizer, Tokens

_BYTES = 256


class ByteTokenizer(Tokenizer):
    """The bytes of text in UTF-8.

    Parameters
    ----------
    documents : bool
        Whether there is a 257th token, which ends a document.
    """

    name = "byte"

    def __init__(self, *, documents: bool) -> None:
        self.end_of_document = _BYTES if documents else None
        self.vocab_size = _BYTES + documents

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """Return the tokenizer that `as_dict` described; ValueError or ValidationError if that is malformed."""
        return cls(documents=msgspec.convert(stored, _Stored).end_of_document)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "byte", "end_of_document": self.end_of_document is not None}

    def _encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def _decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class _Stored(msgspec.Struct):
    end_of_document: bool
