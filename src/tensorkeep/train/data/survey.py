"""The first reading of a corpus: everything is decoded and counted, and the tokenizer is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorkeep.errors import UsageError
from tensorkeep.io.parallel import Meter
from tensorkeep.train.data.documents import Reading
from tensorkeep.train.data.sources import Source
from tensorkeep.train.data.splits import SPLITS, VALIDATION, SplitRule
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.data.tokenizers.known import Learn


def _none() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclass
class Survey:
    """What a corpus holds.

    Attributes
    ----------
    nbytes : int
    characters : int
    documents : dict of str to int
        How many each split has; documents without text do not count, and a stream has none.
    digest : str
        The xxh3-64 of all that was read.
    """

    nbytes: int = 0
    characters: int = 0
    documents: dict[str, int] = field(default_factory=_none)
    digest: str = ""


def survey(source: Source, learn: Learn, rule: SplitRule, meter: Meter) -> tuple[Survey, Tokenizer]:
    """Read a corpus to the end.

    Raises
    ------
    UsageError
        If it is empty, holds something that is not text, or is too small to be divided.
    StoreError
        If the operating system refuses.
    """
    found = Survey()
    reading = Reading(source, meter)
    corpus = _counted(reading, rule, found)
    tokenizer = learn(corpus, documents=source.has_documents)
    for texts in corpus:  # of which a tokenizer that learns nothing has left all
        for _ in texts:
            pass
    _check_splits(source, rule, found)
    found.nbytes, found.digest = reading.nbytes, reading.digest()
    return found, tokenizer


def _counted(reading: Reading, rule: SplitRule, found: Survey) -> Iterator[Iterator[str]]:
    for document in reading.documents():
        split = rule.of_document(document.name) if reading.source.has_documents else None
        yield _counted_texts(document.texts, split, found)
    if not found.characters:
        raise UsageError("holds no text", path=reading.source.spec, remedy="check what you gave")


def _counted_texts(texts: Iterator[str], split: str | None, found: Survey) -> Iterator[str]:
    before = found.characters
    for text in texts:
        found.characters += len(text)
        yield text
    if split is not None and found.characters > before:
        found.documents[split] += 1


def _check_splits(source: Source, rule: SplitRule, found: Survey) -> None:
    if source.has_documents:
        empty = next((split for split in SPLITS if not found.documents[split]), None)
        if empty is not None:
            count = sum(found.documents.values())
            raise UsageError(
                f"none of its {count:,} documents is for {empty}: each goes there by chance, by its name and the seed",
                path=source.spec,
                remedy="give another share or seed, more documents, or one file with all the text",
            )
        return
    train = rule.train_characters(found.characters)
    if not 0 < train < found.characters:
        split = VALIDATION if train else "training"
        raise UsageError(
            f"is so short ({found.characters:,} characters) that nothing is left for {split}",
            path=source.spec,
            remedy="give more text, or another share",
        )
