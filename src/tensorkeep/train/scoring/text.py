"""The loss, the perplexity and the bits per byte of a text."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.storage.parallel import Meter
from tensorkeep.storage.parallel import Progress as ReadingProgress
from tensorkeep.train.data.batches import Batch
from tensorkeep.train.data.conversations import has_conversations
from tensorkeep.train.data.corpus import DEFAULT_FIELD, open_source
from tensorkeep.train.data.documents import Reading
from tensorkeep.train.data.tokenizers.base import Tokenizer, Tokens
from tensorkeep.train.data.tokenizers.chat import ChatTokenizer
from tensorkeep.train.evaluate import EvaluationWindows, evaluate
from tensorkeep.train.model.gpt import GPT, IGNORED
from tensorkeep.train.scoring.compute import Progress


class TextScore(NamedTuple):
    """How well a model predicts a text.

    Attributes
    ----------
    loss : float
        The mean cross-entropy, in nats per token.
    perplexity : float
        The exponential of the loss. It depends on the tokenizer.
    bits_per_byte : float
        The cross-entropy of the text in bits, by its bytes in UTF-8; it can be compared between tokenizers. NaN for a
        text without bytes.
    tokens, bytes : int
        What was predicted. The bytes are those of the text of the predicted tokens; reserved ones, such as the end of a
        document or of a message, have none.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int


def score_text(
    model: GPT,
    windows: EvaluationWindows,
    tokenizer: Tokenizer,
    *,
    rows: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Return how well a model predicts the windows of a text.

    Parameters
    ----------
    model : GPT
    windows : EvaluationWindows
    tokenizer : Tokenizer
        The tokenizer that made the tokens.
    rows : int
        Windows that are computed at once.
    loss : callable, optional
        Returns the mean loss of inputs and targets; by default ``model.loss``.
    progress : callable, optional
        Called with the number of windows that are done, and of all.

    Examples
    --------
    >>> import torch
    >>> from tensorkeep.train.data.tokenizers.char import ByteTokenizer
    >>> from tensorkeep.train.model.config import ModelConfig
    >>> model = GPT(ModelConfig(vocab_size=256, context_length=8, n_layers=1, n_heads=1, d_model=4))
    >>> tokenizer = ByteTokenizer(documents=False)
    >>> score = score_text(model, EvaluationWindows(tokenizer.encode("to be or not"), 8), tokenizer, rows=2)
    >>> score.tokens, score.bytes, f"{score.bits_per_byte:.0f}"  # 8 bits, before training
    (11, 11, '8')
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for number in range(len(windows)):
        _, targets = windows.pair(number)
        counts += np.bincount(targets[targets != IGNORED].numpy(), minlength=tokenizer.vocab_size)
    counts[[*tokenizer.reserved]] = 0
    size = sum(int(counts[id]) * len(tokenizer.token_bytes(int(id))) for id in np.flatnonzero(counts))
    mean = evaluate(model, _reported(windows.batches(rows), len(windows), progress), loss=loss)
    bits = mean * windows.targets / math.log(2)
    return TextScore(mean, _exp(mean), bits / size if size else math.nan, windows.targets, size)


def _reported(batches: Iterator[Batch], total: int, progress: Progress | None) -> Iterator[Batch]:
    """Yield batches; report those whose successor is asked for."""
    done = 0
    for inputs, targets in batches:
        yield inputs, targets
        done = min(total, done + len(inputs))
        if progress is not None:
            progress(done, total)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < math.log(1e300) else math.inf


def tokens_of(
    source: PathLike,
    tokenizer: Tokenizer,
    *,
    encoding: str = "utf-8",
    field: str = DEFAULT_FIELD,
    progress: ReadingProgress | None = None,
) -> Tokens:
    """Return the tokens of a text: of a file, or of another source of text that ``tensorkeep data prepare`` takes.

    If the tokenizer has an end-of-document token, each document ends with it, and the text begins with it, so that its
    first token is predicted, unless it has a token that begins each document.

    Raises UsageError if the text has a character that is not in the vocabulary or fewer than two tokens, or consists of
    conversations; and the errors of `tensorkeep.train.data.corpus.open_source`.
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
        reading = Reading(corpus, Meter(corpus.nbytes, progress))
        for document in reading.documents():
            found += begins
            try:
                found += tokenizer.encode_stream(document.texts)
            except UsageError as error:
                raise UsageError(error.message, path=error.path or document.name, remedy=error.remedy) from error
            found += ends if corpus.has_documents else []
    tokens = np.concatenate([np.array([], tokenizer.dtype), *found])
    if len(tokens) < 2:
        raise UsageError("is too short: it has fewer than two tokens", path=source, remedy="give a longer text")
    return tokens
