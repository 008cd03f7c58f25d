"""Dynamic sparse attention: each position attends to its own block and to the best earlier blocks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Count, Section
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification


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
    """

    name: ClassVar = "sparse-attention"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "lets each position attend to its own block and to the best few blocks before it"
    effect: ClassVar = "slower than full attention below a context of about 8,192: it shows the effect on the loss"
    reference: ClassVar = "arXiv 2502.13189"
    Settings: ClassVar = SparseAttentionSettings
    settings: SparseAttentionSettings
    conflicts: ClassVar = {
        "attention-kernel": "each replaces the attention kernel of the model",
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
        for attention in run.model.attentions:
            attention.kernel = TopBlocks(self.settings.block, self.settings.keep)

    def verify(self, run: Run) -> Verification:
        """Count the pairs that the attention masks allow: exactly as many as the settings give."""
        length, attentions = run.config.model.context_length, run.model.attentions
        with _observed_masks(attentions) as masks:
            yield
        expected = pairs_kept(length, self.settings.block, self.settings.keep)
        others = sum(pairs is None or int(pairs) != expected * heads for pairs, heads in masks)
        if others or len(masks) < len(attentions):
            raise self.not_active(
                f"of {len(masks)} calls of attention in {len(attentions)} blocks of the model, {others} did not attend "
                f"to {self._choice}"
            )
        density = expected / (length * (length + 1) / 2)
        return Proof(
            f"{len(masks)} calls of attention attended to {density:.1%} of the earlier positions, {self._choice}",
            attentions=len(masks),
            density=density,
        )

    @property
    def _choice(self) -> str:
        return f"{self.settings.keep} blocks of {self.settings.block}"


class TopBlocks:
    """A causal attention kernel; see `tensorkeep.train.model.attention.Kernel`.

    Parameters
    ----------
    block, keep : int
        See `SparseAttentionSettings`.
    """

    def __init__(self, block: int, keep: int) -> None:
        self.block = block
        self.keep = keep

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
        visible = self.visible(query, key)
        if attn_mask is not None:
            visible &= attn_mask
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout_p)

    @torch.no_grad()
    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the keys that each query attends to: bool, of shape [batch, heads, queries, keys].

        Parameters
        ----------
        query, key : Tensor
            Of shape [batch, heads, positions, head size]. The queries are those of the last positions.
        """
        queries, keys = query.shape[-2], key.shape[-2]
        position = torch.arange(keys, device=key.device)
        own_position = position[keys - queries :].unsqueeze(-1)
        own_block, blocks = own_position // self.block, position // self.block
        complete = keys // self.block
        means = key[..., : complete * self.block, :].unflatten(-2, (complete, self.block)).mean(-2)  # type: ignore[no-untyped-call]
        earlier = torch.arange(complete, device=key.device) < own_block
        scores = (query @ means.transpose(-2, -1)).masked_fill(~earlier, -torch.inf)
        best = scores.topk(min(self.keep - 1, complete), dim=-1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & earlier
        # The last block may be incomplete; only its own positions attend to it.
        kept = functional.pad(kept, (0, -(-keys // self.block) - complete))
        return (kept[..., blocks] | (blocks == own_block)) & (position <= own_position)


def pairs_kept(length: int, block: int, keep: int) -> int:
    """Return how many pairs of a query and a key attend in a window.

    Examples
    --------
    >>> pairs_kept(4, block=2, keep=1)
    6
    """
    return sum(position % block + 1 + min(keep - 1, position // block) * block for position in range(length))


MaskSize = tuple[Tensor | None, int]
"""How many pairs a mask allows (None without a mask), and the number of windows times heads."""


class _MaskObserver(TorchFunctionMode):
    """Records the mask of each call of attention."""

    def __init__(self, masks: list[MaskSize]) -> None:
        super().__init__()
        self._masks = masks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = options.get("attn_mask")
            self._masks.append((None if mask is None else mask.sum(), args[0].shape[0] * args[0].shape[1]))
        return func(*args, **options)


@contextmanager
def _observed_masks(attentions: Iterable[nn.Module]) -> Iterator[list[MaskSize]]:
    """Record the masks of attention modules."""
    masks: list[MaskSize] = []
    observer = _MaskObserver(masks)

    def begin(module: nn.Module, inputs: Any) -> None:
        observer.__enter__()  # type: ignore[no-untyped-call]

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        observer.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # Around each call instead of the whole step: compiled code, which calls no hooks, must not see a mode either.
    with ExitStack() as hooks:
        for each in attentions:
            hooks.callback(each.register_forward_pre_hook(begin).remove)
            # always_call: recomputation in the backward pass ends with an exception once it has all it needs.
            hooks.callback(each.register_forward_hook(end, always_call=True).remove)
        yield masks
