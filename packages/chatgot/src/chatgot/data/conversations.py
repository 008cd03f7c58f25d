"""Conversations: lines of JSON become tokens by a template.

Each line of a ``.jsonl`` file is one conversation::

    {"messages": [{"role": "system", "content": "Be brief."},
                  {"role": "user", "content": "Hello!"},
                  {"role": "assistant", "content": "Hi."}]}

The template is ``<|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|><|endoftext|>``, where each
name in ``<|...|>`` is one token of `ChatTokenizer`, and nothing is added to the text.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from chatgot.data.corpus import (
    CONVERSATION,
    LONGEST_RECORD,
    MASKS,
    UTF8_MARK,
    WEIGHTS,
    Corpus,
    CorpusReader,
    SplitRule,
    TextFile,
    contradicts_training,
    shortened,
)
from chatgot.data.dataset import CONVERSATIONS, DataManifest
from chatgot.data.encoding import TextPiece, layout_of, origin_of, write_tokens
from chatgot.data.tokenizers.base import Tokenizer, TokenizerFactory
from chatgot.data.tokenizers.chat import ChatTokenizer
from tensorkeep.errors import StoreError, UsageError
from tensorkeep.ext import prepared
from tensorkeep.ext.storage import Meter, Progress

logger = logging.getLogger(__name__)


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]


# Fields with text, or a meaning, that the template, or training on all answers, has no place for.
# fmt: off
_REFUSED = frozenset((
    "tools", "functions", "tool_calls", "tool_call_id", "function_call", "name", "reasoning_content", "reasoning",
    "reasoning_details", "thinking", "thoughts", "refusal", "prefix", "images", "image", "videos", "audio", "audios",
    "documents", "system", "system_prompt", "chat_template", "chat_template_kwargs", "chosen", "rejected",
    "rejected_response", "rejected_messages",
))
# fmt: on

# Names of fields that are counted; a hostile file has any number.
_MOST_UNUSED = 100
_MOST_NAMED = 5


def _unused_fields(fields: dict[str, Any], trained: bool) -> Iterator[str]:
    """Yield the names of unused fields; ValueError for a field with a meaning that training would ignore."""
    for name, value in fields.items():
        if (name in _REFUSED and value) or contradicts_training(name, value, trained):
            raise ValueError(f'"{name}": {shortened(value)}')
        # False and 0 may have a meaning.
        if value not in (None, "", [], {}) and name not in ("messages", "role", "content", *WEIGHTS, *MASKS):
            yield name


def has_conversations(source: Corpus) -> bool:
    first = first_fields(source)
    return "messages" in first and source.field not in first


def first_fields(source: Corpus) -> dict[str, Any]:
    """Return the object on the first line of a source of lines of JSON; no fields if that is something else."""
    file = source.files[0]
    if file.records != "jsonl":
        return {}
    with source.opened(file) as stream:
        try:
            # With a limit: a hostile file may be one endless line.
            lines = iter(lambda: stream.readline(LONGEST_RECORD + 1), b"")
            first = msgspec.json.decode(next(filter(bytes.strip, lines), b"").removeprefix(UTF8_MARK))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}  # reading it reports the error
    return first if isinstance(first, dict) else {}


class ConversationReader(CorpusReader):
    """One pass over the conversations of a source; ``unused`` counts the fields that are not used, by name."""

    def __init__(self, source: Corpus, meter: Meter) -> None:
        super().__init__(source, meter)
        self.unused: Counter[str] = Counter()

    def conversations(self) -> Iterator[tuple[str, Conversation]]:
        """Yield names and messages; UsageError, with file and line, if a line is not a conversation with an answer."""
        for document in self.documents():
            if text := "".join(document.texts):
                yield document.name, msgspec.json.decode(text, type=prepared(Conversation))

    def _record_text(self, line: bytes, begin: int, number: int, file: TextFile) -> str:
        if not line.strip():
            return ""
        remedy = f"each line must be {CONVERSATION}, role user, system or assistant"
        try:
            given = msgspec.json.decode(line)
            found = msgspec.convert(given, prepared(Conversation))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"line {number:,} is not a conversation ({error})", path=file.path, remedy=remedy
            ) from error
        try:
            unused = list(_unused_fields(given, True))
            for message in given["messages"]:
                unused += _unused_fields(message, message["role"] == "assistant")
        except ValueError as error:
            raise UsageError(
                f"line {number:,} has {error}, which is not supported: all answers are trained, nothing else is, and "
                "a message is its role and its content",
                path=file.path,
                remedy="remove the field if that is right; else leave the conversation out, or cut it before there",
            ) from error
        self.unused.update(name for name in unused if name in self.unused or len(self.unused) < _MOST_UNUSED)
        if not any(message.role == "assistant" and message.content for message in found.messages):
            raise UsageError(
                f"line {number:,} is a conversation without an answer of the assistant",
                path=file.path,
                remedy="leave it out: only answers are trained",
            )
        if any("\0" in message.content for message in found.messages):
            raise UsageError(f"line {number:,} has a message with NUL", path=file.path, remedy="leave it out")
        text = msgspec.json.encode(found).decode()
        # `_record_document` counts the characters of the JSON; the characters of the messages count.
        self.characters += sum(len(message.content) for message in found.messages) - len(text)
        return text


def write_conversations(
    source: Corpus,
    folder: Path,
    learn: TokenizerFactory,
    rule: SplitRule,
    processes: int | None,
    progress: Progress | None,
) -> tuple[DataManifest, Tokenizer]:
    """Make a tokenizer for the messages of a corpus, write their tokens, and return the manifest and the tokenizer.

    Raises UsageError if a line is not a conversation, or a split stays empty; StoreError if the source changes.
    """
    if any(file.records != "jsonl" for file in source.files):
        raise UsageError("has no conversations", path=source.spec, remedy="give a .jsonl file with one on each line")
    meter = Meter((1 + learn.reads) * source.nbytes, progress)
    first = ConversationReader(source, meter)
    texts = (iter([message.content for message in found.messages]) for _, found in first.conversations())
    tokenizer = ChatTokenizer.of(learn(texts if learn.reads else iter(()), False))
    second = ConversationReader(source, meter)
    pieces = _pieces(second, tokenizer, rule)
    splits = write_tokens(second, folder, tokenizer, pieces, processes)
    # The tokenizer has learned from the first pass, and the tokens are from the second.
    if learn.reads and second.digest() != first.digest():
        raise StoreError("changed while it was read", path=source.spec, remedy="prepare it when it is not written to")
    _check_counts(source, {split: found.documents or 0 for split, found in splits.items()})
    _report_unused(source, second.unused)
    return layout_of(origin_of(second, splits, CONVERSATIONS), tokenizer, splits, rule), tokenizer


def _pieces(reader: ConversationReader, tokenizer: ChatTokenizer, rule: SplitRule) -> Iterator[TextPiece]:
    for name, found in reader.conversations():
        split = rule.of_document(name)
        for number, message in enumerate(found.messages, 1):
            ends = number == len(found.messages)
            yield TextPiece(split, message.content, ends, (tokenizer.begin[message.role],), (tokenizer.end,))


def _report_unused(source: Corpus, unused: Counter[str]) -> None:
    if unused:
        named = [f"{name!r} ({count:,})" for name, count in unused.most_common(_MOST_NAMED)]
        named += [f"{len(unused) - _MOST_NAMED} more"] if len(unused) > _MOST_NAMED else []
        logger.warning("%s: fields of conversations that are not used: %s", source.spec, ", ".join(named))


def _check_counts(source: Corpus, counts: dict[str, int]) -> None:
    empty = next((split for split, count in counts.items() if not count), None)
    if empty is not None:
        raise UsageError(
            f"none of its {sum(counts.values()):,} conversations is for {empty}: a hash of the line's number and the "
            "seed decides",
            path=source.spec,
            remedy="give another fraction or seed, or more conversations",
        )
