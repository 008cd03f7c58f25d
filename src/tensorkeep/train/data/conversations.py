"""Conversations: lines of JSON become tokens by a template.

Each line of a ``.jsonl`` file is one conversation::

    {"messages": [{"role": "system", "content": "Be brief."},
                  {"role": "user", "content": "Hello!"},
                  {"role": "assistant", "content": "Hi."}]}

The template is ``<|system|>Be brief.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|><|endoftext|>``, where each
name in ``<|...|>`` is one token of `ChatTokenizer`, and nothing is added to the text.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from tensorkeep.errors import StoreError, UsageError
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.structs import prepared
from tensorkeep.train.data.corpus import Source, TextFile
from tensorkeep.train.data.dataset import CONVERSATIONS, SPLITS, Layout
from tensorkeep.train.data.documents import LONGEST_RECORD, Reading, SplitRule
from tensorkeep.train.data.encoding import Piece, default_processes, encoded
from tensorkeep.train.data.token_files import layout_of, origin_of, splits_of, token_files
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.data.tokenizers.chat import ChatTokenizer
from tensorkeep.train.data.tokenizers.known import Learn


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """The messages of a conversation, in order."""

    messages: list[Message]


def has_conversations(source: Source) -> bool:
    """Return whether the first line of a source of lines of JSON has messages."""
    file = source.files[0]
    if file.records != "jsonl":
        return False
    with source.opened(file) as stream:
        try:
            lines = iter(lambda: stream.readline(LONGEST_RECORD + 1), b"")
            first = msgspec.json.decode(next(filter(bytes.strip, lines), b""))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False  # reading it reports the error
    return isinstance(first, dict) and "messages" in first and source.field not in first


class ConversationReading(Reading):
    """One pass over the conversations of a source; see `Reading`."""

    def conversations(self) -> Iterator[tuple[str, Conversation]]:
        """Yield the name and the messages of each conversation.

        Raises UsageError if a line is not a conversation with an answer; the message names the file and the line.
        """
        for document in self.documents():
            if text := "".join(document.texts):
                yield document.name, msgspec.json.decode(text, type=prepared(Conversation))

    def _record_text(self, line: bytes, begin: int, number: int, file: TextFile) -> str:
        if not line.strip():
            return ""
        remedy = (
            'each line must be {"messages": [{"role": "user", "content": "..."}, ...]}, role user, system or assistant'
        )
        try:
            found = msgspec.json.decode(line, type=prepared(Conversation))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"line {number:,} is not a conversation ({error})", path=file.path, remedy=remedy
            ) from error
        if not any(message.role == "assistant" and message.content for message in found.messages):
            raise UsageError(
                f"line {number:,} is a conversation without an answer of the assistant",
                path=file.path,
                remedy="leave it out: only answers are trained",
            )
        if any("\0" in message.content for message in found.messages):
            raise UsageError(f"line {number:,} has a message with NUL", path=file.path, remedy="leave it out")
        text = msgspec.json.encode(found).decode()
        # `_record_document` counts the characters of the JSON; those of the messages count.
        self.characters += sum(len(message.content) for message in found.messages) - len(text)
        return text


def write_conversations(
    source: Source, folder: Path, learn: Learn, rule: SplitRule, processes: int | None, progress: Progress | None
) -> tuple[Layout, Tokenizer]:
    """Learn a tokenizer from the messages of a source, write their tokens, and return the layout and the tokenizer.

    Raises UsageError if a line is not a conversation, or a split stays empty; StoreError if the source changes.
    """
    if any(file.records != "jsonl" for file in source.files):
        raise UsageError("has no conversations", path=source.spec, remedy="give a .jsonl file with one on each line")
    meter = Meter((1 + learn.reads) * source.nbytes, progress)
    first = ConversationReading(source, meter)
    texts = (iter([message.content for message in found.messages]) for _, found in first.conversations())
    tokenizer = ChatTokenizer.of(learn(texts if learn.reads else iter(()), False))
    second = ConversationReading(source, meter)
    counts = dict.fromkeys(SPLITS, 0)
    processes = processes or default_processes(tokenizer, source.nbytes)
    marks = {role: np.array([token], tokenizer.dtype) for role, token in tokenizer.begin.items()}
    end, end_of_document = (np.array([each], tokenizer.dtype) for each in (tokenizer.end, tokenizer.end_of_document))
    # Of the messages that are being encoded, which come back in order.
    roles: deque[str] = deque()
    pieces = encoded(tokenizer, _pieces(second, rule, roles), processes)
    with token_files(folder, tokenizer) as files, closing(pieces):
        for piece, tokens in pieces:
            for each in (marks[roles.popleft()], tokens, end):
                files[piece.split].add(each)
            if piece.ends_document:
                files[piece.split].add(end_of_document)
                counts[piece.split] += 1
        if learn.reads and second.digest() != first.digest():
            raise StoreError(
                "changed while it was read", path=source.spec, remedy="prepare it when it is not written to"
            )
        _check_counts(source, counts)
        splits = splits_of(files, counts)
    return layout_of(origin_of(second, splits, CONVERSATIONS), tokenizer, splits, rule), tokenizer


def _pieces(reading: ConversationReading, rule: SplitRule, roles: deque[str]) -> Iterator[Piece]:
    """Yield the texts of all messages; append the role of each."""
    for name, found in reading.conversations():
        split = rule.of_document(name)
        for number, message in enumerate(found.messages, 1):
            roles.append(message.role)
            yield Piece(split, message.content, number == len(found.messages))


def _check_counts(source: Source, counts: dict[str, int]) -> None:
    empty = next((split for split, count in counts.items() if not count), None)
    if empty is not None:
        raise UsageError(
            f"none of its {sum(counts.values()):,} conversations is for {empty}: a hash of the line's number and the "
            "seed decides",
            path=source.spec,
            remedy="give another fraction or seed, or more conversations",
        )
