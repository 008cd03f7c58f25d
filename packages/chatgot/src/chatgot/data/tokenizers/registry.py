"""The registry of tokenizers: made by name for a corpus, or read from prepared data.

A new tokenizer is a file with a subclass of `Tokenizer`, and its entry in `_CLASSES`.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from chatgot.data.tokenizers.base import Tokenizer, TokenizerFactory
from chatgot.data.tokenizers.bpe import BpeTokenizer
from chatgot.data.tokenizers.char import ByteTokenizer, CharTokenizer
from chatgot.data.tokenizers.chat import SUFFIX, ChatTokenizer
from chatgot.data.tokenizers.huggingface import FILE, HuggingFaceTokenizer, read_tokenizer
from chatgot.data.tokenizers.tiktoken import TiktokenTokenizer
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UsageError
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import LocalDirectory, store_errors

FROM = "from"
CHOICES = ("char", "byte", "bpe", "tiktoken:NAME", f"{FROM}:FOLDER")
_CLASSES: dict[str, type[Tokenizer]] = {
    each.kind: each
    for each in (CharTokenizer, ByteTokenizer, BpeTokenizer, TiktokenTokenizer, HuggingFaceTokenizer, ChatTokenizer)
}

Find = Callable[[Path], Tokenizer | None]


def make_tokenizer(choice: str, vocab_size: int | None = None, find: Find | None = None) -> TokenizerFactory:
    """Return what makes a tokenizer; arguments, as of `prepare`, are checked before a corpus is read.

    ``find`` returns the tokenizer of a folder, by default `tokenizer_at`.
    """
    if choice.endswith(SUFFIX):
        text = make_tokenizer(choice.removesuffix(SUFFIX), vocab_size, find)
        return TokenizerFactory(lambda corpus, documents: ChatTokenizer.of(text(corpus, documents)), reads=text.reads)
    kind, colon, name = choice.partition(":")
    found = _CLASSES.get(kind)
    if vocab_size is not None and not (found is not None and found.is_sized):
        remedy = "leave the size out, or use bpe"
        raise UsageError(f"the tokenizer {choice!r} has a fixed vocabulary size", remedy=remedy)
    if kind == FROM and name:
        given = (find or tokenizer_at)(Path(name))
        if given is None:
            remedy = "give the folder of a run, of a Hugging Face model or of prepared data"
            raise NotACheckpointError("has no tokenizer", path=name, remedy=remedy)
        return TokenizerFactory.of(given)
    factory = None if found is None or (colon and not name) else found.factory(name, vocab_size)
    if factory is not None:
        return factory
    near = difflib.get_close_matches(kind, [each.partition(":")[0] for each in CHOICES], n=1)
    hint = f"did you mean {near[0]!r}? " if near and not colon else ""
    raise UsageError(f"there is no tokenizer {choice!r}", remedy=f"{hint}give one of {', '.join(CHOICES)}")


def tokenizer_at(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a run or of a Hugging Face model, by its folder; None if the folder has no tokenizer."""
    path, opening = folder / FILE, b""
    with store_errors(path, "read the tokenizer"):
        if path.is_file():
            with path.open("rb") as file:
                opening = file.read(len(checksummed_json.OPENING))
    if opening != checksummed_json.OPENING:
        return read_tokenizer(folder)
    with LocalDirectory(folder) as directory:
        return tokenizer_from_dict(checksummed_json.read(directory, FILE))


def tokenizer_from_dict(stored: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.as_dict` described; CorruptCheckpointError if that is malformed."""
    kind = stored.get("kind")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise CorruptCheckpointError(f"there is no tokenizer of the kind {kind!r}")
    try:
        if kind == ChatTokenizer.kind:
            text = stored.get("text")
            if not isinstance(text, dict) or text.get("kind") == kind:
                raise ValueError("it has no tokenizer of text")
            stored = {**stored, "text": tokenizer_from_dict(text)}
        return _CLASSES[kind].from_dict(stored)
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpointError(f"the {kind} tokenizer is malformed ({error})") from error
