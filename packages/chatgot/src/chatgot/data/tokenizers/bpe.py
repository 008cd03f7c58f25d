"""Byte-level byte-pair encoding, trained on the corpus by Hugging Face's ``tokenizers``.

The scheme is GPT-2's: text is split into words by a pattern, and the bytes of a word are merged pair by pair, in the
order of learning (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909; Radford et al., 2019).
"""

import json
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Self

import msgspec
import numpy as np

from chatgot.data.tokenizers.base import (
    END_OF_DOCUMENT,
    Documents,
    Tokenizer,
    TokenizerFactory,
    Tokens,
    at_line_ends,
    library,
)
from tensorkeep.errors import UsageError

DEFAULT_VOCAB_SIZE = 4096
SMALLEST_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""

# Bytes of a word that pairs are learned from at once: each merge takes time proportional to the length of a word.
_LONGEST_LEARNED = 1024
# Occurrences of a pair; merging a pair that occurs once saves nothing.
_MIN_FREQUENCY = 2


class BpeTokenizer(Tokenizer):
    """Byte pairs learned from a corpus.

    ``vocabulary`` holds the tokens in the order of their ids, in GPT-2's notation of bytes, all single bytes among
    them; ``merges`` the pairs in the order of learning. With ``documents``, one more token, the last one, ends a
    document. Raises ValueError if the vocabulary and the merges do not match.
    """

    class Stored(msgspec.Struct):
        vocabulary: list[str]
        merges: list[tuple[str, str]]
        documents: bool = msgspec.field(name="end_of_document")

    kind = name = "bpe"
    is_sized = True
    merges = True

    def __init__(self, vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], *, documents: bool) -> None:
        tokenizers = library("tokenizers")
        ids = {token: id for id, token in enumerate(vocabulary)}
        if len(ids) != len(vocabulary):
            raise ValueError("a token occurs twice")
        if not ids.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
            raise ValueError("a byte is missing from the vocabulary")
        try:
            model = tokenizers.models.BPE(ids, [tuple(pair) for pair in merges])
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._vocabulary = tuple(vocabulary)
        self._merges = tuple(merges)
        self._pipeline = tokenizers.Tokenizer(model)
        self._pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._pipeline.decoder = tokenizers.decoders.ByteLevel()
        self.end_of_document = len(vocabulary) if documents else None
        self.vocab_size = len(vocabulary) + documents

    @classmethod
    def factory(cls, argument: str, vocab_size: int | None) -> TokenizerFactory | None:
        if argument:
            return None
        library("tokenizers")
        size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        if isinstance(size, bool) or not SMALLEST_VOCAB_SIZE <= size < 1 << 31:
            raise UsageError(
                f"a vocabulary of {size} is not possible: it must hold every byte and the end of a document",
                remedy=f"give {SMALLEST_VOCAB_SIZE} or more",
            )
        return TokenizerFactory(partial(cls.learn, vocab_size=size), reads=True)

    @classmethod
    def learn(cls, corpus: Documents, documents: bool, *, vocab_size: int) -> Self:
        """Return a tokenizer of the most frequent pairs of a corpus, with at most ``vocab_size`` tokens."""
        tokenizers = library("tokenizers")
        learner = tokenizers.Tokenizer(tokenizers.models.BPE())
        words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        parts = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f".{{1,{_LONGEST_LEARNED}}}"), "isolated")
        learner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, parts])
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - documents,
            min_frequency=_MIN_FREQUENCY,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        learner.train_from_iterator((text for texts in corpus for text in at_line_ends(texts)), trainer=trainer)
        model = json.loads(learner.to_str())["model"]
        vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return cls(vocabulary, [(left, right) for left, right in model["merges"]], documents=documents)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "vocabulary": list(self._vocabulary),
            "merges": [list(pair) for pair in self._merges],
            "end_of_document": self.end_of_document is not None,
        }

    def hugging_face_json(self) -> str:
        """Return the ``tokenizer.json`` of the same tokens, with the end of a document as a special token."""
        exported = library("tokenizers").Tokenizer.from_str(self._pipeline.to_str())
        if self.end_of_document is not None:
            exported.add_special_tokens([END_OF_DOCUMENT])
        return str(exported.to_str())

    def _encode(self, text: str) -> Tokens:
        # The only method of the library that does not compute offsets.
        return np.array(self._pipeline.encode_batch_fast([text])[0].ids, self.dtype)

    def _bytes(self, id: int) -> bytes:
        return bytes_of(self._vocabulary[id])


def bytes_of(token: str) -> bytes:
    """Return the UTF-8 of a token in GPT-2's notation; a token in no such notation stands for itself."""
    notation = byte_notation()
    return bytes(notation[each] for each in token) if notation.keys() >= set(token) else token.encode()


@cache
def byte_notation() -> dict[str, int]:
    """Return the bytes by their characters in GPT-2's notation: printable ones as they are, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [each for each in range(256) if each not in printable]
    return {chr(each): each for each in printable} | {chr(256 + n): each for n, each in enumerate(others)}
