"""The registry of tokenizers: made by name for a corpus, or read from prepared data."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UsageError
from tensorkeep.formats import checksummed_json
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.train.data.tokenizers.base import Documents, Tokenizer, library
from tensorkeep.train.data.tokenizers.bpe import DEFAULT_VOCAB_SIZE, SMALLEST_VOCAB_SIZE, BpeTokenizer
from tensorkeep.train.data.tokenizers.char import ByteTokenizer, CharTokenizer
from tensorkeep.train.data.tokenizers.chat import SUFFIX, ChatTokenizer
from tensorkeep.train.data.tokenizers.huggingface import FILE, HuggingFaceTokenizer, read_tokenizer
from tensorkeep.train.data.tokenizers.tiktoken import TiktokenTokenizer

FROM = "from"
CHOICES = ("char", "byte", "bpe", "tiktoken:NAME", f"{FROM}:FOLDER")

_FROM_DICT: dict[object, Callable[[dict[str, Any]], Tokenizer]] = {
    "char": CharTokenizer.from_dict,
    "byte": ByteTokenizer.from_dict,
    "bpe": BpeTokenizer.from_dict,
    "tiktoken": TiktokenTokenizer.from_dict,
    "huggingface": HuggingFaceTokenizer.from_dict,
    "chat": lambda stored: _chat_from_dict(stored),
}


Find = Callable[[Path], Tokenizer | None]


@dataclass(frozen=True, slots=True)
class TokenizerFactory:
    """Makes a tokenizer for a corpus, given whether that consists of documents, and whether it must be read before."""

    make: Callable[[Documents, bool], Tokenizer]
    reads: bool

    def __call__(self, corpus: Documents, documents: bool) -> Tokenizer:
        return self.make(corpus, documents)


def make_tokenizer(choice: str, vocab_size: int | None = None, find: Find | None = None) -> TokenizerFactory:
    """Return the function that makes a tokenizer; arguments, as of `prepare`, are checked before a corpus is read.

    ``find`` returns the tokenizer of a folder, as `tokenizer_at` does.

    Raises UsageError if there is no such tokenizer, or the vocabulary size is not possible; MissingExtraError if it
    needs a package that is not installed; UnsupportedError if it needs a vocabulary that is not on this machine.
    """
    if choice.endswith(SUFFIX):
        text = make_tokenizer(choice.removesuffix(SUFFIX), vocab_size, find)
        return TokenizerFactory(lambda corpus, documents: ChatTokenizer.of(text(corpus, documents)), reads=text.reads)
    kind, colon, name = choice.partition(":")
    if vocab_size is not None and kind != "bpe":
        raise UsageError(
            f"the tokenizer {choice!r} has a fixed vocabulary size", remedy="leave the size out, or use bpe"
        )
    if kind == "tiktoken" and name:
        found = TiktokenTokenizer.named(name)
        return TokenizerFactory(lambda corpus, documents: found, reads=False)
    if kind == FROM and name:
        given = (find or tokenizer_at)(Path(name))
        if given is None:
            raise NotACheckpointError(
                "has no tokenizer",
                path=name,
                remedy="give the folder of a run, of a Hugging Face model or of prepared data",
            )
        return adopted(given)
    if choice == "char":
        return TokenizerFactory(CharTokenizer.learn, reads=True)
    if choice == "byte":
        return TokenizerFactory(lambda corpus, documents: ByteTokenizer(documents=documents), reads=False)
    if choice == "bpe":
        library("tokenizers")
        size = _checked(DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size)
        return TokenizerFactory(partial(BpeTokenizer.learn, vocab_size=size), reads=True)
    near = difflib.get_close_matches(kind, [each.partition(":")[0] for each in CHOICES], n=1)
    hint = f"did you mean {near[0]!r}? " if near and not colon else ""
    raise UsageError(f"there is no tokenizer {choice!r}", remedy=f"{hint}give one of {', '.join(CHOICES)}")


def adopted(tokenizer: Tokenizer) -> TokenizerFactory:
    """Return the function that makes a tokenizer which exists, after a check that it encodes the corpus it is given.

    Without a first pass over the corpus, a character that is not in the vocabulary is found as the corpus is encoded.
    """

    def check(corpus: Documents, documents: bool) -> Tokenizer:
        if not tokenizer.encodes_any_text:
            for texts in corpus:
                for text in texts:
                    tokenizer.encode(text)
        return tokenizer

    return TokenizerFactory(check, reads=False)


def _checked(vocab_size: int) -> int:
    if isinstance(vocab_size, bool) or not SMALLEST_VOCAB_SIZE <= vocab_size < 1 << 31:
        raise UsageError(
            f"a vocabulary of {vocab_size} is not possible: it must hold every byte and the end of a document",
            remedy=f"give {SMALLEST_VOCAB_SIZE} or more",
        )
    return vocab_size


def tokenizer_at(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run or of a Hugging Face model, by its folder; None if the folder has no tokenizer.

    Raises the errors of `tokenizer_from_dict` and `read_tokenizer`.
    """
    path = folder / FILE
    with store_errors(path, "read the tokenizer"):
        if not path.is_file():
            return read_tokenizer(folder)
        with path.open("rb") as file:
            is_sealed = file.read(len(checksummed_json.OPENING)) == checksummed_json.OPENING
    if not is_sealed:
        return read_tokenizer(folder)
    with LocalDirectory(folder) as directory:
        return tokenizer_from_dict(checksummed_json.read(directory, FILE))


def tokenizer_from_dict(stored: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.as_dict` described.

    Raises CorruptCheckpointError if the description is malformed; MissingExtraError if the tokenizer needs a package
    that is not installed.
    """
    kind = stored.get("kind")
    read = _FROM_DICT.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise CorruptCheckpointError(f"there is no tokenizer of the kind {kind!r}")
    try:
        return read(stored)
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpointError(f"the {kind} tokenizer is malformed ({error})") from error


def _chat_from_dict(stored: dict[str, Any]) -> ChatTokenizer:
    """Return the tokenizer of conversations that `ChatTokenizer.as_dict` described; ValueError if that is malformed."""
    text = stored.get("text")
    if not isinstance(text, dict) or text.get("kind") == "chat":
        raise ValueError("it has no tokenizer of text")
    return ChatTokenizer(tokenizer_from_dict(text))
