"""Dynamic sparse attention: each position looks at its own block and at those earlier ones that promise most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class SparseAttentionSettings(Section, frozen=True):
    """How much is looked at.

    Attributes
    ----------
    block : int
        Positions in a block of keys.
    keep : int
        Blocks that each position looks at: its own and ``keep - 1`` before it.
    """

    block: int = 64
    keep: int = 4

    def __post_init__(self) -> None:
        check_bounds("block", self.block, least=1)
        check_bounds("keep", self.keep, least=1)


class SparseAttention(Technique):
    """Lu et al., arXiv 2502.13189 (MoBA): blocks are ranked by the product of the query and the mean of their keys.

    Each query ranks for itself and among whole blocks before its own, so that no choice depends on what comes later,
    and generation with a cache chooses as training does. The weights are those of full attention: a model that is
    opened elsewhere attends to everything.
    """

    name: ClassVar = "sparse-attention"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "lets each position look at its own block and the best few blocks before it"
    effect: ClassVar = (
        "slower than full attention below a context of about 8,192, as a mask is applied: it tells what quality is left"
    )
    reference: ClassVar = "arXiv 2502.13189"
    Settings: ClassVar = SparseAttentionSettings
    conflicts: ClassVar = {
        "attention-kernel": "each puts another kernel in place of the model's",
        "progressive-length": "short windows have no blocks to leave out, so that nothing would show that it is on",
    }

    def configure(self, config: Config) -> Config:
        """Check that there is something to leave out.

        Raises
        ------
        UsageError
            If the blocks that are kept are all there are.
        """
        kept, length = self.settings.block * self.settings.keep, config.model.context_length
        if kept >= length:
            raise UsageError(
                f"{self.settings.keep} blocks of {self.settings.block} are all of a context of {length}",
                remedy="give fewer or smaller ones (techniques.sparse-attention.keep and .block)",
            )
        return config

    def apply(self, run: Run) -> None:
        """Replace the kernel of each block."""
        for attention in run.model.attentions:
            attention.kernel = TopBlocks(self.settings.block, self.settings.keep)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count what the masks of attention let through: exactly what the settings say."""
        proof = Proof()
        length = run.config.model.context_length
        attentions = run.model.attentions
        with _watched(attentions) as masks:
            yield proof
        wanted = pairs_kept(length, self.settings.block, self.settings.keep)
        other = sum(pairs is None or int(pairs) != wanted * heads for pairs, heads in masks.seen)
        if other or len(masks.seen) < len(attentions):
            raise self.not_active(
                f"of {len(masks.seen)} attentions in {len(attentions)} blocks of the model, {other} looked elsewhere "
                f"than at {self._choice}",
                "report it, with the other techniques that are on",
            )
        density = wanted / (length * (length + 1) / 2)
        proof.is_that(
            f"{len(masks.seen)} attentions looked at {density:.1%} of what is before a position, {self._choice}",
            attentions=len(masks.seen),
            density=density,
        )

    @property
    def _choice(self) -> str:
        return f"{self.settings.keep} blocks of {self.settings.block}"


class TopBlocks:
    """A kernel of attention, see `tensorkeep.train.model.attention.Kernel`; causal throughout.

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
        seen = self.visible(query, key)
        if attn_mask is not None:
            seen &= attn_mask
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout_p)

    @torch.no_grad()
    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return where each query looks: bool, of shape [batch, heads, queries, keys].

        Parameters
        ----------
        query, key : Tensor
            Of shape [batch, heads, positions, head size]; the queries are those of the last positions.
        """
        queries, keys = query.shape[-2], key.shape[-2]
        place = torch.arange(keys, device=key.device)
        own_place = place[keys - queries :].unsqueeze(-1)
        own_block, blocks = own_place // self.block, place // self.block
        whole = keys // self.block
        means = key[..., : whole * self.block, :].unflatten(-2, (whole, self.block)).mean(-2)  # type: ignore[no-untyped-call]
        earlier = torch.arange(whole, device=key.device) < own_block
        scores = (query @ means.transpose(-2, -1)).masked_fill(~earlier, -torch.inf)
        best = scores.topk(min(self.keep - 1, whole), dim=-1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & earlier
        # The last block may be part of one; it is seen from within only.
        kept = functional.pad(kept, (0, -(-keys // self.block) - whole))
        return (kept[..., blocks] | (blocks == own_block)) & (place <= own_place)


def pairs_kept(length: int, block: int, keep: int) -> int:
    """Return how many pairs of a query and a key are looked at in a window."""
    return sum(place % block + 1 + min(keep - 1, place // block) * block for place in range(length))


class _Masks(TorchFunctionMode):
    """Notes of each attention within how many pairs its mask lets through, and how many windows times heads it has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor | None, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = options.get("attn_mask")
            self.seen.append((None if mask is None else mask.sum(), args[0].shape[0] * args[0].shape[1]))
        return func(*args, **options)


@contextmanager
def _watched(attentions: Iterable[nn.Module]) -> Iterator[_Masks]:
    """Note, within, the masks of these modules."""
    masks = _Masks()

    def begin(module: nn.Module, inputs: Any) -> None:
        masks.__enter__()  # type: ignore[no-untyped-call]

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        masks.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # Around each call and not the whole step: compiled code, which calls no hooks, is to see no mode either.
    with ExitStack() as hooks:
        for each in attentions:
            hooks.callback(each.register_forward_pre_hook(begin).remove)
            # Always: what is computed again on the way back ends by an exception as soon as there is enough of it.
            hooks.callback(each.register_forward_hook(end, always_call=True).remove)
        yield masks
