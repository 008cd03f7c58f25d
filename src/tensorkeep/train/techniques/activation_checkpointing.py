"""Activation checkpointing: what blocks computed on the way forward is computed again on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.watching import counted_calls

if TYPE_CHECKING:
    from tensorkeep.train.model.block import Block
    from tensorkeep.train.run.state import Run

_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""What a selective checkpoint keeps: products, which take the most time to compute for the memory of their result."""


class CheckpointingSettings(Section, frozen=True):
    """How much is computed again.

    Attributes
    ----------
    keep : str
        ``"nothing"``: only the input of a block is kept. ``"products"``: the results of matrix products and attention,
        too, so that only what is cheap is computed again.
    every : int
        1 for each block, 2 for every second one, and so on.
    """

    keep: Literal["nothing", "products"] = "nothing"
    every: int = 1

    def __post_init__(self) -> None:
        check_bounds("every", self.every, least=1)


class ActivationCheckpointing(Technique):
    """Chen et al., arXiv 1604.06174. Dropout draws the same numbers again, so that gradients are the same bits."""

    name: ClassVar = "activation-checkpointing"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    summary: ClassVar = "keeps only the inputs of blocks for the backward pass, and computes the rest again"
    effect: ClassVar = "activations take a fraction of the memory, steps 20 to 30% more time"
    reference: ClassVar = "arXiv 1604.06174; torch.utils.checkpoint"
    Settings: ClassVar = CheckpointingSettings

    def apply(self, run: Run) -> None:
        """Wrap the forward of the blocks."""
        for block in self._blocks(run):
            block.forward = _checkpointed(block.forward, keep=self.settings.keep)  # type: ignore[method-assign]

    def _blocks(self, run: Run) -> list[Block]:
        return cast("list[Block]", list(run.model.blocks))[:: self.settings.every]

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count how often blocks run: twice for each batch, or they were not computed again."""
        proof = Proof()
        blocks = self._blocks(run)
        wanted = 2 * run.config.loop.accumulate
        with counted_calls(block.norm1 for block in blocks) as calls:
            yield proof
        once = [number for number, block in enumerate(blocks) if calls[block.norm1] != wanted]
        if once:
            raise self.not_active(
                f"of {len(blocks)} blocks, those of number {', '.join(map(str, once))} ran "
                f"{calls[blocks[once[0]].norm1]} times instead of {wanted}",
                "report it, with the other techniques that are on",
            )
        proof.is_that(f"each of {len(blocks)} blocks ran again on the way back", blocks=len(blocks), runs=wanted)


def _checkpointed(forward: Callable[..., Tensor], *, keep: str) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"use_reentrant": False}
    if keep == "products":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)

    def run_checkpointed(*inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        result: Tensor = checkpoint(forward, *inputs, **options)
        return result

    return run_checkpointed


def _keep_products(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
