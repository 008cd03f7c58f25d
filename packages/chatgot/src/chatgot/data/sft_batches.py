"""Rows of conversations for supervised fine-tuning (SFT): only answers count, each that fits once in an epoch."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chatgot.config.config import Config
from chatgot.data.batches import (
    Batch,
    Batches,
    EvaluationWindows,
    NumberedBatches,
    Order,
    RandomNumbers,
    ShuffledNumbers,
)
from chatgot.data.dataset import Dataset
from chatgot.data.tokenizers.base import Tokens
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.model.gpt import IGNORED
from tensorkeep.errors import UsageError

_SCANNED_AT_ONCE = 1 << 24
Places = npt.NDArray[np.int64]


class AnswerRows:
    """The rows of a text of conversations: inputs and targets. Targets outside of answers are ignored.

    ``note`` states how much is left out, if conversations are longer than the context. Raises UsageError if no answer
    begins within the context; ``what`` is the text, and ``path`` the folder of the data, in the message.
    """

    def __init__(
        self,
        tokens: Tokens,
        context_length: int,
        tokenizer: ChatTokenizer,
        *,
        what: str = "text",
        path: Path | None = None,
    ) -> None:
        self._tokens = tokens
        self._length = context_length
        # Fills up rows. No target counts there.
        self._filler = tokenizer.end_of_document or 0
        assistants, message_ends, last = _find(tokens, tokenizer)
        # The first tokens of conversations, and the tokens after them.
        starts, ends = np.concatenate([[0], last[:-1] + 1]), last + 1
        begins, stops = _pack(starts, ends, context_length)
        # The first token after the one that begins an answer, to the one that ends it.
        self._from = assistants + 1
        self._to = message_ends[np.searchsorted(message_ends, assistants)] + 1
        answers = np.searchsorted(self._from, stops) - np.searchsorted(self._from, begins)
        # A row without an answer has no target, and its loss would be NaN.
        self._begins, self._stops = begins[answers > 0], stops[answers > 0]
        if not len(self._begins):
            raise UsageError(
                f"in the {what}, no answer begins within a context of {context_length:,} tokens",
                path=path,
                remedy="use shorter conversations, or a model that was started with a longer context "
                "(tensorkeep train --model.context_length)",
            )
        self.note = self._left_out(starts, ends, what)

    def _left_out(self, starts: Places, ends: Places, what: str) -> str | None:
        answers = self._to - self._from
        conversation = np.searchsorted(ends, self._from, side="right")
        limits = np.minimum(ends, starts + self._length + 1)
        fitting = np.clip(limits[conversation] - self._from, 0, answers)
        every, used = int(answers.sum()), int(fitting.sum())
        if used == every:
            return None
        cut = np.bincount(conversation, answers - fitting, len(ends)) > 0
        left_out = cut & (np.bincount(conversation, fitting, len(ends)) == 0)
        return (
            f"{what}: {cut.sum():,} of {len(ends):,} conversations are longer than the context of {self._length:,} "
            f"tokens: the beginning of {(cut & ~left_out).sum():,} is used, and {left_out.sum():,} with "
            f"later answers are left out; {every - used:,} of {every:,} tokens of answers are not used"
        )

    def __len__(self) -> int:
        return len(self._begins)

    def row(self, number: int) -> Batch:
        begin, stop = int(self._begins[number]), int(self._stops[number])
        row = torch.from_numpy(self._tokens[begin:stop].astype(np.int64))
        inputs = torch.full((self._length,), self._filler)
        targets = torch.full((self._length,), IGNORED)
        inputs[: len(row) - 1] = row[:-1]
        first, last = np.searchsorted(self._from, [begin, stop])
        for start, end in zip(self._from[first:last] - begin, self._to[first:last] - begin, strict=True):
            # A target is the token after its input.
            targets[start - 1 : end - 1] = row[start:end]
        return inputs, targets

    def rows(self, numbers: npt.NDArray[np.integer]) -> Batch:
        pairs = [self.row(int(number)) for number in numbers]
        return torch.stack([each for each, _ in pairs]), torch.stack([each for _, each in pairs])


class AnswerBatches(NumberedBatches):
    def __init__(
        self,
        tokens: Tokens,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        order: Order,
        tokenizer: ChatTokenizer,
        path: Path | None = None,
    ) -> None:
        super().__init__(context_length=context_length, batch_size=batch_size, seed=seed)
        self._answers = AnswerRows(tokens, context_length, tokenizer, what="training split", path=path)
        self.note = self._answers.note
        self._offsets = (RandomNumbers if order == "random" else ShuffledNumbers)(len(self._answers), seed)

    def _read(self, begins: Places) -> Batch:
        return self._answers.rows(begins)


class AnswerWindows(EvaluationWindows):
    """The rows of a text of conversations, each once; see `EvaluationWindows`."""

    def __init__(
        self,
        tokens: Tokens,
        context_length: int,
        tokenizer: ChatTokenizer,
        *,
        most: int | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__(tokens, context_length)
        self._rows = AnswerRows(tokens, context_length, tokenizer, what="validation split", path=path)
        self.note = self._rows.note
        self._all = len(self._rows)
        self._chosen = self._all if most is None else min(self._all, -(-most // context_length))

    @cached_property
    def targets(self) -> int:  # computed once, as it reads every row
        return sum(int((self.pair(number)[1] != IGNORED).sum()) for number in range(self._chosen))

    def pair(self, number: int) -> Batch:
        # Integers, so that the rows are the same on every machine.
        return self._rows.row(number * self._all // self._chosen)


def training_batches(config: Config, dataset: Dataset) -> NumberedBatches:
    """Return the batches of a run: of conversations those with answers, of any other data windows of the text."""
    settings: dict[str, Any] = {
        "context_length": config.model.context_length,
        "batch_size": config.loop.batch_size,
        "seed": config.loop.seed,
        "order": config.data.order,
    }
    tokenizer = dataset.chat_tokenizer
    if tokenizer is None:
        return Batches(dataset.train, **settings, mixture=dataset.mixture)
    return AnswerBatches(dataset.train, **settings, tokenizer=tokenizer, path=dataset.path)


def windows_of(dataset: Dataset, context_length: int, *, most: int | None = None) -> EvaluationWindows:
    """Return the windows of the validation split of a dataset; of conversations only answers count."""
    if dataset.chat_tokenizer is None:
        return EvaluationWindows(dataset.validation, context_length, most=most)
    return AnswerWindows(dataset.validation, context_length, dataset.chat_tokenizer, most=most, path=dataset.path)


def _find(tokens: Tokens, tokenizer: ChatTokenizer) -> list[Places]:
    """Return the places of the tokens that begin an answer, end a message, and end a conversation."""
    wanted = (tokenizer.begin["assistant"], tokenizer.end, tokenizer.end_of_document)
    places: list[list[Places]] = [[], [], []]
    for begin in range(0, len(tokens), _SCANNED_AT_ONCE):
        # In pieces: the comparison makes a mask of the whole piece.
        piece = tokens[begin : begin + _SCANNED_AT_ONCE]
        for each, token in zip(places, wanted, strict=True):
            each.append(np.flatnonzero(piece == token) + begin)
    return [np.concatenate(each) for each in places]


def _pack(starts: Places, stops: Places, context_length: int) -> tuple[Places, Places]:
    """Return where rows begin, and where what they predict stops, given the begins and ends of conversations."""
    begins, limits, first = [], [], 0
    # A row holds whole conversations, so that no answer is trained without its question.
    # Greedy, in the order of the text: which conversations share a row does not depend on the seed.
    while first < len(starts):
        begin = int(starts[first])
        after = int(np.searchsorted(stops, begin + context_length + 1, side="right"))
        begins.append(begin)
        # Of a conversation that is longer than the context, the beginning is trained.
        limits.append(int(stops[after - 1]) if after > first else begin + context_length + 1)
        first = max(after, first + 1)
    return np.array(begins, np.int64), np.array(limits, np.int64)
