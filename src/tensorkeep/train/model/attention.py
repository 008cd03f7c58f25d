"""Causal self-attention, whose kernel can be replaced from outside."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.positions import Rotation, rotate


class Kernel(Protocol):
    """Computes attention as `torch.nn.functional.scaled_dot_product_attention` does.

    Query, key, value and result have the shape [batch, heads, positions, head size]; ``attn_mask`` is boolean, True
    where a query may look, of shape [queries, keys].
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
    """Multi-head attention in which each position looks at itself and those before it.

    Attributes
    ----------
    qkv : nn.Linear
        The projections to queries, keys and values, in this order, each with the heads one after another.
    out : nn.Linear
        The projection back.
    kernel : Kernel
        What computes the attention. Assign another one to replace it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.head_size = config.head_size
        self.dropout_p = config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.kernel: Kernel = functional.scaled_dot_product_attention

    def forward(self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None) -> Tensor:
        """Return what each position gathers, of the shape of x, [batch, positions, d_model].

        Parameters
        ----------
        x : Tensor
        rotation : Rotation, optional
            Of these positions, where the model has rotary ones.
        past : LayerCache, optional
            The positions before these, which are looked at, too; these are added to it.
        """
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.n_heads, self.head_size)
        if rotation is None:
            query, key, value = heads.chunk(3, dim=2)
        else:
            turned, value = heads.split((2 * self.n_heads, self.n_heads), dim=2)
            query, key = rotate(turned, rotation).chunk(2, dim=2)
        gathered = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), past)
        added: Tensor = self.dropout(self.out(gathered.transpose(1, 2).flatten(2)))
        return added

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, past: LayerCache | None) -> Tensor:
        before, length = 0, query.shape[2]
        if past is not None:
            before = past.length
            key, value = past.extend(key, value)
        mask = None
        if before and length > 1:
            # is_causal would align the first query with the first key, and here the last ones belong together.
            mask = torch.ones(length, before + length, dtype=torch.bool, device=query.device).tril(before)
        dropout = self.dropout_p if self.training else 0.0
        return self.kernel(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=before == 0)
