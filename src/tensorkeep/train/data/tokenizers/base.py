"""What a tokenizer is: the contract that all of them keep, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UsageError
from tensorkeep.formats import sealed

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""A 1-D array of uint16 or uint32."""

Ids = npt.NDArray[np.int64]

Corpus = Iterator[Iterator[str]]
"""Documents in order, each a stream of text; a document is read to its end before the next one begins."""

END_OF_DOCUMENT = "<|endoftext|>"
"""How the end of a document is written in decoded text; in a corpus these characters are text like any other."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype that holds the tokens of a vocabulary: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokenizer(ABC):
    """Text to tokens and back; a value that never changes.

    Attributes
    ----------
    name : str
        As it was asked for, such as ``"char"`` or ``"tiktoken:gpt2"``.
    vocab_size : int
        How many tokens there are; ids are below it.
    end_of_document : int or None
        The token that stands behind each document, if there is one. No text is encoded as it.
    """

    name: str
    vocab_size: int
    end_of_document: int | None

    @cached_property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of its tokens: uint16 where the vocabulary allows, else uint32."""
        return token_dtype(self.vocab_size)

    @cached_property
    def digest(self) -> str:
        """The xxh3-64 of `as_dict`, as 16 hexadecimal digits: equal for tokenizers that do the same."""
        return sealed.digest(msgspec.json.encode(self.as_dict()))

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text.

        Raises
        ------
        UsageError
            If the text holds something that is no token, or is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"character {error.start:,} of the text is half of a surrogate pair, which no text holds",
                remedy="check how the text was decoded",
            ) from None
        return self._encode(text)

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Tokens]:
        """Yield the tokens of a text that comes in pieces: those of the whole text, wherever the pieces end."""
        return map(self.encode, texts)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of some tokens; what is no UTF-8 becomes the replacement character.

        Parameters
        ----------
        ids : array-like of int
            Any shape; read in order.

        Raises
        ------
        UsageError
            If an id is not in the vocabulary.
        """
        flat = np.asarray(ids).astype(np.int64).ravel()
        outside = flat[(flat < 0) | (flat >= self.vocab_size)]
        if outside.size:
            raise UsageError(
                f"{outside[0]} is no token of {self.name}, whose vocabulary has {self.vocab_size:,}",
                remedy="use the tokenizer that the tokens were made with",
            )
        if self.end_of_document is None:
            return self._decode(flat)
        ends = np.flatnonzero(flat == self.end_of_document)
        # Each but the first begins with the token that ends the one before.
        first, *others = np.split(flat, ends)
        return END_OF_DOCUMENT.join([self._decode(first), *(self._decode(part[1:]) for part in others)])

    def hugging_face_json(self) -> str | None:
        """Return the ``tokenizer.json`` that Hugging Face's libraries read; None if there is no such form."""
        return None

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return all that it is made of, as JSON values; ``"kind"`` names the class."""

    @abstractmethod
    def _encode(self, text: str) -> Tokens:
        """Return the tokens of a text that is valid Unicode."""

    @abstractmethod
    def _decode(self, ids: Ids) -> str:
        """Return the text of ids that are all in the vocabulary and no end of a document."""
