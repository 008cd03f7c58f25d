"""The contract of a tokenizer, and code that all tokenizers share."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UsageError, import_extra
from tensorkeep.ext import prepared
from tensorkeep.ext.formats import checksummed_json

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""A 1-D array of uint16 or uint32."""

Ids = npt.NDArray[np.int64]
Documents = Iterator[Iterator[str]]
"""Documents in order, each a stream of text that is consumed before the next document."""

END_OF_DOCUMENT = "<|endoftext|>"
"""The end-of-document token in decoded text. In a corpus these characters are ordinary text."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype that holds the tokens of a vocabulary: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, slots=True)
class TokenizerFactory:
    """Makes a tokenizer for a corpus, given whether that has documents; ``reads`` if it learns from the corpus."""

    make: Callable[[Documents, bool], "Tokenizer"]
    reads: bool

    def __call__(self, corpus: Documents, documents: bool) -> "Tokenizer":
        return self.make(corpus, documents)

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "TokenizerFactory":
        """Return the factory of a tokenizer that exists."""

        def check(corpus: Documents, documents: bool) -> Tokenizer:
            # In the first pass, if there is one. Otherwise `corpus` is empty, and encoding the data meets a character
            # that is not in the vocabulary.
            for text in () if tokenizer.encodes_any_text else chain.from_iterable(corpus):
                tokenizer.encode(text)
            return tokenizer

        return cls(check, reads=False)


class Tokenizer(ABC):
    """Converts text to tokens and back. Tokenizers are immutable."""

    name: str
    """As the user gives it, such as ``"char"`` or ``"tiktoken:gpt2"``."""
    vocab_size: int
    """The number of tokens; every id is below it."""
    end_of_document: int | None
    """The token that follows each document, if there is one. No text is encoded as it."""
    begin_of_document: int | None = None
    """The token that precedes each document, and each prompt, if there is one. No text is encoded as it."""
    kind: ClassVar[str]
    """Its name in `as_dict`."""
    Stored: ClassVar[type[msgspec.Struct]]
    """The arguments of the class, by their names in `as_dict`."""
    is_sized: ClassVar[bool] = False
    """Whether the user may choose the size of the vocabulary."""
    merges: bool = False
    """Whether a token may stand for several characters, so that the tokens of a text depend on where it is cut."""
    encodes_any_text: bool = True
    """Whether every character is in the vocabulary, or is encoded as several tokens."""

    @cached_property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of its tokens: uint16 if the vocabulary is small enough, else uint32."""
        return token_dtype(self.vocab_size)

    @property
    def reserved(self) -> frozenset[int]:
        """The tokens that no text is encoded as."""
        return frozenset(id for id in (self.begin_of_document, self.end_of_document) if id is not None)

    @property
    def opening(self) -> list[int]:
        """The tokens that each document begins with: one or none."""
        return [] if self.begin_of_document is None else [self.begin_of_document]

    @cached_property
    def digest(self) -> str:
        """The xxh3-64 of `as_dict`, as 16 hexadecimal digits: equal for equal tokenizers."""
        return checksummed_json.digest(msgspec.json.encode(self.as_dict()))

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text; UsageError if a character is not in the vocabulary, or not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"character {error.start:,} of the text is half of a surrogate pair, so the text is not valid Unicode",
                remedy="check how the text was decoded",
            ) from None
        return self._encode(text)

    def pieces(self, texts: Iterator[str]) -> Iterator[str]:
        """Return the same text in pieces that may be encoded by themselves; the tokens do not depend on ``texts``."""
        return at_line_ends(texts) if self.merges else texts

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of ids of any shape, with replacement characters for invalid UTF-8."""
        flat = self._checked(np.asarray(ids).astype(np.int64).ravel())
        if self.end_of_document is None:
            return self._decode(flat)
        ends = np.flatnonzero(flat == self.end_of_document)
        # Every piece but the first begins with the end-of-document token.
        first, *others = np.split(flat, ends)
        return END_OF_DOCUMENT.join([self._decode(first), *(self._decode(part[1:]) for part in others)])

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of ids as soon as its characters are complete; joined, it is the text of `decode`."""
        # A token may end within a character, which has up to four bytes in UTF-8.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in ids:
            if text := decoder.decode(self.token_bytes(id)):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 of a token, which may end within a character; the end of a document is `END_OF_DOCUMENT`."""
        self._checked(np.array([id]))
        return END_OF_DOCUMENT.encode() if id == self.end_of_document else self._bytes(id)

    def _checked(self, ids: Ids) -> Ids:
        """Raise UsageError if an id is not in the vocabulary."""
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise UsageError(
                f"{outside[0]} is not a token of {self.name}, which has {self.vocab_size:,} tokens",
                remedy="use the tokenizer that the tokens were made with",
            )
        return ids

    def hugging_face_json(self) -> str | None:
        """Return the ``tokenizer.json`` of Hugging Face's libraries; None if this tokenizer cannot be written so."""
        return None

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """Return the tokenizer that `as_dict` described; ValueError or ValidationError if that is malformed."""
        return cls(**msgspec.structs.asdict(msgspec.convert(stored, prepared(cls.Stored))))

    @classmethod
    def factory(cls, argument: str, vocab_size: int | None) -> TokenizerFactory | None:
        """Return what makes the tokenizer of a choice such as ``"tiktoken:gpt2"``; None if it has no such argument."""
        return None

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values for `from_dict`; ``"kind"`` names the class."""

    @abstractmethod
    def _encode(self, text: str) -> Tokens:
        """Return the tokens of a text that is valid Unicode."""

    def _decode(self, ids: Ids) -> str:
        """Return the text of ids that are in the vocabulary and not the end-of-document token."""
        return b"".join(map(self._bytes, ids.tolist())).decode(errors="replace")

    @abstractmethod
    def _bytes(self, id: int) -> bytes:
        """Return the UTF-8 of one token, which is in the vocabulary and not the end-of-document token."""


LONGEST_UNCUT = 1 << 20
"""Characters that `at_line_ends` keeps while it looks for a place to cut; a longer text is cut anywhere."""


def at_line_ends(texts: Iterator[str]) -> Iterator[str]:
    """Yield the same text in pieces that end at line ends, so that byte pairs are the same as for the whole text.

    The patterns that split text into words before byte pairs are merged (GPT-2's, cl100k's, o200k's) never join the
    text before and after a line end that follows a visible character and is followed by a letter, a digit or an
    underscore. They may join blank and indented lines with their neighbours, so nothing is cut there.
    """
    kept = ""
    for text in texts:
        kept += text
        place = _last_line_start(kept)
        # A text without line ends must not be kept in memory as a whole; a cut may change a few tokens.
        if not place and len(kept) >= LONGEST_UNCUT:
            place = len(kept)
        if place:
            yield kept[:place]
            kept = kept[place:]
    if kept:
        yield kept


def _last_line_start(text: str) -> int:
    """Return the start of the last line that may be cut off, or 0 if no line may be."""
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, max(end, 1))) > 0:
        before, after = text[newline - 1], text[newline + 1]
        if not before.isspace() and (after.isalnum() or after == "_"):
            return newline + 1
        end = newline
    return 0


def library(name: str) -> Any:
    """Import the package of a tokenizer; MissingExtraError if it is not installed."""
    return import_extra(name, "chatgot", f"this tokenizer needs the package {name}")


def prompt_ids(tokenizer: Tokenizer, prompt: str | None) -> list[int]:
    """Return the tokens of a prompt, as a document begins; None begins a new document, or a new line, or is token 0."""
    if prompt is not None:
        ids: list[int] = tokenizer.encode(prompt).tolist()
        if not ids:
            raise UsageError("the prompt is empty", remedy="give some text, or no prompt")
        return [*tokenizer.opening, *ids]
    if tokenizer.opening:
        return tokenizer.opening
    if tokenizer.end_of_document is not None:
        return [tokenizer.end_of_document]
    try:
        return [int(tokenizer.encode("\n")[0])]
    except UsageError:
        return [0]
