"""Attention of each query to its own block of keys and to a few chosen blocks, without computing the others.

On a CPU, the pairs of a query and a chosen block are sorted by block, so that a matmul computes a block of keys with
the queries that chose it; this is done head by head. On CUDA, FlexAttention skips the tiles that no query chose.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tensorkeep.train.model.document_mask import TILE, attend_within, block_mask

_QUERIES_AT_ONCE = 32
"""Queries of one matmul; the last one of each block is filled up."""


class Choice(NamedTuple):
    """The blocks that each query attends to beside its own.

    Attributes
    ----------
    blocks : Tensor
        Their numbers: int64, of shape [..., queries, chosen].
    valid : Tensor
        False where a query has fewer earlier blocks: bool, of the same shape.
    """

    blocks: Tensor
    valid: Tensor


@torch.no_grad()
def choose_blocks(query: Tensor, key: Tensor, block: int, count: int) -> Choice:
    """Return the complete blocks before a query's own that match it best, by the mean of their keys.

    The queries, of shape [..., positions, head size], are those of the last positions of the keys.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    complete = keys // block
    means = key[..., : complete * block, :].unflatten(-2, (complete, block)).mean(-2)  # type: ignore[no-untyped-call]
    own = torch.arange(keys - queries, keys, device=key.device).unsqueeze(-1) // block
    earlier = torch.arange(complete, device=key.device) < own
    scores = (query @ means.transpose(-2, -1)).masked_fill(~earlier, -torch.inf)
    best = scores.topk(min(count, complete), dim=-1)
    return Choice(best.indices, best.values > -torch.inf)


def kept_blocks(choice: Choice, blocks: int) -> Tensor:
    """Return which of all blocks each query chose: bool, of shape [..., queries, blocks]."""
    # What is not valid goes to a further column.
    kept = choice.valid.new_zeros(*choice.valid.shape[:-1], blocks + 1)
    return kept.scatter(-1, choice.blocks.where(choice.valid, blocks), True)[..., :blocks]


def attend_to_blocks(
    query: Tensor, key: Tensor, value: Tensor, choice: Choice, block: int, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return attention, and how many pairs attended in each head, [batch, heads]; on a CPU.

    Query, key and value have the shape [batch, heads, positions, head size]. Every operation has a deterministic
    gradient, whatever the number of threads.
    """
    length = query.shape[2]
    query, key, value = (functional.pad(each, (0, 0, 0, -length % block)) for each in (query, key, value))
    flat = (each.flatten(0, 1) for each in (query, key, value, choice.blocks, choice.valid))
    heads = [_one_head(*each, block=block, dropout=dropout, length=length) for each in zip(*flat, strict=True)]
    results, pairs = zip(*heads, strict=True)
    return torch.stack(results).view(query.shape[:2] + results[0].shape), torch.stack(pairs).view(query.shape[:2])


def _one_head(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, valid: Tensor, *, block: int, dropout: float, length: int
) -> tuple[Tensor, Tensor]:
    """Compute one head, of padded inputs; see `attend_to_blocks`."""
    padded, size = query.shape
    blocks = padded // block
    query = query * size**-0.5
    key, value = key.view(blocks, block, size), value.view(blocks, block, size)
    causal = torch.ones(block, block, dtype=torch.bool).tril()
    own = (query.view(blocks, block, size) @ key.mT).masked_fill(~causal, -torch.inf).view(padded, block)[:length]
    groups, slots = _groups(chosen.flatten(), blocks)
    scores = [own]
    if len(slots):
        keys = functional.embedding(groups, key.flatten(1)).view(-1, block, size)
        rows = _in_groups(query[:length].repeat_interleave(chosen.shape[1], dim=0), slots, len(groups))
        of_pairs = (rows @ keys.mT).flatten(0, 1)[slots].view(length, -1, block)
        scores.append(of_pairs.masked_fill(~valid.unsqueeze(-1), -torch.inf).flatten(1))
    joined = torch.cat(scores, dim=1)
    weights = functional.dropout(joined.softmax(1), dropout)
    own = functional.pad(weights[:, :block], (0, 0, 0, padded - length)).view(blocks, block, block)
    result = (own.to(value.dtype) @ value).view(padded, size)[:length]
    if len(slots):
        values = functional.embedding(groups, value.flatten(1)).view(-1, block, size)
        rows = _in_groups(weights[:, block:].to(value.dtype).reshape(-1, block), slots, len(groups))
        result = result + (rows @ values).flatten(0, 1)[slots].view(length, -1, size).sum(1)
    return result, joined.detach().isfinite().sum()


def _groups(chosen: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Sort pairs into groups of one block; return the block of each group, and the place of each pair in the groups.

    The number of groups depends on the number of pairs only.
    """
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=blocks)
    groups = -(-counts // _QUERIES_AT_ONCE)
    ends = groups.cumsum(0)
    block = chosen[order]
    within = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[block]
    places = (ends - groups)[block] * _QUERIES_AT_ONCE + within
    number = len(chosen) // _QUERIES_AT_ONCE + blocks
    block_of_group = torch.searchsorted(ends, torch.arange(number), right=True).clamp(max=blocks - 1)
    return block_of_group, torch.empty_like(chosen).scatter(0, order, places)


def _in_groups(pairs: Tensor, slots: Tensor, groups: int) -> Tensor:
    """Return the rows of pairs in their places, of shape [groups, queries of a group, columns]."""
    rows = pairs.new_zeros(groups * _QUERIES_AT_ONCE, pairs.shape[1])
    return rows.index_put((slots,), pairs).view(groups, _QUERIES_AT_ONCE, -1)


def attend_to_tiles(query: Tensor, key: Tensor, value: Tensor, choice: Choice, block: int) -> Tensor:
    """Return attention, of the shape of the query, by FlexAttention; see `attend_to_blocks`."""
    length = query.shape[2]
    blocks = -(-length // block)
    kept = kept_blocks(choice, blocks)
    kept |= torch.arange(blocks, device=query.device) == torch.arange(length, device=query.device).unsqueeze(1) // block

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & kept[batch, head, query, key // block]

    return attend_within(query, key, value, block_mask(_tiles(kept, block, length), visible, length))


def _tiles(kept: Tensor, block: int, length: int) -> Tensor:
    """Return the tiles with a visible pair, [batch, heads, tiles, tiles]; kept is [batch, heads, queries, blocks]."""
    tiles = -(-length // TILE)
    by_query = functional.pad(kept, (0, 0, 0, tiles * TILE - length)).unflatten(2, (tiles, TILE)).any(3)  # type: ignore[no-untyped-call]
    begin = torch.arange(kept.shape[-1], device=kept.device) * block
    tile = torch.arange(tiles, device=kept.device).unsqueeze(1)
    # A block may be in several tiles, and a tile in several blocks.
    within = (begin // TILE <= tile) & (tile <= (begin + block - 1).clamp(max=length - 1) // TILE)
    occupied = (by_query.unsqueeze(-2) & within).any(-1)
    result: Tensor = occupied & (tile >= tile.T)
    return result
