"""The memory of an evaluation, and the number of windows that are evaluated at once."""

from tensorkeep.train.memory.activations import FLOAT, HALF, Activations
from tensorkeep.train.model.config import ModelConfig

LARGEST_TOKENS = 16384
"""Of a batch of an evaluation, unless a micro-batch of training has more; larger batches are not faster."""

LEAST_BYTES = 2**28
"""What an evaluation may take, however little memory a step of training takes."""


def evaluation_rows(training: Activations) -> int:
    """Return how many windows to evaluate at once, beside the micro-batches of a training.

    As many as take no more memory than the forward and backward pass of one micro-batch. It follows from the settings
    alone, so that a resumed run evaluates the same batches.
    """
    budget = max(LEAST_BYTES, training.kept() + training.logits())
    tokens = max(LARGEST_TOKENS, training.tokens)
    row = evaluation_bytes(training.model, 1, width=training.width)
    return max(1, min(budget // row, tokens // training.model.context_length))


def evaluation_bytes(model: ModelConfig, rows: int, *, width: int = FLOAT) -> int:
    """Return the temporary memory of a forward pass without gradients: the larger of an MLP and the logits.

    In an MLP exist the residual stream before and after the attention, its norm, the input and the output of the
    activation function, and a factor between them or the result of the MLP; at the end, the logits and log-softmax.
    Logits of 16 bits (``width``, in bytes) exist in float32 as well.
    """
    streams, hidden = (3, 3) if model.gated or model.activation == "relu2" else (4, 2)
    logits = 2 * FLOAT + (HALF if width == HALF else 0)
    floats = streams * model.d_model + hidden * model.mlp_width
    return rows * model.context_length * max(FLOAT * floats, logits * model.vocab_size)
