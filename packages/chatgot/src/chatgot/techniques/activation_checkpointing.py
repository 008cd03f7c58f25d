"""Activation checkpointing: the activations of blocks are recomputed in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from chatgot.model.gpt import TransformerBlock
from chatgot.settings import Count
from chatgot.techniques.base import MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import count_calls

# Operators with results that a selective checkpoint keeps: matmuls take most of the time.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class CheckpointingSettings(Section, frozen=True):
    """How much is recomputed."""

    # "nothing": only the input of a block is kept. "matmuls": the results of matmuls and attention are kept too, so
    # that only cheap operations are recomputed.
    keep: Literal["nothing", "matmuls"] = "nothing"
    # 1 for each block, 2 for every second one, and so on.
    every: Count = 1


class ActivationCheckpointing(Technique):
    """Chen et al., arXiv 1604.06174. Dropout draws the same numbers again, so gradients are bit-identical."""

    name: ClassVar = "activation-checkpointing"
    aliases: ClassVar = ("gradient-checkpointing", "checkpointing", "recomputation", "checkpoint-wrapper")
    changes: ClassVar = "model"
    summary: ClassVar = "keeps only the inputs of blocks for the backward pass, and recomputes the rest"
    effect: ClassVar = "activations take a fraction of the memory, steps 20 to 30% more time"
    reference: ClassVar = "arXiv 1604.06174; torch.utils.checkpoint"
    predicts_memory: ClassVar = True
    settings: CheckpointingSettings

    def apply(self, run: StepState) -> None:
        for block in self._blocks(run):
            block.forward = _checkpointed(block.forward, keep=self.settings.keep)  # type: ignore[method-assign]

    def _blocks(self, run: StepState) -> list[TransformerBlock]:
        return cast("list[TransformerBlock]", list(run.model.blocks))[:: self.settings.every]

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.checkpoint_every, effects.keeps_matmuls = self.settings.every, self.settings.keep == "matmuls"

    def verify(self, run: StepState) -> Verification:
        blocks = self._blocks(run)
        expected = 2 * run.config.loop.gradient_accumulation_steps
        # The first norm runs once in each forward pass of a block: two for a batch, or the block was not recomputed.
        with count_calls(block.norm1 for block in blocks) as calls:
            yield
        others = [number for number, block in enumerate(blocks) if calls[block.norm1] != expected]
        if others:
            raise self.not_active(
                f"of {len(blocks)} checkpointed blocks, numbers {', '.join(map(str, others))} ran "
                f"{calls[blocks[others[0]].norm1]} times instead of {expected}"
            )
        return Proof(f"{len(blocks)} blocks were recomputed in the backward pass", blocks=len(blocks), runs=expected)


def _checkpointed(forward: Callable[..., Tensor], *, keep: str) -> Callable[..., Tensor]:
    # The non-reentrant kind supports selective checkpoints, hooks, and inputs that need no gradient.
    options: dict[str, Any] = {"use_reentrant": False}
    if keep == "matmuls":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)

    def checkpointed_forward(*inputs: Any) -> Tensor:
        # An evaluation has no backward pass to save memory for.
        if not torch.is_grad_enabled():
            return forward(*inputs)
        result: Tensor = checkpoint(forward, *inputs, **options)
        return result

    return checkpointed_forward
