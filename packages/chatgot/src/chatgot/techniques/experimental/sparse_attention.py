"""Dynamic sparse attention: 0.18 times the plain speed at a context of 64; attention gains from 4,096 on (on a CPU).

Each position attends to its own block of keys and to the best earlier blocks; the other blocks are not computed.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from chatgot.model.attention import TILE, attend_within, block_mask
from chatgot.settings import Count
from chatgot.techniques.base import Config, Proof, Section, StepState, Technique, Verification
from tensorkeep.errors import UsageError

# Queries of one matmul; the last matmul of every block is padded.
_QUERIES_AT_ONCE = 32


class ChosenBlocks(NamedTuple):
    """The blocks that each query attends to beside its own, both fields of shape [..., queries, chosen]."""

    # Block numbers, int64.
    blocks: Tensor
    # Bool; False where a query has fewer earlier blocks than are chosen.
    valid: Tensor


@torch.no_grad()
def choose_blocks(query: Tensor, key: Tensor, block: int, count: int) -> ChosenBlocks:
    """Return the complete blocks before a query's own that match it best; the queries are the last positions."""
    queries, keys = query.shape[-2], key.shape[-2]
    complete = keys // block
    means = key[..., : complete * block, :].unflatten(-2, (complete, block)).mean(-2)  # type: ignore[no-untyped-call]
    own = torch.arange(keys - queries, keys, device=key.device).unsqueeze(-1) // block
    # Only complete blocks before the own one: the choice is causal, and stays the same when the cache grows.
    earlier = torch.arange(complete, device=key.device) < own
    scores = (query @ means.transpose(-2, -1)).masked_fill(~earlier, -torch.inf)
    best = scores.topk(min(count, complete), dim=-1)
    return ChosenBlocks(best.indices, best.values > -torch.inf)


def kept_blocks(choice: ChosenBlocks, blocks: int) -> Tensor:
    """Return which of all blocks each query chose: bool, of shape [..., queries, blocks]."""
    # Invalid choices go to an extra column, which is cut off.
    kept = choice.valid.new_zeros(*choice.valid.shape[:-1], blocks + 1)
    return kept.scatter(-1, choice.blocks.where(choice.valid, blocks), True)[..., :blocks]


def attend_to_blocks(
    query: Tensor, key: Tensor, value: Tensor, choice: ChosenBlocks, block: int, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return attention on a CPU, and how many pairs attended in each head, [batch, heads]."""
    # On a CPU, the pairs of a query and a chosen block are sorted by block, head by head, so that a matmul computes a
    # block of keys with the queries that chose it.
    # Every operation has a deterministic gradient, whatever the number of threads.
    length = query.shape[2]
    query, key, value = (functional.pad(each, (0, 0, 0, -length % block)) for each in (query, key, value))
    flat = (each.flatten(0, 1) for each in (query, key, value, choice.blocks, choice.valid))
    heads = [_one_head(*each, block=block, dropout=dropout, length=length) for each in zip(*flat, strict=True)]
    results, pairs = zip(*heads, strict=True)
    return torch.stack(results).view(query.shape[:2] + results[0].shape), torch.stack(pairs).view(query.shape[:2])


def _one_head(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, valid: Tensor, *, block: int, dropout: float, length: int
) -> tuple[Tensor, Tensor]:
    padded, size = query.shape
    blocks = padded // block
    query = query * size**-0.5
    key, value = key.view(blocks, block, size), value.view(blocks, block, size)
    # A query's own block is causal; chosen blocks are complete and earlier, so they need no causal mask.
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
    """Sort pairs into groups of one block; return the groups' blocks, and the pairs' indices in the groups."""
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=blocks)
    groups = -(-counts // _QUERIES_AT_ONCE)
    ends = groups.cumsum(0)
    block = chosen[order]
    within = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[block]
    places = (ends - groups)[block] * _QUERIES_AT_ONCE + within
    # An upper bound that does not depend on the choice, so that shapes are the same in every call.
    number = len(chosen) // _QUERIES_AT_ONCE + blocks
    block_of_group = torch.searchsorted(ends, torch.arange(number), right=True).clamp(max=blocks - 1)
    return block_of_group, torch.empty_like(chosen).scatter(0, order, places)


def _in_groups(pairs: Tensor, slots: Tensor, groups: int) -> Tensor:
    """Return the rows of pairs at their indices, of shape [groups, queries in a group, columns]."""
    rows = pairs.new_zeros(groups * _QUERIES_AT_ONCE, pairs.shape[1])
    return rows.index_put((slots,), pairs).view(groups, _QUERIES_AT_ONCE, -1)


def attend_to_tiles(query: Tensor, key: Tensor, value: Tensor, choice: ChosenBlocks, block: int) -> Tensor:
    length = query.shape[2]
    blocks = -(-length // block)
    kept = kept_blocks(choice, blocks)
    # Each query also keeps its own block.
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


class SparseAttentionSettings(Section, frozen=True):
    """How many keys each query attends to."""

    # Positions in a block of keys.
    block: Count = 64
    # Blocks that each position attends to: its own and keep - 1 earlier ones.
    keep: Count = 4


# Forward and backward pass of 8 heads of size 64, default settings, 2 threads of a CPU, torch 2.13, in ms (full,
# sparse): 512 positions 26, 97; 1,024: 62, 137; 2,048: 202, 258; 4,096: 679, 473; 8,192: 2,479, 914. Each query chooses
# its own blocks, so that much of the time goes into sorting and copying, not into matmuls.
class SparseAttention(Technique):
    """Lu et al., arXiv 2502.13189 (MoBA): blocks are ranked by the product of the query and the mean of their keys.

    The choice is causal, and generation with a cache chooses the same blocks as training.
    """

    name: ClassVar = "sparse-attention"
    aliases: ClassVar = ("dynamic-sparse-attention",)
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "lets each position attend to its own block and to the best few blocks before it"
    effect: ClassVar = (
        "on a CPU, attention takes 0.37 of the time of full attention at a context of 8,192, 0.70 at 4,096, and more "
        "than full attention from 2,048 down: the gain is in long contexts. On CUDA, where it has not been measured, a "
        "tile of 128 x 128 pairs is left out only if none of its queries chose a block in it"
    )
    reference: ClassVar = "arXiv 2502.13189"
    refuses_document_masks: ClassVar = (
        "its activity check expects every position to attend to as many blocks as the settings give"
    )
    settings: SparseAttentionSettings
    conflicts: ClassVar = {
        "attention-kernel": "each replaces the attention kernel of the model",
        "compile": "the blocks that the queries choose decide on the shapes of tensors, which compiled code has fixed",
        "progressive-length": "short windows have no blocks to leave out, so it could not be verified",
    }

    def configure(self, config: Config) -> Config:
        kept, length = self.settings.block * self.settings.keep, config.model.context_length
        if kept >= length:
            raise UsageError(
                f"{self._choice} cover the whole context of {length}",
                remedy="give fewer or smaller ones (techniques.sparse-attention.keep and .block)",
            )
        return config

    def apply(self, run: StepState) -> None:
        self._kernels = [TopBlocks(self.settings.block, self.settings.keep) for _ in run.model.attentions]
        for attention, kernel in zip(run.model.attentions, self._kernels, strict=True):
            attention.kernel = kernel

    def verify(self, run: StepState) -> Verification:
        for kernel in self._kernels:
            kernel.pairs = []
        yield
        length = run.config.model.context_length
        expected = count_kept_pairs(length, self.settings.block, self.settings.keep)
        found = [kernel.pairs or [] for kernel in self._kernels]
        for kernel in self._kernels:
            kernel.pairs = None
        others = sum(not calls or any(bool((each != expected).any()) for each in calls) for calls in found)
        if others:
            raise self.not_active(f"attention in {others} of {len(found)} blocks did not attend to {self._choice}")
        count, density = sum(map(len, found)), expected / (length * (length + 1) / 2)
        summary = f"{count} calls of attention attended to {density:.1%} of the earlier positions, {self._choice}"
        return Proof(summary, attentions=count, density=density)

    @property
    def _choice(self) -> str:
        return f"{self.settings.keep} blocks of {self.settings.block}"


class TopBlocks:
    """A causal attention kernel; if ``pairs`` is a list, each call adds the number of pairs, [batch, heads]."""

    def __init__(self, block: int, keep: int) -> None:
        self.block = block
        self.keep = keep
        self.pairs: list[Tensor] | None = None

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
    ) -> Tensor:
        # Generation with a cache computes few queries, and documents have a mask of their own.
        if not is_causal or attn_mask is not None or (query.is_cuda and dropout_p):
            visible = self.visible(query, key)
            if attn_mask is not None:
                visible &= attn_mask
            pairs = visible.sum((-1, -2))
            result = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout_p)
        else:
            choice = choose_blocks(query, key, self.block, self.keep - 1)
            if query.is_cuda:
                result = attend_to_tiles(query, key, value, choice, self.block)
                own = torch.arange(query.shape[2], device=query.device) % self.block + 1
                pairs = (choice.valid.sum(-1) * self.block + own).sum(-1)
            else:
                result, pairs = attend_to_blocks(query, key, value, choice, self.block, dropout_p)
        # In this order: code that depends on the list would be recompiled.
        if not torch.compiler.is_compiling() and self.pairs is not None:
            self.pairs.append(pairs)
        return result

    @torch.no_grad()
    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the keys that each query attends to: bool, [batch, heads, queries, keys]; see `choose_blocks`."""
        queries, keys = query.shape[-2], key.shape[-2]
        choice = choose_blocks(query, key, self.block, self.keep - 1)
        position = torch.arange(keys, device=key.device)
        own_position, blocks = position[keys - queries :].unsqueeze(-1), position // self.block
        kept = kept_blocks(choice, -(-keys // self.block))
        return (kept[..., blocks] | (blocks == own_position // self.block)) & (position <= own_position)


def count_kept_pairs(length: int, block: int, keep: int) -> int:
    """Return how many pairs of a query and a key attend in a window."""
    return sum(position % block + 1 + min(keep - 1, position // block) * block for position in range(length))
