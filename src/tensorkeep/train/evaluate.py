"""The validation loss: over the whole split, or always over the same batches of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.model.modes import evaluating

_TOKENS_AT_ONCE = 16384
_LOGITS_AT_ONCE = 2**26


def evaluate(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss over all tokens of some batches, in nats.

    No random numbers are drawn, and the model is left in the mode that it was in.

    Parameters
    ----------
    model : GPT
    batches : iterable of (Tensor, Tensor)
        Inputs and targets, int64, of shape [batch, positions].
    """
    device = model.tokens.weight.device
    total, tokens = 0.0, 0
    # Inference mode would do, but for weights that are divided among processes.
    with torch.no_grad(), evaluating(model):
        for inputs, targets in batches:
            loss = model.loss(inputs.to(device), targets.to(device))
            total += loss.item() * targets.numel()
            tokens += targets.numel()
    return total / tokens


def evaluated_at_once(model: ModelConfig) -> int:
    """Return how many sequences are evaluated at once: as many as leave the logits small, whatever the vocabulary."""
    tokens = min(_TOKENS_AT_ONCE, _LOGITS_AT_ONCE // model.vocab_size)
    return max(1, tokens // model.context_length)
