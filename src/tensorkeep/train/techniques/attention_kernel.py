"""The attention kernel: one of torch's, held to it, where by itself torch takes whichever can."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.watching import seen_inputs

if TYPE_CHECKING:
    from tensorkeep.train.model.attention import Kernel
    from tensorkeep.train.run.state import Run

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NODES = {
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductFusedAttention": "flash",
    "ScaledDotProductCudnnAttention": "cudnn",
    "CompiledFunction": "flex",
    "Bmm": "math",
}
"""Which kernel left a node of that name in the graph of gradients."""

_PASSED = ("View", "UnsafeView", "Reshape", "Clone", "Transpose", "Permute", "ToCopy")
"""What does not compute: math gives back in 16 bits what it was given so, and computes in 32."""


class AttentionKernelSettings(Section, frozen=True):
    """Which one.

    Attributes
    ----------
    kernel : str
        ``"flash"``: FlashAttention-2, never holds the scores (on CUDA 16-bit only, from compute capability 8.0, which
        Turing has not; on a CPU without dropout); ``"efficient"``: xFormers' kernel, also in 32 bits, CUDA only;
        ``"cudnn"``: as flash, CUDA only; ``"flex"``: FlexAttention, compiled, CUDA only, without dropout; ``"math"``:
        matrix products and a softmax, the reference.
    """

    kernel: Literal["math", "efficient", "flash", "cudnn", "flex"] = "flash"


class AttentionKernel(Technique):
    """Only training is held to the kernel: generation with a cache has masks and shapes that not all can take."""

    name: ClassVar = "attention-kernel"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "computes attention with one kernel, and with no other"
    effect: ClassVar = "flash: memory linear in the context and several times the speed of math; torch often takes it"
    reference: ClassVar = "Dao, arXiv 2307.08691; torch.nn.attention"
    Settings: ClassVar = AttentionKernelSettings
    conflicts: ClassVar = {"sparse-attention": "both replace the kernel of attention"}

    def lacks(self, machine: Machine) -> str | None:
        """Say what device the kernel needs."""
        kernel = self.settings.kernel
        if kernel == "flex":
            # torch has its gradient for CUDA alone.
            return machine.lacks_cuda() or machine.lacks_compiler()
        if kernel in ("efficient", "cudnn") or (kernel == "flash" and machine.on_cuda):
            return machine.lacks_cuda(least=(5, 0) if kernel == "efficient" else (8, 0))
        return None

    def configure(self, config: Config) -> Config:
        """Refuse what the kernel cannot compute, as far as the configuration says it."""
        kernel, on_cuda = self.settings.kernel, chosen_device(config.loop.device).type == "cuda"
        if config.model.dropout and (kernel == "flex" or (kernel == "flash" and not on_cuda)):
            raise UsageError(
                f"the attention kernel {kernel!r} has no dropout{'' if on_cuda else ' on a CPU'}, and this model has",
                remedy='give model.dropout 0, or the kernel "math"',
            )
        if on_cuda and kernel in ("flash", "cudnn") and "mixed-precision" not in config.techniques:
            raise UsageError(
                f"the attention kernel {kernel!r} computes in 16 bits, and this run in 32",
                remedy='add the technique mixed-precision, or give the kernel "efficient"',
            )
        return config

    def apply(self, run: Run) -> None:
        """Give each block the kernel."""
        kernel = _flex() if self.settings.kernel == "flex" else _held_to(_BACKENDS[self.settings.kernel])
        for attention in run.model.attentions:
            attention.kernel = kernel

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See, in the graph of gradients, which kernel computed what each attention projects back."""
        proof = Proof()
        projections, wanted = [each.out for each in run.model.attentions], self.settings.kernel
        seen: Counter[str] = Counter()
        with (
            seen_inputs(projections, lambda module, attended: seen.update([_kernel_of(attended)])),
            self._reasons_said(),
        ):
            yield proof
        if set(seen) != {wanted}:
            found = ", ".join(f"{kernel} ({count})" for kernel, count in seen.items()) or "none"
            raise self.not_active(f"attention was computed by {found} instead of {wanted}", "leave it out")
        proof.is_that(f"{wanted} computed attention {seen[wanted]} times", kernel=wanted, times=seen[wanted])

    @contextmanager
    def _reasons_said(self) -> Iterator[None]:
        """Say why torch found no kernel, which it only warns of."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                yield
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                reasons = [str(each.message).partition("(Triggered")[0].strip() for each in said]
                raise self.not_active(
                    " ".join(["torch could not use it.", *dict.fromkeys(reasons)]), "give another kernel"
                ) from error
        for each in said:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _held_to(backend: SDPBackend) -> Kernel:
    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **how: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **how)
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(query, key, value, **how)

    return kernel


def _flex() -> Kernel:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, BlockMask] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **how: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **how)
        length = query.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(_sees, None, None, length, length, device=query.device)
        result: Tensor = compiled(query, key, value, block_mask=masks[length])
        return result

    return kernel


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _kernel_of(tensor: Tensor) -> str:
    """Return which kernel computed a tensor that has only been reshaped or cast since."""
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _PASSED:
        node = node.next_functions[0][0]
    name = "nothing" if node is None else node.name()
    return next((kernel for begin, kernel in _NODES.items() if name.startswith(begin)), name)
