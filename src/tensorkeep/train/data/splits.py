"""Which text is for training and which for validation: whole documents by a hash, a stream by one cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import xxhash

from tensorkeep.errors import UsageError
from tensorkeep.train.data.documents import Reading

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a corpus is divided.

    Attributes
    ----------
    validation : float
        The share of the text that is kept for validation, between 0 and 1.
    seed : int
        Which documents that is; a stream is always cut at its end.

    Raises
    ------
    UsageError
        If one of them is out of range.
    """

    validation: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise UsageError(f"validation is {self.validation}", remedy="give a share between 0 and 1, such as 0.1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise UsageError(f"the seed is {self.seed!r}", remedy="give an int of 0 or more, below 2**64")

    def of_document(self, name: str) -> str:
        """Return the split of a document: always the same, whatever other documents there are."""
        drawn = xxhash.xxh3_64_intdigest(os.fsencode(name), seed=self.seed) / 2**64
        return VALIDATION if drawn < self.validation else TRAIN

    def train_characters(self, characters: int) -> int:
        """Return how many characters of a stream are for training, as nanoGPT counts them: ``data[: int(n * 0.9)]``."""
        return int(characters * (1 - self.validation))

    def parts(self, reading: Reading, characters: int) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield the parts of a corpus with their splits; each is to be read before the next one is asked for.

        Parameters
        ----------
        reading : Reading
        characters : int
            How many characters the corpus has.
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
