"""What the forward pass keeps for the backward pass, in bytes, from the shapes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorkeep.train.model.config import ModelConfig

_FLOAT, _HALF, _INDEX = 4, 2, 8
_WORST = 3
"""How many times the logits are there at once: their logarithms, and the gradient twice."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is computed at once, and how.

    Attributes
    ----------
    model : ModelConfig
    rows : int
        Sequences.
    on_cuda : bool
    techniques : mapping
        Settings of the techniques that are on, by name.
    """

    model: ModelConfig
    rows: int
    on_cuda: bool
    techniques: Mapping[str, Mapping[str, Any]]

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.model.context_length

    @property
    def width(self) -> int:
        """Bytes of what enters matrix products."""
        return _HALF if "mixed-precision" in self.techniques else _FLOAT

    @property
    def scores(self) -> bool:
        """Whether attention keeps its scores: torch's fast kernel for CPUs knows no dropout."""
        kernel = self.techniques.get("attention-kernel", {}).get("kernel")
        return kernel == "math" or (self.model.dropout > 0 and not self.on_cuda)


@dataclass(frozen=True, slots=True)
class Activations:
    """The bytes that autograd keeps of a batch, as they follow from its `Shape`."""

    shape: Shape

    def kept(self) -> int:
        """Return what is kept from the forward pass to the backward pass, but for the logits."""
        model, tokens = self.shape.model, self.shape.tokens
        ends = _INDEX * tokens + self._norm() + self.shape.width * tokens * model.d_model + self._dropout(_FLOAT)
        # What is shifted is a copy.
        ends += _FLOAT * tokens * model.d_model if model.token_shift else 0
        every = self._checkpointed_every()
        if every is None:
            return ends + model.n_layers * self.block()
        again = -(-model.n_layers // every)
        return ends + again * self._checkpointed() + (model.n_layers - again) * self.block()

    def recomputed(self) -> int:
        """Return what is there once more while one block is computed again."""
        return self.block() if self._checkpointed_every() is not None else 0

    def block(self) -> int:
        """Return what one block keeps."""
        tokens, width = self.shape.tokens, self.shape.width
        model = self.shape.model
        hidden = (4 if model.gated else 2) * width * tokens * model.mlp_width
        # What norms return; a gate's projection makes a 16-bit copy of its own.
        returned = (3 if model.gated and width < _FLOAT else 2) * width * tokens * model.d_model
        return 2 * self._norm() + returned + self._attention() + hidden + 2 * self._dropout(width)

    def logits(self) -> int:
        """Return what logits take where the backward pass begins."""
        model, tokens = self.shape.model, self.shape.tokens
        if "fused-cross-entropy" not in self.shape.techniques:
            return _WORST * _FLOAT * tokens * model.vocab_size
        parts = int(self.shape.techniques["fused-cross-entropy"].get("parts", 8))
        gradients = _FLOAT * model.d_model * (tokens + model.vocab_size)
        return gradients + _WORST * _FLOAT * -(-tokens // parts) * model.vocab_size

    def kept_logits(self) -> int:
        """Return what is kept of the logits, or instead of them, from the forward pass to the backward pass."""
        model, tokens = self.shape.model, self.shape.tokens
        if "fused-cross-entropy" in self.shape.techniques:
            return _FLOAT * model.d_model * (tokens + model.vocab_size)
        return _FLOAT * tokens * model.vocab_size + _INDEX * tokens

    def _norm(self) -> int:
        """Return the input of a norm, in float32, and its statistics."""
        model = self.shape.model
        kept = model.d_model + (2 if model.norm == "layernorm" else 1)
        # Torch has no kernel of its own for RMSNorm on CPUs, and keeps what it multiplies by the weights.
        kept += model.d_model if model.norm == "rmsnorm" and not self.shape.on_cuda else 0
        return _FLOAT * self.shape.tokens * kept

    def _dropout(self, width: int) -> int:
        model = self.shape.model
        if not model.dropout:
            return 0
        return (1 if self.shape.on_cuda else width) * self.shape.tokens * model.d_model

    def _attention(self) -> int:
        """Return what attention keeps, and its result, which is projected back."""
        model, tokens, width = self.shape.model, self.shape.tokens, self.shape.width
        result = width * tokens * model.d_model
        if self.shape.scores:
            # Queries and keys, scaled, and values; softmax, what dropout drew and what it left; all in float32.
            scores = (3 if model.dropout else 1) * model.context_length * model.n_heads
            return result + _FLOAT * tokens * (3 * model.d_model + scores)
        # Queries, keys and values lie in one tensor; what is rotated of it is a copy.
        projected = (5 if model.positions == "rotary" else 3) * model.d_model
        return result + tokens * (width * projected + _FLOAT * model.n_heads)

    def _checkpointed_every(self) -> int | None:
        settings = self.shape.techniques.get("activation-checkpointing")
        return None if settings is None else int(settings.get("every", 1))

    def _checkpointed(self) -> int:
        model, tokens, width = self.shape.model, self.shape.tokens, self.shape.width
        kept = _FLOAT * tokens * model.d_model
        if self.shape.techniques["activation-checkpointing"].get("keep") != "products":
            return kept
        products = (3 + 1 + 1 + 1) * model.d_model + (2 if model.gated else 1) * model.mlp_width
        return kept + tokens * (width * products + _FLOAT * model.n_heads)


@contextmanager
def counted_activations(model: nn.Module) -> Iterator[list[int]]:
    """Count, within, the bytes of what is kept for the backward pass, but for parameters; each storage once."""
    seen = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    sizes: list[int] = []
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
            # As long as it is held, no other storage has its address.
            held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
