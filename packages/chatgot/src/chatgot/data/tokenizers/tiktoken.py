"""The vocabularies of OpenAI's ``tiktoken``, from its local cache; never downloaded.

``tiktoken`` caches its downloads in ``TIKTOKEN_CACHE_DIR``, ``DATA_GYM_CACHE_DIR``, or ``data-gym-cache`` in the folder
for temporary files. A vocabulary that is not in the cache is an error here. Prepared data holds the vocabulary itself,
so reading it needs no cache.
"""

import base64
import binascii
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec
import numpy as np

from chatgot.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, TokenizerFactory, Tokens, library
from tensorkeep.errors import MissingExtraError, UnsupportedError, UsageError, did_you_mean
from tensorkeep.ext import prepared

_patching = threading.Lock()


class TiktokenTokenizer(Tokenizer):
    """One of tiktoken's encodings; ValueError if it has no special token ``<|endoftext|>``, which ends a document."""

    kind = "tiktoken"
    merges = True

    def __init__(self, encoding: Any) -> None:
        if END_OF_DOCUMENT not in encoding._special_tokens:
            raise ValueError(f"the encoding {encoding.name!r} has no token {END_OF_DOCUMENT}")
        self.name = f"tiktoken:{encoding.name}"
        self.vocab_size = int(encoding.n_vocab)
        self.end_of_document = int(encoding._special_tokens[END_OF_DOCUMENT])
        self._encoding = encoding

    @classmethod
    def factory(cls, argument: str, vocab_size: int | None) -> TokenizerFactory | None:
        return TokenizerFactory.of(cls.named(argument)) if argument else None

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the encoding of a name, such as ``"gpt2"``, from tiktoken's cache."""
        tiktoken = library("tiktoken")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise UsageError(f"tiktoken has no encoding {name!r}", remedy=did_you_mean(name, known))
        try:
            with _offline():
                return cls(tiktoken.get_encoding(name))
        except _NotCached as error:
            raise UnsupportedError(
                f"the vocabulary of {name} is not on this machine ({error}), and it is not downloaded",
                remedy=f"copy it into tiktoken's cache (TIKTOKEN_CACHE_DIR); where there is a network, "
                f"`python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"` fetches it",
            ) from None
        except ValueError as error:
            raise UnsupportedError(f"the encoding {name} cannot be used: {error}") from error

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        fields = msgspec.convert(stored, prepared(_Stored))
        try:
            ranks = {base64.b64decode(token, validate=True): rank for token, rank in fields.ranks.items()}
        except binascii.Error as error:
            raise ValueError("a token is not base64") from error
        ids = [*ranks.values(), *fields.special_tokens.values()]
        if len(ranks) != len(fields.ranks) or len(set(ids)) != len(ids) or not all(0 <= id < _ID_LIMIT for id in ids):
            raise ValueError("its ids are not unique, or out of range")
        if not ranks.keys() >= {bytes([value]) for value in range(256)}:
            raise ValueError("a byte is missing from the vocabulary")
        try:
            encoding = library("tiktoken").Encoding(
                fields.name, pat_str=fields.pattern, mergeable_ranks=ranks, special_tokens=fields.special_tokens
            )
        except MissingExtraError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        return cls(encoding)

    def as_dict(self) -> dict[str, Any]:
        encoding = self._encoding
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        return {
            "kind": self.kind,
            "name": encoding.name,
            "pattern": encoding._pat_str,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
            "special_tokens": dict(encoding._special_tokens),
        }

    def _encode(self, text: str) -> Tokens:
        return np.array(self._encoding.encode_ordinary(text), self.dtype)

    def _bytes(self, id: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(id))
        except KeyError:
            # Some vocabularies have gaps, and a model may predict one.
            return "\ufffd".encode()


_ID_LIMIT = 1 << 24


class _Stored(msgspec.Struct):
    name: str
    pattern: str
    ranks: dict[str, int]
    special_tokens: dict[str, int]


class _NotCached(Exception):
    """tiktoken would download a file; the message is its address."""


@contextmanager
def _offline() -> Iterator[None]:
    """Let tiktoken read local files only, and raise `_NotCached` instead of downloading."""
    from tiktoken import load

    def read_file(blobpath: str) -> bytes:
        if "://" in blobpath:
            raise _NotCached(blobpath)
        return bytes(real(blobpath))

    with _patching:
        real = load.read_file
        load.read_file = read_file
        try:
            yield
        finally:
            load.read_file = real
