"""Tokenizers of Hugging Face models: ``tokenizer.json``, or GPT-2's ``vocab.json`` and ``merges.txt``.

Only byte-level byte pairs, as GPT-2's and LLaMA 3's, encode every text and give it back; a normalization to NFC, as
Qwen's, only composes characters. Others are refused.
"""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chatgot.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, Tokens, library
from chatgot.data.tokenizers.bpe import bytes_of
from tensorkeep.errors import CorruptCheckpointError, MissingExtraError, UnsupportedError
from tensorkeep.ext import prepared
from tensorkeep.ext.storage import store_errors

logger = logging.getLogger(__name__)

FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OLD_FILES = ("vocab.json", "merges.txt")
# Text of several scripts and kinds of white space, in NFC.
_PROBE = "A b\tÜ\n  漢字 12!"


class HuggingFaceTokenizer(Tokenizer):
    """A byte-level tokenizer of the package ``tokenizers``, from the text of its ``tokenizer.json``.

    Truncation and padding, which it may ask for, are left out: a text has all of its tokens, and no others. Documents
    and prompts begin with ``begin_of_document``, if it is given. ValueError states why the text cannot be used.
    """

    class Stored(msgspec.Struct):
        text: str = msgspec.field(name="tokenizer")
        end_of_document: int | None
        begin_of_document: int | None = None

    kind = name = "huggingface"
    merges = True

    def __init__(self, text: str, end_of_document: int | None, begin_of_document: int | None = None) -> None:
        self.begin_of_document, self.end_of_document = begin_of_document, end_of_document
        ends = [id for id in (begin_of_document, end_of_document) if id is not None]
        self._pipeline = _pipeline(text, ends)
        stored = json.loads(text)
        if stored["model"].get("type") != "BPE" or "ByteLevel" not in json.dumps(stored.get("pre_tokenizer")):
            raise ValueError("it is not byte-level")
        if changing := _changing_normalizer(stored.get("normalizer")):
            raise ValueError(f"its normalizer {changing} changes the text")
        vocabulary = self._pipeline.get_vocab(with_added_tokens=True)
        self._tokens: dict[int, str] = {id: token for token, id in vocabulary.items()}
        self._added = {each["id"]: bool(each["special"]) for each in stored.get("added_tokens", ())}
        if unknown := set(ends) - self._tokens.keys():
            raise ValueError(f"it has no token {min(unknown)}")
        self._text = text
        self.vocab_size = max(self._tokens) + 1
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise ValueError("it does not give back the text that it encodes")
        for id in ends:
            if id in self.encode(self._tokens[id]):
                what = "ends" if id == end_of_document else "begins"
                raise ValueError(f"it encodes text as {self._tokens[id]!r}, which {what} a document")

    @property
    def reserved(self) -> frozenset[int]:
        return super().reserved | {id for id, special in self._added.items() if special}

    def as_dict(self) -> dict[str, Any]:
        stored = {"kind": self.kind, "tokenizer": self._text, "end_of_document": self.end_of_document}
        # Data of earlier versions has no such tokens.
        return stored if self.begin_of_document is None else {**stored, "begin_of_document": self.begin_of_document}

    def hugging_face_json(self) -> str:
        """Return the ``tokenizer.json``, which adds ``begin_of_document`` to a text, and no other token."""
        if added_tokens(self._text) == (self.opening, []):
            return self._text
        tokenizers = library("tokenizers")
        exported = tokenizers.Tokenizer.from_str(self._text)
        names = [(self._tokens[id], id) for id in self.opening]
        first, second = (
            [*(f"{name}:{number}" for name, _ in names), text] for number, text in enumerate(("$A:0", "$B:1"))
        )
        exported.post_processor = tokenizers.processors.TemplateProcessing(
            single=first, pair=[*first, *second], special_tokens=names
        )
        return str(exported.to_str())

    def _encode(self, text: str) -> Tokens:
        encoded = self._pipeline.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoded.ids, self.dtype)

    def _bytes(self, id: int) -> bytes:
        token = self._tokens.get(id)
        if token is None:
            # Some vocabularies have gaps, and a model may predict one.
            return "\ufffd".encode()
        return token.encode() if id in self._added else bytes_of(token)


def added_tokens(text: str) -> tuple[list[int], list[int]]:
    """Return the tokens that a ``tokenizer.json`` puts before each text, and those that it puts after it."""
    pipeline = library("tokenizers").Tokenizer.from_str(text)
    pipeline.no_truncation()
    pipeline.no_padding()
    own, whole = (pipeline.encode("a", add_special_tokens=added).ids for added in (False, True))
    begin = next((at for at in range(len(whole)) if whole[at : at + len(own)] == own), 0)
    return whole[:begin], whole[begin + len(own) :]


def _pipeline(text: str, ends: list[int]) -> Any:
    """Return the library's tokenizer, which encodes a whole text, and nothing as the end of a document."""
    try:
        stored = json.loads(text)
        for token in stored.get("added_tokens", ()):
            # One that is not special would be found in text.
            token["special"] |= token["id"] in ends
        pipeline = library("tokenizers").Tokenizer.from_str(json.dumps(stored))
    except MissingExtraError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error)) from error
    pipeline.no_truncation()
    pipeline.no_padding()
    # Special tokens in a corpus are ordinary text.
    pipeline.encode_special_tokens = True
    return pipeline


def _changing_normalizer(normalizer: dict[str, Any] | None) -> str | None:
    """Return the type of the first normalizer, within a sequence too, other than NFC, if one exists."""
    if normalizer is None or normalizer["type"] == "NFC":
        return None
    if normalizer["type"] == "Sequence":
        return next(filter(None, map(_changing_normalizer, normalizer["normalizers"])), None)
    return str(normalizer["type"])


class _Token(msgspec.Struct):
    content: str


class _Settings(msgspec.Struct):
    eos_token: str | _Token | None = None
    bos_token: str | _Token | None = None
    add_bos_token: bool | None = None

    def content(self, name: str) -> str | None:
        """Return the text of a token, if it is stated."""
        token: str | _Token | None = getattr(self, name)
        return token.content if isinstance(token, _Token) else token


def read_tokenizer(folder: Path) -> HuggingFaceTokenizer | None:
    """Return the tokenizer of a model's folder; None if it has none.

    The token that ends a document is the ``eos_token`` of its settings, by default ``<|endoftext|>`` if that exists. A
    tokenizer without one is for streams of text, and for conversations, which add one. The token that begins a document
    is the one that the tokenizer puts before each text, as LLaMA 3's does, unless ``add_bos_token`` states otherwise.
    """
    path = folder / FILE
    with store_errors(path, "read the tokenizer"):
        if path.exists():
            content = path.read_bytes()
        elif all((folder / name).exists() for name in _OLD_FILES):
            # An error names the folder: the text comes from both files.
            path, content = folder, _from_old_files(folder).encode()
        else:
            return None
        place = folder / _SETTINGS
        stored = place.read_bytes() if place.exists() else b"{}"
    try:
        settings = msgspec.json.decode(stored, type=prepared(_Settings))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"is not the settings of a tokenizer ({error})", path=place) from error
    stated = settings.content("eos_token")
    try:
        text = content.decode()
        pipeline = library("tokenizers").Tokenizer.from_str(text)
        token = pipeline.token_to_id(stated or END_OF_DOCUMENT)
    except MissingExtraError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CorruptCheckpointError(f"is not a tokenizer ({error})", path=path) from error
    if token is None and stated is not None:
        raise UnsupportedError(
            f"has no token {stated!r} to end a document", path=folder, remedy=f"state another eos_token in {_SETTINGS}"
        )
    try:
        begins = added_tokens(text)[0]
    except Exception:  # not byte-level, which is refused below
        begins = []
    if settings.add_bos_token is not None:
        begins = _stated_begin(settings, pipeline, begins, path)
    if len(begins) > 1:
        raise UnsupportedError(
            f"the tokenizer puts {len(begins)} tokens before each text, and one is supported",
            path=path,
            remedy=f"state add_bos_token in {_SETTINGS}, with bos_token or false",
        )
    try:
        return HuggingFaceTokenizer(text, token, *begins)
    except ValueError as error:
        raise UnsupportedError(
            f"the tokenizer cannot be used: {error}",
            path=path,
            remedy="only byte-level byte pairs are supported, as GPT-2's and LLaMA 3's",
        ) from error


def _stated_begin(settings: _Settings, pipeline: Any, begins: list[int], path: Path) -> list[int]:
    """Return the tokens that ``add_bos_token`` puts before each text, in place of the ``tokenizer.json``."""
    name = settings.content("bos_token")
    begin = None if name is None else pipeline.token_to_id(name)
    if settings.add_bos_token and name is not None and begin is None:
        raise UnsupportedError(
            f"has no token {name!r} to begin a document",
            path=path.parent,
            remedy=f"state another bos_token in {_SETTINGS}, or add_bos_token false",
        )
    stated = [begin] if settings.add_bos_token and begin is not None else []
    if stated != begins:
        # Transformers 4 follows the setting for some classes, transformers 5 for old files only.
        logger.warning(
            "%s: add_bos_token is %s, and the tokenizer itself puts %s before a text: documents begin with %s",
            path.parent / _SETTINGS,
            str(settings.add_bos_token).lower(),
            *([pipeline.id_to_token(id) for id in each] or "nothing" for each in (begins, stated)),
        )
    return stated


def _from_old_files(folder: Path) -> str:
    """Return the ``tokenizer.json`` of GPT-2's two files."""
    tokenizers = library("tokenizers")
    try:
        model = tokenizers.models.BPE.from_file(*(str(folder / name) for name in _OLD_FILES))
    except Exception as error:  # the library raises nothing narrower
        raise CorruptCheckpointError(f"{' and '.join(_OLD_FILES)} are malformed ({error})", path=folder) from error
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    if pipeline.token_to_id(END_OF_DOCUMENT) is not None:
        pipeline.add_special_tokens([END_OF_DOCUMENT])
    return str(pipeline.to_str())
