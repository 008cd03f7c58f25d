"""Causal self-attention with a replaceable kernel."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.positions import Rotation, rotate
from tensorkeep.train.model.shift import CausalConvolution


class Kernel(Protocol):
    """Computes attention as `torch.nn.functional.scaled_dot_product_attention` does.

    Query, key, value and result have the shape [batch, heads, positions, head size]; ``attn_mask`` is boolean, True
    where a query attends to a key, of shape [queries, keys].
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor: ...


class Attention(nn.Module):
    """Multi-head attention of each position to itself and the positions before it.

    ``qkv`` projects to queries, keys and values, in this order, each with all heads in sequence; ``out`` projects the
    heads to the residual stream. Techniques assign another ``kernel``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.head_size = config.head_size
        self.dropout_p = config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.convolution = CausalConvolution(3 * config.d_model, config.convolution) if config.convolution > 1 else None
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.kernel: Kernel = functional.scaled_dot_product_attention

    def forward(self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None) -> Tensor:
        """Return the output of attention, [batch, positions, d_model] like x.

        ``rotation`` is that of these positions, if the model has rotary positions. ``past`` holds the keys and values
        of the positions before these; those of these positions are added.
        """
        batch, length, _ = x.shape
        projected = self.qkv(x)
        if self.convolution is not None:
            projected = self.convolution(projected, None if past is None else past.tails)
        heads = projected.view(batch, length, 3 * self.n_heads, self.head_size)
        if rotation is None:
            query, key, value = heads.chunk(3, dim=2)
        else:
            turned, value = heads.split((2 * self.n_heads, self.n_heads), dim=2)
            query, key = rotate(turned, rotation).chunk(2, dim=2)
        attended = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), past)
        added: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return added

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, past: LayerCache | None) -> Tensor:
        before, length = 0, query.shape[2]
        if past is not None:
            before = past.length
            key, value = past.extend(key, value)
        mask = None
        if before and length > 1:
            # is_causal aligns the first query with the first key; here the last query belongs to the last key.
            mask = torch.ones(length, before + length, dtype=torch.bool, device=query.device).tril(before)
        dropout = self.dropout_p if self.training else 0.0
        return self.kernel(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=before == 0)
