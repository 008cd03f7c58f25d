"""Masks that keep attention within documents, and FlexAttention, which skips what a mask hides.

The token that ends a document is, as an input, read as the beginning of the next one. So each document is predicted
from that token and its own tokens alone, its first token too, as in generation, which begins a document with it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
"""Positions of queries, and of keys, that FlexAttention computes or skips together."""

SMALLEST_HEAD = 16
"""Elements of a head for which FlexAttention has a kernel; torch refuses smaller ones."""

Mask = Tensor | BlockMask
"""Bool, of shape [batch, 1, queries, keys], or for FlexAttention."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(batch, head, query, key) -> bool``: whether a query attends to a key, by their indices."""


def document_numbers(tokens: Tensor, end: int, before: Tensor | None = None) -> Tensor:
    """Return the number of the document of each token, of shape [batch, positions]; a window begins in document 0.

    ``before`` holds the numbers of the tokens before these, and is included in the result.

    Examples
    --------
    >>> document_numbers(torch.tensor([[5, 6, 0, 7, 0, 0]]), end=0).tolist()
    [[0, 0, 1, 1, 2, 3]]
    """
    numbers = (tokens == end).cumsum(1)
    return numbers if before is None else torch.cat((before, before[:, -1:] + numbers), dim=1)


def dense_mask(documents: Tensor, queries: int) -> Tensor:
    """Return which keys are visible: bool, of shape [batch, 1, queries, keys]; the queries are the last positions."""
    position = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, -queries:].unsqueeze(2) == documents.unsqueeze(1)
    return (same & (position <= position[-queries:].unsqueeze(1))).unsqueeze(1)


def tiled_mask(documents: Tensor) -> BlockMask:
    """Return the mask of whole windows for FlexAttention, found tile by tile: documents are in ascending order."""
    tiles = -(-documents.shape[1] // TILE)
    first = documents[:, ::TILE]
    last = torch.cat((documents[:, TILE - 1 :: TILE], documents[:, -1:]), dim=1)[:, :tiles]
    tile = torch.arange(tiles, device=documents.device)
    occupied = (last.unsqueeze(1) >= first.unsqueeze(2)) & (tile <= tile.unsqueeze(1))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return block_mask(occupied.unsqueeze(1), visible, documents.shape[1])


def block_mask(occupied: Tensor, visible: MaskFunction, length: int) -> BlockMask:
    """Return a mask of FlexAttention from the tiles that have a visible pair.

    ``occupied`` is bool, of shape [batch, heads, tiles of queries, tiles of keys]. FlexAttention's own
    ``create_block_mask`` would evaluate all pairs.
    """
    order = occupied.byte().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        occupied.sum(-1, dtype=torch.int32),
        order.to(torch.int32),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def attend_within(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Return attention under a mask, computed by FlexAttention for its occupied tiles only."""
    grouped = key.shape[1] != query.shape[1]
    result: Tensor = _compiled_flex_attention()(query, key, value, block_mask=mask, enable_gqa=grouped)
    return result


@cache
def _compiled_flex_attention() -> Any:
    # Each shape by itself, so that a resumed run computes the same bits, although it has not seen the shapes before.
    return torch.compile(flex_attention, dynamic=False)
