"""The predicted bytes of activations kept for the backward pass, from a model's shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorkeep.train.model.config import ModelConfig

FLOAT, HALF, _INDEX = 4, 2, 8
_BLOCKS_NOT_SWAPPED = 2
"""With activation swapping, the activations of this many blocks are on the GPU at once."""

_LOGITS_COPIES = 3
"""Copies of the logits that exist at once: their log-softmax, and the gradient twice."""


@dataclass(frozen=True, slots=True)
class Activations:
    """The bytes that autograd keeps of one micro-batch of ``rows`` sequences, with the settings of the techniques."""

    model: ModelConfig
    rows: int
    on_cuda: bool
    techniques: Mapping[str, Mapping[str, Any]]

    @property
    def tokens(self) -> int:
        """Tokens in the micro-batch."""
        return self.rows * self.model.context_length

    @property
    def width(self) -> int:
        """Bytes of an element of a matmul operand."""
        return HALF if "mixed-precision" in self.techniques else FLOAT

    @property
    def _keeps_scores(self) -> bool:
        """Whether attention keeps its scores: torch's fused kernel for CPUs does not support dropout."""
        return self._kernel == "math" or (self.model.dropout > 0 and not self.on_cuda)

    @property
    def _kernel(self) -> str | None:
        kernel: str | None = self.techniques.get("attention-kernel", {}).get("kernel")
        return kernel

    def kept(self) -> int:
        """Return the bytes on the device kept from the forward to the backward pass, without the logits."""
        kept = self._kept()
        return min(kept, _BLOCKS_NOT_SWAPPED * self.block()) if "activation-swapping" in self.techniques else kept

    def _kept(self) -> int:
        model = self.model
        # Token ids, the final norm with its output, and the dropout of the embeddings.
        ends = _INDEX * self.tokens + self._norm() + self.width * self.tokens * model.d_model + self._dropout(FLOAT)
        ends += self._shift() if model.token_shift else 0
        every = self._checkpointed_every()
        if every is None:
            return ends + model.n_layers * self.block()
        checkpointed = -(-model.n_layers // every)
        return ends + checkpointed * self._checkpointed_block() + (model.n_layers - checkpointed) * self.block()

    def recomputed(self) -> int:
        """Return the additional bytes while activation checkpointing recomputes a block, and computes its gradients."""
        if self._checkpointed_every() is None:
            return 0
        hidden = (2 if self.model.gated else 1) * self.width * self.model.mlp_width
        return self.block() + self.tokens * (hidden + FLOAT * self.model.d_model)

    def block(self) -> int:
        """Return the bytes that one block keeps."""
        model = self.model
        hidden = (4 if model.gated else 2) * self.width * self.tokens * model.mlp_width
        # The outputs of the norms; the projection of a gate makes another 16-bit copy.
        returned = (3 if model.gated and self.width < FLOAT else 2) * self.width * self.tokens * model.d_model
        shifts = 2 * self._shift() if model.token_shift == "blocks" else 0
        return 2 * self._norm() + shifts + returned + self._attention() + hidden + 2 * self._dropout(self.width)

    def logits(self) -> int:
        """Return the memory of the logits at the start of the backward pass."""
        model = self.model
        if "fused-cross-entropy" not in self.techniques:
            return _LOGITS_COPIES * FLOAT * self.tokens * model.vocab_size
        parts = int(self.techniques["fused-cross-entropy"].get("parts", 8))
        gradients = FLOAT * model.d_model * (self.tokens + model.vocab_size)
        return gradients + _LOGITS_COPIES * FLOAT * -(-self.tokens // parts) * model.vocab_size

    def _norm(self) -> int:
        """Return the input of a norm, in float32, and its statistics."""
        model = self.model
        kept = model.d_model + (2 if model.norm == "layernorm" else 1)
        # torch has no fused RMSNorm for CPUs, and keeps the factor of the weights.
        kept += model.d_model if model.norm == "rmsnorm" and not self.on_cuda else 0
        return FLOAT * self.tokens * kept

    def _shift(self) -> int:
        """Return the copy that a token shift makes, of the embeddings or of the output of a norm: both are float32."""
        return FLOAT * self.tokens * self.model.d_model

    def _dropout(self, width: int) -> int:
        if not self.model.dropout:
            return 0
        return (1 if self.on_cuda else width) * self.tokens * self.model.d_model

    def _attention(self) -> int:
        """Return the bytes that attention keeps, with its output, the input of the output projection."""
        model, tokens = self.model, self.tokens
        heads = model.attention_width
        output = self.width * tokens * heads
        # The convolution makes a copy of queries, keys and values.
        output += self.width * tokens * 3 * heads if model.convolution > 1 else 0
        if self._keeps_scores:
            # In float32: scaled queries and keys, values, softmax, the mask of dropout and its result.
            scores = (3 if model.dropout else 1) * model.context_length * model.n_heads
            return output + FLOAT * tokens * (3 * heads + scores)
        if self._kernel == "matmul":
            # Queries, keys and values of every head, and those before their norms.
            before = heads + 2 * model.n_kv_heads * model.head_size if model.qk_norm else 0
            return output + self.width * tokens * (before + 3 * heads + model.context_length * model.n_heads)
        return output + tokens * (self._projected() + FLOAT * model.n_heads)

    def _projected(self) -> int:
        """Return the bytes of queries, keys and values of one token, with what their norms keep."""
        model, half = self.model, self.width < FLOAT
        heads = model.attention_width
        key_width = model.n_kv_heads * model.head_size
        both = heads + key_width
        # Rotation and norms make copies of queries and keys. Values are a part of a projection, which is kept whole.
        copied = model.positions == "rotary" or model.qk_norm
        kept = 3 * heads
        if model.grouped:
            # A norm in 32 bits keeps its input, and the second projection another 16-bit copy of its own.
            kept = 2 * key_width + (heads if half or model.qk_norm or not copied else 0)
            kept += heads if half and not copied else 0
        found = self.width * (kept + (both if copied else 0))
        if model.qk_norm:
            # A copy in 32 bits, the normalised heads (see `_norm`), and the factor of each head.
            copies = (1 if half else 0) + (0 if self.on_cuda else 1)
            found += FLOAT * (copies * both + both // model.head_size)
        return found

    def _checkpointed_every(self) -> int | None:
        settings = self.techniques.get("activation-checkpointing")
        return None if settings is None else int(settings.get("every", 1))

    def _checkpointed_block(self) -> int:
        """Return the bytes that a recomputed block keeps: its input, and with ``keep="matmuls"`` its matmuls."""
        model = self.model
        kept = FLOAT * self.tokens * model.d_model
        if self.techniques["activation-checkpointing"].get("keep") != "matmuls":
            return kept
        projected = model.attention_width + 2 * model.n_kv_heads * model.head_size
        # The output of attention, and those of the two projections to the residual stream.
        matmuls = projected + model.attention_width + 2 * model.d_model + (2 if model.gated else 1) * model.mlp_width
        return kept + self.tokens * (self.width * matmuls + FLOAT * model.n_heads)
