"""How scores are computed: the precision of matmuls, and how many rows at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tensorkeep.train.config.config import Config
from tensorkeep.train.memory.evaluation import LARGEST_TOKENS, LEAST_BYTES, evaluation_bytes
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.techniques.mixed_precision import in_float32

Precision = Literal["run", "float32", "bf16", "fp16"]

Progress = Callable[[int, int], None]
"""Called with the number of rows that are done, and of all rows."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FRACTION_OF_FREE = 4
"""Of the free memory of a GPU, one part in this many is used."""


def precision_of(config: Config, precision: Precision) -> str:
    """Return ``"float32"``, ``"bf16"`` or ``"fp16"``: for ``"run"``, that in which a run computes its losses."""
    if precision != "run":
        return precision
    used = config.techniques.get("mixed-precision", {}).get("dtype")
    return str(used) if used in _DTYPES else "float32"


@contextmanager
def computed_in(precision: str, model: GPT, config: Config) -> Iterator[None]:
    """Compute the matmuls of a run's model in a precision, and attention in float32 where the run does so."""
    if precision not in _DTYPES:
        yield
        return
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
    """Return how many rows of the context's length to compute at once: 256 MiB, or a quarter of a GPU's free memory."""
    budget, tokens = LEAST_BYTES, LARGEST_TOKENS
    if device.type == "cuda":
        budget, tokens = max(budget, torch.cuda.mem_get_info(device)[0] // _FRACTION_OF_FREE), 8 * tokens
    return max(1, min(budget // evaluation_bytes(model, 1), tokens // model.context_length))
