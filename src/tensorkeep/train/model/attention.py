"""Causal self-attention with a replaceable kernel."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.document_mask import Mask, attend_within
from tensorkeep.train.model.lora import build_linear
from tensorkeep.train.model.positions import Rotation, rotate
from tensorkeep.train.model.shift import CausalConvolution


class Kernel(Protocol):
    """Computes attention as `torch.nn.functional.scaled_dot_product_attention` does.

    Query, key, value and result have the shape [batch, heads, positions, head size]; ``attn_mask`` is boolean, True
    where a query attends to a key, of a shape that broadcasts to [batch, heads, queries, keys].
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


_grouped_attention: Kernel = partial(functional.scaled_dot_product_attention, enable_gqa=True)


def _normalised(heads: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Return normalised heads, computed in the dtype of the weights, also under autocast."""
    wide: Tensor = norm(heads.to(norm.weight.dtype))
    return wide.to(heads.dtype)


class Attention(nn.Module):
    """Multi-head attention of each position to itself and the positions before it.

    ``qkv`` projects to queries, keys and values, in this order, each with all heads in sequence; ``out`` projects the
    heads to the residual stream. If several query heads share a head of keys and values, ``q`` and ``kv`` are two
    projections, each of which can be sharded by heads. Techniques assign another ``kernel``.
    """

    qkv: nn.Linear
    q: nn.Linear
    kv: nn.Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.kv_heads = config.n_kv_heads
        self.grouped = config.grouped
        self.head_size = config.head_size
        self.dropout_p = config.dropout
        if config.grouped:
            self.q = build_linear(config, "attention", config.d_model, config.attention_width)
            self.kv = build_linear(config, "attention", config.d_model, 2 * config.n_kv_heads * config.head_size)
        else:
            self.qkv = build_linear(config, "attention", config.d_model, 3 * config.attention_width)
        channels, taps = 3 * config.attention_width, config.convolution
        self.convolution = CausalConvolution(channels, taps) if taps > 1 else None
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.out = build_linear(config, "attention", config.attention_width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.kernel: Kernel = functional.scaled_dot_product_attention

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Return the output of attention, [batch, positions, d_model] like x.

        ``rotation`` is that of these positions, if the model has rotary positions. ``past`` holds the keys and values
        of the positions before these; those of these positions are added. ``mask`` hides more than later positions.
        """
        query, key, value = self._project(x, rotation, past)
        attended = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), past, mask)
        added: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return added

    @property
    def projections(self) -> list[nn.Linear]:
        """The layers that project to queries, keys and values; queries come from the first."""
        return [self.q, self.kv] if self.grouped else [self.qkv]

    def _project(self, x: Tensor, rotation: Rotation | None, past: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each of shape [batch, positions, heads, head size]."""
        if self.grouped:
            query = self.q(x).unflatten(-1, (self.n_heads, self.head_size))
            key, value = self.kv(x).unflatten(-1, (2 * self.kv_heads, self.head_size)).chunk(2, dim=2)
        else:
            projected = self.qkv(x)
            if self.convolution is not None:
                projected = self.convolution(projected, None if past is None else past.tails)
            heads = projected.unflatten(-1, (3 * self.n_heads, self.head_size))
            both, value = heads.split((2 * self.n_heads, self.n_heads), dim=2)
            if rotation is not None and self.q_norm is None:
                # One operation for queries and keys, which are neighbours in memory.
                both, rotation = rotate(both, rotation), None
            query, key = both.chunk(2, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = _normalised(query, self.q_norm), _normalised(key, self.k_norm)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return query, key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, past: LayerCache | None, mask: Mask | None) -> Tensor:
        before, length = 0, query.shape[2]
        if past is not None:
            before = past.length
            key, value = past.extend(key, value)
        if mask is not None and not isinstance(mask, Tensor):
            return attend_within(query, key, value, mask)
        causal = before == 0 and mask is None
        if mask is None and before and length > 1:
            # is_causal aligns the first query with the first key; here the last query belongs to the last key.
            mask = torch.ones(length, before + length, dtype=torch.bool, device=query.device).tril(before)
        kernel, dropout = self.kernel, self.dropout_p if self.training else 0.0
        if self.grouped and kernel is functional.scaled_dot_product_attention:
            kernel = _grouped_attention
        elif self.grouped:
            # The kernels of techniques have as many heads of keys and values as of queries.
            repeats = self.n_heads // self.kv_heads
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return kernel(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)
