"""Attention kernel: training uses one chosen kernel of torch; without the technique torch chooses."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.model.attention import Kernel
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification
from tensorkeep.train.techniques.observe import observe_inputs
from tensorkeep.train.techniques.requirements import Machine

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_IN_16_BITS = ("flash", "cudnn")
"""Kernels that have no 32-bit version on CUDA."""

_NODES = {
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductFusedAttention": "flash",
    "ScaledDotProductCudnnAttention": "cudnn",
    "CompiledFunction": "flex",
    "Bmm": "math",
}
"""The kernel that leaves a node of that name in the autograd graph."""

_PASS_THROUGH_NODES = ("View", "UnsafeView", "Reshape", "Clone", "Transpose", "Permute", "ToCopy")
"""Nodes that do not compute. The kernel "math" computes in 32 bits, and casts its result to the dtype of its input."""


class AttentionKernelSettings(Section, frozen=True):
    """The kernel.

    Attributes
    ----------
    kernel : str
        ``"flash"``: FlashAttention-2, which never stores the scores (on CUDA from compute capability 8.0; on a CPU
        without dropout); ``"efficient"``: xFormers' kernel, CUDA only; ``"cudnn"``: like flash, CUDA only; ``"flex"``:
        FlexAttention, compiled, CUDA only, without dropout; ``"math"``: matmuls and a softmax, the reference. On CUDA,
        flash and cudnn compute in 16 bits only: without mixed-precision, in bfloat16, between layers that stay in
        float32.
    """

    kernel: Literal["math", "efficient", "flash", "cudnn", "flex"] = "flash"


class AttentionKernel(Technique):
    """Only training uses the kernel: generation with a cache has masks and shapes that not all kernels support."""

    name: ClassVar = "attention-kernel"
    kind: ClassVar = "systems"
    changes: ClassVar = "model"
    # On CUDA, flash and cudnn round queries, keys and values to bfloat16.
    tolerance: ClassVar = 5e-3
    summary: ClassVar = "computes attention with one chosen kernel, and raises an error if torch uses another"
    effect: ClassVar = (
        "flash: memory linear in the context and several times the speed of math; torch often chooses it already"
    )
    reference: ClassVar = "Dao, arXiv 2307.08691; torch.nn.attention"
    Settings: ClassVar = AttentionKernelSettings
    settings: AttentionKernelSettings

    _dtype: torch.dtype | None = None

    def lacks(self, machine: Machine) -> str | None:
        """Return what device the kernel needs."""
        kernel = self.settings.kernel
        if kernel == "flex":
            # torch implements its gradient for CUDA only.
            return machine.lacks_cuda() or machine.lacks_compiler()
        if kernel in ("efficient", "cudnn") or (kernel == "flash" and machine.on_cuda):
            return machine.lacks_cuda(least=(5, 0) if kernel == "efficient" else (8, 0))
        return None

    def configure(self, config: Config) -> Config:
        """Check that the kernel can compute with this configuration."""
        kernel, on_cuda = self.settings.kernel, chosen_device(config.loop.device).type == "cuda"
        if config.model.dropout and (kernel == "flex" or (kernel == "flash" and not on_cuda)):
            raise UsageError(
                f"the attention kernel {kernel!r} has no dropout{'' if on_cuda else ' on a CPU'}, and this model has",
                remedy='give model.dropout 0, or the kernel "math"',
            )
        mixed = config.techniques.get("mixed-precision")
        if on_cuda and kernel in _IN_16_BITS:
            if mixed is not None and mixed.get("attention") == "float32":
                raise UsageError(
                    f"the attention kernel {kernel!r} computes in 16 bits, and techniques.mixed-precision.attention is "
                    "'float32'",
                    remedy='give techniques.mixed-precision.attention "auto", or the kernel "efficient"',
                )
            if mixed is None:
                # Not float16: gradients would vanish without a scaled loss.
                self._dtype = torch.bfloat16
        return config

    def apply(self, run: Run) -> None:
        """Give each block the kernel."""
        name = self.settings.kernel
        kernel = _flex_kernel() if name == "flex" else _fixed_kernel(_BACKENDS[name], self._dtype)
        for attention in run.model.attentions:
            attention.kernel = kernel

    def verify(self, run: Run) -> Verification:
        """Read from the autograd graph which kernel computed the input of each output projection."""
        projections, requested = [each.out for each in run.model.attentions], self.settings.kernel
        kernels: Counter[str] = Counter()
        with (
            observe_inputs(projections, lambda module, attended: kernels.update([_kernel_of(attended)])),
            self._reasons_in_error(),
        ):
            yield
        if set(kernels) != {requested}:
            found = ", ".join(f"{kernel} ({count})" for kernel, count in kernels.items()) or "none"
            raise self.not_active(f"attention was computed by {found} instead of {requested}", "leave it out")
        count, precision = kernels[requested], "" if self._dtype is None else " in bfloat16"
        return Proof(f"{requested} computed attention {count} times{precision}", kernel=requested, times=count)

    @contextmanager
    def _reasons_in_error(self) -> Iterator[None]:
        """Put torch's warnings into the error, if it found no kernel: they have the reasons."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                    raise
                reasons = [str(each.message).partition("(Triggered")[0].strip() for each in caught]
                raise self.not_active(
                    " ".join(["torch could not use it.", *dict.fromkeys(reasons)]), "give another kernel"
                ) from error
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _fixed_kernel(backend: SDPBackend, dtype: torch.dtype | None) -> Kernel:
    """Return a kernel that computes in a dtype, and returns results in that of the query; None: the query's."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **options)
        with sdpa_kernel([backend]):
            if dtype is None:
                return scaled_dot_product_attention(query, key, value, **options)
            rounded = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), **options)
            return rounded.to(query.dtype)

    return kernel


def _flex_kernel() -> Kernel:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, BlockMask] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **options)
        length = query.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(_causal, None, None, length, length, device=query.device)
        result: Tensor = compiled(query, key, value, block_mask=masks[length])
        return result

    return kernel


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _kernel_of(tensor: Tensor) -> str:
    """Return the kernel that computed a tensor, which may have been reshaped or cast afterwards."""
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _PASS_THROUGH_NODES:
        node = node.next_functions[0][0]
    name = "nothing" if node is None else node.name()
    return next((kernel for begin, kernel in _NODES.items() if name.startswith(begin)), name)
