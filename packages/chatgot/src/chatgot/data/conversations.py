"""Conversations: lines of JSON become tokens by a template.

Each line of a ``.jsonl`` file is one conversation::

    {"messages": [{"role": "system", "content": "Be brief."},
                  {"role": "user", "content": "Hello!"},
                  {"role": "assistant", "content": "Hi."}]}

The template is ``<|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|><|endoftext|>``, where each
name in ``<|...|>`` is one token of `ChatTokenizer`, and nothing is added to the text.
"""

from collections import Counter
from collections.abc import Iterator
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
    Document,
    TextFile,
    contradicts_training,
    shortened,
)
from tensorkeep.errors import UsageError
from tensorkeep.ext import prepared
from tensorkeep.ext.storage import Meter


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
        if any(file.records != "jsonl" for file in source.files):
            remedy = "give a .jsonl file with one on each line"
            raise UsageError("has no conversations", path=source.spec, remedy=remedy)
        super().__init__(source, meter)
        self.unused: Counter[str] = Counter()

    def _line(self, line: bytes, begin: int, number: int, file: TextFile) -> Document:
        """Return the conversation on a line; UsageError, with file and line, if it has no answer."""
        name = f"{file.name}:{number}"
        if not line.strip():
            return Document(name, iter(()))
        remedy = f"each line must be {CONVERSATION}, role user, system or assistant"
        try:
            given = msgspec.json.decode(line)
            messages = msgspec.convert(given, prepared(Conversation)).messages
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
        if not any(message.role == "assistant" and message.content for message in messages):
            raise UsageError(
                f"line {number:,} is a conversation without an answer of the assistant",
                path=file.path,
                remedy="leave it out: only answers are trained",
            )
        contents = [message.content for message in messages]
        if any("\0" in content for content in contents):
            raise UsageError(f"line {number:,} has a message with NUL", path=file.path, remedy="leave it out")
        self.characters += sum(map(len, contents))
        return Document(name, iter(contents), tuple(message.role for message in messages))
