"""Dynamic sparse attention: each position attends to its own block and to the best earlier blocks."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Count, Section
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification
from tensorkeep.train.techniques.gathered_attention import attend_to_blocks, attend_to_tiles, choose_blocks, kept_blocks


class SparseAttentionSettings(Section, frozen=True):
    """How many keys each query attends to.

    Attributes
    ----------
    block : int
        Positions in a block of keys.
    keep : int
        Blocks that each position attends to: its own and ``keep - 1`` earlier ones.
    """

    block: Count = 64
    keep: Count = 4


class SparseAttention(Technique):
    """Lu et al., arXiv 2502.13189 (MoBA): blocks are ranked by the product of the query and the mean of their keys.

    Each query ranks the complete blocks before its own, so the choice is causal, and generation with a cache chooses
    the same blocks as training. The weights are those of full attention: without the technique, the model attends to
    everything.

    Blocks that are not chosen are not computed: see `tensorkeep.train.techniques.gathered_attention`. Forward and
    backward pass of 8 heads of size 64 with the default settings, on 2 threads of a CPU, in ms (median of 3 to 7 runs;
    torch 2.13):

    ========= ====== ======
    positions   full sparse
    ========= ====== ======
          512     26     97
        1,024     62    137
        2,048    202    258
        4,096    679    473
        8,192  2,479    914
    ========= ====== ======

    Each query chooses its own blocks, so that much of the time goes into sorting and copying, not into matmuls.
    Windows with a mask of documents, and with dropout on CUDA, are computed with a mask of all pairs and gain nothing.
    """

    name: ClassVar = "sparse-attention"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "lets each position attend to its own block and to the best few blocks before it"
    effect: ClassVar = (
        "on a CPU, attention takes 0.37 of the time of full attention at a context of 8,192, 0.70 at 4,096, and more "
        "than full attention from 2,048 down: the gain is in long contexts. On CUDA, where it has not been measured, a "
        "tile of 128 x 128 pairs is left out only if none of its queries chose a block in it"
    )
    reference: ClassVar = "arXiv 2502.13189"
    Settings: ClassVar = SparseAttentionSettings
    settings: SparseAttentionSettings
    conflicts: ClassVar = {
        "attention-kernel": "each replaces the attention kernel of the model",
        "compile": "the blocks that the queries choose decide on the shapes of tensors, which compiled code has fixed",
        "progressive-length": "short windows have no blocks to leave out, so it could not be verified",
    }

    def configure(self, config: Config) -> Config:
        """Check that there are blocks to leave out."""
        kept, length = self.settings.block * self.settings.keep, config.model.context_length
        if kept >= length:
            raise UsageError(
                f"{self._choice} cover the whole context of {length}",
                remedy="give fewer or smaller ones (techniques.sparse-attention.keep and .block)",
            )
        return config

    def apply(self, run: Run) -> None:
        """Replace the attention kernel of each block."""
        self._kernels = [TopBlocks(self.settings.block, self.settings.keep) for _ in run.model.attentions]
        for attention, kernel in zip(run.model.attentions, self._kernels, strict=True):
            attention.kernel = kernel

    def verify(self, run: Run) -> Verification:
        """Count the pairs that each call attends to: exactly as many as the settings give."""
        for kernel in self._kernels:
            kernel.pairs = []
        yield
        length = run.config.model.context_length
        expected = pairs_kept(length, self.settings.block, self.settings.keep)
        found = [kernel.pairs or [] for kernel in self._kernels]
        for kernel in self._kernels:
            kernel.pairs = None
        others = sum(not calls or any(bool((each != expected).any()) for each in calls) for calls in found)
        if others:
            raise self.not_active(f"attention in {others} of {len(found)} blocks did not attend to {self._choice}")
        count, density = sum(map(len, found)), expected / (length * (length + 1) / 2)
        return Proof(
            f"{count} calls of attention attended to {density:.1%} of the earlier positions, {self._choice}",
            attentions=count,
            density=density,
        )

    @property
    def _choice(self) -> str:
        return f"{self.settings.keep} blocks of {self.settings.block}"


class TopBlocks:
    """A causal attention kernel; see `tensorkeep.train.model.attention.Kernel` and `SparseAttentionSettings`.

    If ``pairs`` is a list, each call adds to it how many pairs attended: an int64 tensor of shape [batch, heads].
    """

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
        # In this order: compiled code would be compiled again if it depended on the list.
        if not torch.compiler.is_compiling() and self.pairs is not None:
            self.pairs.append(pairs)
        return result

    @torch.no_grad()
    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the keys that each query attends to: bool, of shape [batch, heads, queries, keys].

        The queries, of shape [batch, heads, positions, head size], are those of the last positions of the keys.
        """
        queries, keys = query.shape[-2], key.shape[-2]
        choice = choose_blocks(query, key, self.block, self.keep - 1)
        position = torch.arange(keys, device=key.device)
        own_position, blocks = position[keys - queries :].unsqueeze(-1), position // self.block
        kept = kept_blocks(choice, -(-keys // self.block))
        return (kept[..., blocks] | (blocks == own_position // self.block)) & (position <= own_position)


def pairs_kept(length: int, block: int, keep: int) -> int:
    """Return how many pairs of a query and a key attend in a window.

    Examples
    --------
    >>> pairs_kept(4, block=2, keep=1)
    6
    """
    return sum(position % block + 1 + min(keep - 1, position // block) * block for position in range(length))
