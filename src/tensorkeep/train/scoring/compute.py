"""How scores are computed: the precision of matmuls, and how many rows at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from tensorkeep.train.config.config import Config
from tensorkeep.train.memory.evaluation import LARGEST_TOKENS, LEAST_BYTES, evaluation_bytes
from tensorkeep.train.model.config import ModelConfig

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


def computed_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matmuls are computed in a precision."""
    return torch.autocast(device.type, _DTYPES[precision]) if precision in _DTYPES else nullcontext()


def affordable_rows(model: ModelConfig, device: torch.device) -> int:
    """Return how many rows of the context's length to compute at once: 256 MiB, or a quarter of a GPU's free memory."""
    budget, tokens = LEAST_BYTES, LARGEST_TOKENS
    if device.type == "cuda":
        budget, tokens = max(budget, torch.cuda.mem_get_info(device)[0] // _FRACTION_OF_FREE), 8 * tokens
    return max(1, min(budget // evaluation_bytes(model, 1), tokens // model.context_length))
