"""Multiple-choice questions in HellaSwag's format: the model chooses the most probable ending of a context.

Zellers et al., arXiv 1905.07830. A file has one JSON object per line, with ``ctx`` (the text that is given),
``endings`` (the texts to choose from) and ``label`` (the index of the right one).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from tensorkeep.errors import NotFoundError, PathLike, UsageError
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.structs import prepared
from tensorkeep.train.data.documents import UTF8_MARK
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.evaluate import evaluating
from tensorkeep.train.generate import prompt_ids
from tensorkeep.train.model.gpt import GPT, IGNORED
from tensorkeep.train.scoring.compute import Progress


class Question(msgspec.Struct, frozen=True):
    """A context, its possible endings, and the index of the right one."""

    ctx: str
    endings: Annotated[tuple[str, ...], Meta(min_length=2)]
    label: int


class ChoiceScore(NamedTuple):
    """How many questions a model answers correctly.

    Attributes
    ----------
    acc : float
        The fraction answered correctly if the ending with the largest total log-probability is chosen.
    acc_norm : float
        The same for the largest mean log-probability per token, which does not prefer short endings.
    acc_stderr, acc_norm_stderr : float
        Their standard errors: those of a fraction of independent questions.
    questions : int
    truncated : int
        Questions of which the beginning was left out, because it does not fit into the context of the model.
    """

    acc: float
    acc_norm: float
    acc_stderr: float
    acc_norm_stderr: float
    questions: int
    truncated: int


def read_questions(path: PathLike) -> list[Question]:
    """Return the questions of a file.

    Raises NotFoundError if there is no such file; UsageError if a line is not a question; the message names the line.
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError("there is no such file", path=path, remedy="give a file of questions, one JSON per line")
    with store_errors(path, "read the questions"):
        lines = path.read_bytes().removeprefix(UTF8_MARK).splitlines()
    questions = [_question(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UsageError("holds no questions", path=path, remedy="give one JSON object per line")
    return questions


def _question(line: bytes, number: int, path: Path) -> Question:
    try:
        # Copies of HellaSwag by Hugging Face have the label as text.
        question = msgspec.json.decode(line, type=prepared(Question), strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"line {number:,} is not a question: {error}",
            path=path,
            remedy='give lines such as {"ctx": "The sky is", "endings": ["blue.", "loud."], "label": 0}',
        ) from error
    if not 0 <= question.label < len(question.endings):
        raise UsageError(
            f"line {number:,} has the label {question.label}, and {len(question.endings)} endings, numbered from 0",
            path=path,
            remedy="give a file with the right answers: the test split of HellaSwag has none",
        )
    return question


class _Row(NamedTuple):
    """The tokens of a context with one of its endings, and how many of the last ones are the ending's."""

    question: int
    tokens: list[int]
    scored: int


def score_choices(
    model: GPT,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    rows: int,
    progress: Progress | None = None,
) -> ChoiceScore:
    """Return how many questions a model answers correctly.

    The tokens of an ending are those of a space and its text. What does not fit into the model's context is left out
    at the beginning.

    Parameters
    ----------
    model : GPT
    questions : sequence of Question
    tokenizer : Tokenizer
    rows : int
        Endings that are computed at once.
    progress : callable, optional
        Called with the number of endings that are done, and of all.

    Raises
    ------
    UsageError
        If a text has a character that is not in the vocabulary, or a log-probability is not finite.
    """
    longest = model.config.context_length + 1
    encoded, truncated = [], 0
    for number, question in enumerate(questions):
        own = _encoded(number, question, tokenizer)
        truncated += any(len(each.tokens) > longest for each in own)
        encoded += [_Row(number, row.tokens[-longest:], min(row.scored, longest - 1)) for row in own]
    found = _log_probabilities(model, encoded, rows, progress)
    sums: list[list[float]] = [[] for _ in questions]
    means: list[list[float]] = [[] for _ in questions]
    for row, log_probability in zip(encoded, found, strict=True):
        if not math.isfinite(log_probability):
            raise UsageError(
                f"question {row.question + 1:,}: the log-probability of an ending is {log_probability}",
                remedy="the weights of the model are not finite or overflow: use an earlier checkpoint",
            )
        sums[row.question].append(log_probability)
        means[row.question].append(log_probability / row.scored)
    acc, acc_norm = (
        sum(each.index(max(each)) == question.label for each, question in zip(scores, questions, strict=True))
        / len(questions)
        for scores in (sums, means)
    )
    error, error_norm = (math.sqrt(each * (1 - each) / len(questions)) for each in (acc, acc_norm))
    return ChoiceScore(acc, acc_norm, error, error_norm, len(questions), truncated)


def _encoded(number: int, question: Question, tokenizer: Tokenizer) -> list[_Row]:
    try:
        context = prompt_ids(tokenizer, question.ctx or None)
        endings = [tokenizer.encode(f" {ending}").tolist() for ending in question.endings]
    except UsageError as error:
        raise UsageError(f"question {number + 1:,}: {error.message}", remedy=error.remedy) from error
    return [_Row(number, [*context, *ending], len(ending)) for ending in endings]


def _log_probabilities(model: GPT, encoded: Sequence[_Row], rows: int, progress: Progress | None) -> list[float]:
    """Return the log-probability of the scored tokens of each row, computed in batches of similar length."""
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].tokens))
    found = [0.0] * len(encoded)
    with torch.no_grad(), evaluating(model):
        for begin in range(0, len(order), rows):
            chosen = order[begin : begin + rows]
            for number, value in zip(chosen, _batch(model, [encoded[each] for each in chosen]), strict=True):
                found[number] = value
            if progress is not None:
                progress(begin + len(chosen), len(order))
    return found


def _batch(model: GPT, batch: Sequence[_Row]) -> list[float]:
    length = len(batch[-1].tokens) - 1
    inputs = torch.zeros(len(batch), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, each in enumerate(batch):
        tokens = torch.tensor(each.tokens)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(tokens) - 1 - each.scored : len(tokens) - 1] = tokens[-each.scored :]
    device = model.tokens.weight.device
    logits: Tensor = model(inputs.to(device)).float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="none"
    )
    sums: list[float] = (-losses.view_as(targets).double().sum(dim=1)).tolist()
    return sums
