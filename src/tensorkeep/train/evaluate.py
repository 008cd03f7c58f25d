"""The validation loss of a model, over the full split or a fixed sample of batches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT

_LARGEST_TOKENS = 16384
_LARGEST_LOGITS = 2**26


def evaluate(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss over all tokens of some batches (inputs and targets, [batch, positions]), in nats.

    No random numbers are drawn, and each module keeps its training mode.

    Examples
    --------
    >>> from tensorkeep.train.model.config import ModelConfig
    >>> config = ModelConfig(vocab_size=8, context_length=4, n_layers=1, n_heads=1, d_model=4)
    >>> tokens = torch.arange(5).unsqueeze(0)
    >>> f"{evaluate(GPT(config), [(tokens[:, :-1], tokens[:, 1:])]):.1f}"  # ln 8, before training
    '2.1'
    """
    device = model.tokens.weight.device
    total, tokens = 0.0, 0
    # Not inference_mode, which does not support sharded weights.
    with torch.no_grad(), evaluating(model):
        for inputs, targets in batches:
            loss = model.loss(inputs.to(device), targets.to(device))
            total += loss.item() * targets.numel()
            tokens += targets.numel()
    return total / tokens


def evaluation_batch_size(model: ModelConfig) -> int:
    """Return the batch size of evaluations, which keeps the logits small for any vocabulary."""
    tokens = min(_LARGEST_TOKENS, _LARGEST_LOGITS // model.vocab_size)
    return max(1, tokens // model.context_length)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode (no dropout); afterwards each module has its previous mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
