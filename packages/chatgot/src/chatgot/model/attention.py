"""Causal self-attention: a replaceable kernel, the key-value cache of generation, and masks that separate documents.

A token that ends a document is, as an input, the beginning of the next one, as in generation.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from chatgot.model.config import ModelConfig
from chatgot.model.layers import CausalConvolution, Rotation, Tails, build_linear, rotate

# Positions of queries, and of keys, that FlexAttention computes or skips together.
TILE = 128
# The smallest head size that FlexAttention supports.
SMALLEST_HEAD = 16
# Bool, of shape [batch, 1, queries, keys], or a mask of FlexAttention.
Mask = Tensor | BlockMask
# `(batch, head, query, key) -> bool`: whether a query attends to a key, by their indices.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# Computes attention as `torch.nn.functional.scaled_dot_product_attention` does, with its keywords ``attn_mask``,
# ``dropout_p`` and ``is_causal``. Query, key, value and result have the shape [batch, heads, positions, head size];
# ``attn_mask`` is boolean, True where a query attends to a key, and broadcasts to [batch, heads, queries, keys].
AttentionFunction = Callable[..., Tensor]

_grouped_attention: AttentionFunction = partial(functional.scaled_dot_product_attention, enable_gqa=True)


def in_float32(kernel: AttentionFunction) -> AttentionFunction:
    def attend(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        # Autocast would cast the operands back to 16 bits.
        with torch.autocast(query.device.type, enabled=False):
            return kernel(query.float(), key.float(), value.float(), **options)

    return attend


class LayerCache:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys
        self._values = values
        self.length = 0
        self.tails: Tails = {}

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of shape [batch, heads, new positions, head size]; return those at all positions."""
        # Written in place: attention then reads a view, and copies nothing.
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class Cache:
    """The keys and values of all layers, in memory that is allocated once; see `GPT.new_cache`. No gradients."""

    def __init__(self, config: ModelConfig, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (2, config.n_layers, batch_size, config.n_kv_heads, config.context_length, config.head_size)
        # One allocation: a cache that grows would be copied with every token.
        keys, values = torch.empty(shape, device=device, dtype=dtype)
        self.layers = [LayerCache(*pair) for pair in zip(keys, values, strict=True)]
        self.tails: Tails = {}
        # The document number of every token, [batch, positions], if the model masks documents.
        self.documents: Tensor | None = None

    @property
    def length(self) -> int:
        return self.layers[0].length

    def clear(self) -> None:
        self.tails.clear()
        self.documents = None
        # The memory is kept, and overwritten from position 0.
        for layer in self.layers:
            layer.length = 0
            layer.tails.clear()


class Attention(nn.Module):
    """Multi-head attention of every position to itself and the positions before it.

    ``qkv`` projects to queries, keys and values, in this order, each with all heads in sequence; grouped heads have two
    projections, ``q`` and ``kv``. Techniques assign another ``kernel``.
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
        # Two projections, so that each can be sharded by heads.
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
        self.kernel: AttentionFunction = functional.scaled_dot_product_attention

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Return the output, [batch, positions, d_model] like x; ``past`` receives the new keys and values."""
        query, key, value = self._project(x, rotation, past)
        attended = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), past, mask)
        added: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return added

    @property
    def projections(self) -> list[nn.Linear]:
        # Techniques rely on the order: the first layer makes the queries.
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
                # One operation rotates queries and keys, which are neighbours in memory.
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
        # is_causal, where it is possible, lets kernels skip half the scores; a mask does not.
        causal = before == 0 and mask is None
        if mask is None and before and length > 1:
            # is_causal aligns the first query with the first key; with a cache, the last query belongs to the last key.
            mask = torch.ones(length, before + length, dtype=torch.bool, device=query.device).tril(before)
        kernel, dropout = self.kernel, self.dropout_p if self.training else 0.0
        if self.grouped and kernel is functional.scaled_dot_product_attention:
            kernel = _grouped_attention
        elif self.grouped:
            # The kernels of techniques need as many key and value heads as query heads.
            repeats = self.n_heads // self.kv_heads
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return kernel(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _normalised(heads: Tensor, norm: nn.RMSNorm) -> Tensor:
    # In the dtype of the weights, because autocast would normalise 16-bit heads in 16 bits.
    wide: Tensor = norm(heads.to(norm.weight.dtype))
    return wide.to(heads.dtype)


def document_numbers(tokens: Tensor, end: int, before: Tensor | None = None) -> Tensor:
    """Return the document number of every token, of shape [batch, positions]; a window begins in document 0.

    ``before`` holds the numbers of earlier tokens, and is included in the result.

    >>> document_numbers(torch.tensor([[5, 6, 0, 7, 0, 0]]), end=0).tolist()
    [[0, 0, 1, 1, 2, 3]]
    """
    # The end token gets the number of the next document: that is predicted from it and its own tokens alone.
    numbers = (tokens == end).cumsum(1)
    return numbers if before is None else torch.cat((before, before[:, -1:] + numbers), dim=1)


def dense_mask(documents: Tensor, queries: int) -> Tensor:
    """Return which keys are visible: bool, of shape [batch, 1, queries, keys]; the queries are the last positions."""
    position = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, -queries:].unsqueeze(2) == documents.unsqueeze(1)
    return (same & (position <= position[-queries:].unsqueeze(1))).unsqueeze(1)


def tiled_mask(documents: Tensor) -> BlockMask:
    tiles = -(-documents.shape[1] // TILE)
    # Document numbers ascend, so the first and the last number of a tile show which other tiles share a document.
    first = documents[:, ::TILE]
    last = torch.cat((documents[:, TILE - 1 :: TILE], documents[:, -1:]), dim=1)[:, :tiles]
    # A tile of keys after the tile of queries has no visible pair.
    tile = torch.arange(tiles, device=documents.device)
    occupied = (last.unsqueeze(1) >= first.unsqueeze(2)) & (tile <= tile.unsqueeze(1))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return block_mask(occupied.unsqueeze(1), visible, documents.shape[1])


def block_mask(occupied: Tensor, visible: MaskFunction, length: int) -> BlockMask:
    """Return a FlexAttention mask from the tiles with a visible pair: bool, [batch, heads, query tiles, key tiles]."""
    # Not create_block_mask, which evaluates all pairs of positions.
    # FlexAttention wants, for each query tile, its occupied key tiles first; stable keeps them in ascending order.
    order = occupied.byte().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        occupied.sum(-1, dtype=torch.int32),
        order.to(torch.int32),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def attend_within(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Return attention under a mask; FlexAttention computes the occupied tiles only."""
    grouped = key.shape[1] != query.shape[1]
    result: Tensor = _compiled_flex_attention()(query, key, value, block_mask=mask, enable_gqa=grouped)
    return result


@cache
def _compiled_flex_attention() -> Any:
    # Each shape is compiled by itself, so that a resumed run, which has not seen earlier shapes, computes equal bits.
    return torch.compile(flex_attention, dynamic=False)
