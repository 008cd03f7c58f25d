"""Scores of a trained model: the loss of a text, and multiple-choice questions in HellaSwag's format.

A file of questions (Zellers et al., arXiv 1905.07830) has one JSON object per line, with ``ctx`` (the given text),
``endings`` (the texts to choose from) and ``label`` (the index of the right ending).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from chatgot.config.config import Config
from chatgot.data.batches import LARGEST_TOKENS, Batch, EvaluationWindows
from chatgot.data.conversations import has_conversations
from chatgot.data.corpus import DEFAULT_FIELD, UTF8_MARK, CorpusReader, open_source
from chatgot.data.tokenizers.base import Tokenizer, Tokens, prompt_ids
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.memory import LEAST_BYTES, evaluation_bytes
from chatgot.model.attention import in_float32
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT, IGNORED
from chatgot.step.train_step import evaluate, evaluating
from tensorkeep.errors import NotFoundError, PathLike, UsageError
from tensorkeep.ext import prepared
from tensorkeep.ext.storage import Meter, store_errors
from tensorkeep.ext.storage import Progress as ReadingProgress

Precision = Literal["run", "float32", "bf16", "fp16"]
# Called with the number of rows that are done, and of all rows.
Progress = Callable[[int, int], None]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FREE_MEMORY_DIVISOR = 4


def resolve_precision(config: Config, precision: Precision) -> str:
    """Return ``"float32"``, ``"bf16"`` or ``"fp16"``; ``"run"`` is the precision of the run's losses."""
    if precision != "run":
        return precision
    used = config.techniques.get("mixed-precision", {}).get("dtype")
    return str(used) if used in _DTYPES else "float32"


@contextmanager
def compute_in(precision: str, model: GPT, config: Config) -> Iterator[None]:
    """Compute the matmuls of a run's model in a precision, and attention in float32 if the run does."""
    if precision not in _DTYPES:
        yield
        return
    # Kept to be restored: attention gets its own kernels back after the block.
    kernels = [attention.kernel for attention in model.attentions]
    if config.techniques.get("mixed-precision", {}).get("attention") == "float32":
        for attention in model.attentions:
            attention.kernel = in_float32(attention.kernel)
    try:
        with torch.autocast(model.tokens.weight.device.type, _DTYPES[precision]):
            yield
    finally:
        for attention, kernel in zip(model.attentions, kernels, strict=True):
            attention.kernel = kernel


def affordable_rows(model: ModelConfig, device: torch.device) -> int:
    """Return how many full windows to compute at once: in 256 MiB or, on a GPU, a quarter of its free memory."""
    budget, tokens = LEAST_BYTES, LARGEST_TOKENS
    if device.type == "cuda":
        budget, tokens = max(budget, torch.cuda.mem_get_info(device)[0] // _FREE_MEMORY_DIVISOR), 8 * tokens
    return max(1, min(budget // evaluation_bytes(model, 1), tokens // model.context_length))


class TextScore(NamedTuple):
    """How well a model predicts a text."""

    # The mean cross-entropy, in nats per token, and its exponential. Both depend on the tokenizer.
    loss: float
    perplexity: float
    # The cross-entropy of the text in bits, by its bytes in UTF-8; it can be compared between tokenizers. NaN for a
    # text without bytes.
    bits_per_byte: float
    # The predicted tokens, and the bytes of their text; reserved tokens, such as the end of a document, have none.
    tokens: int
    bytes: int


def score_text(
    model: GPT,
    windows: EvaluationWindows,
    tokenizer: Tokenizer,
    *,
    rows: int,
    progress: Progress | None = None,
) -> TextScore:
    """Return how well a model predicts the windows of a text.

    ``tokenizer`` made the tokens, and ``rows`` windows are computed at once. ``progress`` is called with the number of
    windows that are done, and of all.
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for number in range(len(windows)):
        _, targets = windows.pair(number)
        counts += np.bincount(targets[targets != IGNORED].numpy(), minlength=tokenizer.vocab_size)
    # Reserved tokens have no text.
    counts[[*tokenizer.reserved]] = 0
    size = sum(int(counts[id]) * len(tokenizer.token_bytes(int(id))) for id in np.flatnonzero(counts))
    mean = evaluate(model, _reported(windows.batches(rows), len(windows), progress))
    bits = mean * windows.targets / math.log(2)
    # math.exp raises OverflowError instead of returning infinity.
    perplexity = math.exp(mean) if mean < math.log(1e300) else math.inf
    return TextScore(mean, perplexity, bits / size if size else math.nan, windows.targets, size)


def _reported(batches: Iterator[Batch], total: int, progress: Progress | None) -> Iterator[Batch]:
    done = 0
    for inputs, targets in batches:
        yield inputs, targets
        # The consumer asks for the next batch when it is done with this one.
        done = min(total, done + len(inputs))
        if progress is not None:
            progress(done, total)


def read_tokens(
    source: PathLike,
    tokenizer: Tokenizer,
    *,
    encoding: str = "utf-8",
    field: str = DEFAULT_FIELD,
    progress: ReadingProgress | None = None,
) -> Tokens:
    """Return the tokens of a text: of a file, or of another source of text that ``tensorkeep data prepare`` takes.

    If the tokenizer has an end-of-document token, each document ends with it. The text begins with it, too, so that its
    first token is predicted, unless the tokenizer has a token that begins each document.
    """
    ends = [] if tokenizer.end_of_document is None else [np.array([tokenizer.end_of_document], tokenizer.dtype)]
    begins = [np.array(tokenizer.opening, tokenizer.dtype)] if tokenizer.opening else []
    found = [] if begins else [*ends]
    with open_source(source, encoding=encoding, field=field) as corpus:
        if has_conversations(corpus):
            raise UsageError(
                "consists of conversations, which are prepared before they are measured",
                path=source,
                remedy="give the folder that this writes: tensorkeep data prepare SOURCE --tokenizer from:RUN --out NEW"
                if isinstance(tokenizer, ChatTokenizer)
                else "give a text: the model was not trained on conversations",
            )
        reading = CorpusReader(corpus, Meter(corpus.nbytes, progress))
        for document in reading.documents():
            found += begins
            try:
                found += map(tokenizer.encode, tokenizer.pieces(document.texts))
            except UsageError as error:
                raise UsageError(error.message, path=error.path or document.name, remedy=error.remedy) from error
            found += ends if corpus.has_documents else []
    tokens = np.concatenate([np.array([], tokenizer.dtype), *found])
    if len(tokens) < 2:
        raise UsageError("is too short: it has fewer than two tokens", path=source, remedy="give a longer text")
    return tokens


class Question(msgspec.Struct, frozen=True):
    ctx: str
    endings: Annotated[tuple[str, ...], Meta(min_length=2)]
    label: int


class ChoiceScore(NamedTuple):
    """How many questions a model answers correctly."""

    # The fraction answered correctly if the ending with the largest total log-probability is chosen.
    acc: float
    # The same for the largest mean log-probability per token, which does not prefer short endings.
    acc_norm: float
    # The standard errors of the two fractions, for independent questions.
    acc_stderr: float
    acc_norm_stderr: float
    questions: int
    # Questions that lost their beginning, because they do not fit into the context of the model.
    truncated: int


def read_questions(path: PathLike) -> list[Question]:
    """Return the questions of a file; NotFoundError if there is no file, UsageError if a line is not a question."""
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
    """The tokens of a context and one ending, and how many of the last tokens belong to the ending."""

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
    """Return how many questions a model answers correctly; ``rows`` endings are computed at once.

    An ending is encoded with a space before its text. Of a question that does not fit into the context, the beginning
    is left out. Raises UsageError if the tokenizer cannot encode a text, or a log-probability is not finite.
    """
    # The last token is a target only.
    longest = model.config.context_length + 1
    encoded, truncated = [], 0
    for number, question in enumerate(questions):
        own = _encoded(number, question, tokenizer)
        # The beginning is dropped, never the ending that is scored.
        truncated += any(len(each.tokens) > longest for each in own)
        encoded += [_Row(row.tokens[-longest:], min(row.scored, longest - 1)) for row in own]
    scored = zip(encoded, _log_probabilities(model, encoded, rows, progress), strict=True)
    right, right_norm = 0, 0
    for number, question in enumerate(questions, 1):
        endings = list(islice(scored, len(question.endings)))
        if wrong := [value for _, value in endings if not math.isfinite(value)]:
            raise UsageError(
                f"question {number:,}: the log-probability of an ending is {wrong[0]}",
                remedy="the weights of the model are not finite or overflow: use an earlier checkpoint",
            )
        sums, means = [value for _, value in endings], [value / row.scored for row, value in endings]
        right += sums.index(max(sums)) == question.label
        right_norm += means.index(max(means)) == question.label
    acc, acc_norm = right / len(questions), right_norm / len(questions)
    # The standard error of a fraction of independent answers.
    error, error_norm = (math.sqrt(each * (1 - each) / len(questions)) for each in (acc, acc_norm))
    return ChoiceScore(acc, acc_norm, error, error_norm, len(questions), truncated)


def _encoded(number: int, question: Question, tokenizer: Tokenizer) -> list[_Row]:
    try:
        # An empty context begins like a document.
        context = prompt_ids(tokenizer, question.ctx or None)
        endings = [tokenizer.encode(f" {ending}").tolist() for ending in question.endings]
    except UsageError as error:
        raise UsageError(f"question {number + 1:,}: {error.message}", remedy=error.remedy) from error
    return [_Row([*context, *ending], len(ending)) for ending in endings]


def _log_probabilities(model: GPT, encoded: Sequence[_Row], rows: int, progress: Progress | None) -> list[float]:
    # Rows of similar length share a batch, so that little padding is computed.
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
    # The rows are sorted, so the last one is the longest. Padding at the end does not change causal attention.
    length = len(batch[-1].tokens) - 1
    inputs = torch.zeros(len(batch), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, each in enumerate(batch):
        tokens = torch.tensor(each.tokens)
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(tokens) - 1 - each.scored : len(tokens) - 1] = tokens[-each.scored :]
    device = model.tokens.weight.device
    # Matmuls may compute in 16 bits, which are too few for a softmax.
    logits: Tensor = model(inputs.to(device)).float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="none"
    )
    # In float64, because endings of many tokens differ by little.
    sums: list[float] = (-losses.view_as(targets).double().sum(dim=1)).tolist()
    return sums
