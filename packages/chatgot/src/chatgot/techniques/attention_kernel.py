"""Attention kernel: training uses one chosen kernel of torch; without the technique torch chooses."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from chatgot.model.attention import AttentionFunction, attend_within
from chatgot.step.device import chosen_device
from chatgot.techniques.base import Config, Machine, MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import observe_inputs
from tensorkeep.errors import UsageError

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    # While it is activated, it replaces torch's own flash.
    "fa3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# Kernels without a 32-bit version on CUDA.
_IN_16_BITS = ("flash", "fa3", "cudnn")

_FA3_OPERATOR = "flash_attn_3::fwd"
# The first version of torch with a gradient of FlashAttention-3.
_FA3_TORCH = (2, 13)
_FA3_WHEELS = "https://download.pytorch.org/whl/flash-attn-3/"

_AMPERE, _HOPPER = (8, 0), (9, 0)
# The largest head size that the 16-bit kernels and their gradients support on every GPU.
_LARGEST_HEAD = 128
# All kernels but math need head sizes that are multiples of this.
_ALIGNED = 8

# The kernel by the beginning of the name of its node in the autograd graph.
_NODES = {
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductFusedAttention": "flash",
    "ScaledDotProductCudnnAttention": "cudnn",
    "CompiledFunction": "flex",
    "_MatmulAttention": "matmul",
    "Bmm": "math",
}

_FA3_ERROR = "FA3 "
# Parts of torch's errors when no kernel takes the inputs. The error of FlashAttention-3 has the reason.
_NO_KERNEL = ("No available kernel", "No viable backend", _FA3_ERROR)
# Nodes that do not compute: "math" computes in 32 bits and casts its result; torch pads heads for flash.
_PASS_THROUGH_NODES = ("View", "UnsafeView", "Reshape", "Clone", "Transpose", "Permute", "ToCopy", "Slice")

_Kernel = Literal["auto", "math", "matmul", "efficient", "flash", "fa3", "cudnn", "flex"]


class AttentionKernelSettings(Section, frozen=True):
    """The kernel."""

    # "flash": FlashAttention-2, which never stores the scores (on CUDA from compute capability 8.0; on a CPU without
    # dropout); "fa3": FlashAttention-3 of the package flash-attn-3, on Hopper only (compute capability 9.0), without
    # dropout; "efficient": xFormers' kernel, CUDA only; "cudnn": like flash, CUDA only; "flex": FlexAttention,
    # compiled, CUDA only, without dropout; "math": matmuls and a softmax, the reference; "matmul": math with a gradient
    # of its own and 32-bit scores, without dropout, which takes about half the time of flash in bfloat16 on a CPU for
    # contexts up to a few hundred tokens; "auto": on CUDA with 16-bit attention, fa3 if it is installed, else cudnn
    # from Hopper on, else flash, and efficient in other cases; on a CPU, flash; and math where no other kernel can
    # compute. The choice is stored with the run. On CUDA, flash, fa3 and cudnn compute in 16 bits only: without
    # mixed-precision, in bfloat16 between float32 layers.
    kernel: _Kernel = "flash"


class AttentionKernel(Technique):
    """Only training uses the kernel: generation with a cache has masks and shapes that not all kernels support."""

    name: ClassVar = "attention-kernel"
    aliases: ClassVar = ("flash-attention", "flash-attention-2", "flash-attn", "fa2", "sdpa", "xformers")
    changes: ClassVar = "model"
    # On CUDA, flash, fa3 and cudnn round queries, keys and values to bfloat16.
    tolerance: ClassVar = 5e-3
    summary: ClassVar = "computes attention with one chosen kernel, and raises an error if torch uses another"
    effect: ClassVar = (
        "flash: memory linear in the context and several times the speed of math; torch often chooses it already"
    )
    reference: ClassVar = "Dao, arXiv 2307.08691; torch.nn.attention"
    refuses_document_masks: ClassVar = "masked documents need a kernel that takes a mask, which is chosen by the device"
    settings: AttentionKernelSettings

    _dtype: torch.dtype | None = None

    def missing(self, machine: Machine) -> str | None:
        kernel = self.settings.kernel
        if kernel == "fa3":
            return _missing_fa3(machine)
        if kernel == "flex":
            # torch implements its gradient for CUDA only.
            return machine.missing_cuda() or machine.missing_compiler()
        if kernel in ("efficient", "cudnn") or (kernel == "flash" and machine.on_cuda):
            return machine.missing_cuda(least=(5, 0) if kernel == "efficient" else _AMPERE)
        return None

    def configure(self, config: Config) -> Config:
        """Check that the kernel can compute with this configuration; choose one for ``"auto"``, and store it."""
        device = chosen_device(config.loop.device)
        mixed = config.techniques.get("mixed-precision")
        if self.settings.kernel == "auto":
            self.settings = AttentionKernelSettings(kernel=_best_kernel(Machine(device), config))
            # Stored, because a resumed run must not choose another kernel.
            config = config.changed({f"techniques.{self.name}": {"kernel": self.settings.kernel}})
        kernel, on_cuda = self.settings.kernel, device.type == "cuda"
        if config.model.dropout and (kernel in ("flex", "fa3", "matmul") or (kernel == "flash" and not on_cuda)):
            where = " on a CPU" if kernel == "flash" else ""
            raise UsageError(
                f"the attention kernel {kernel!r} has no dropout{where}, and this model has",
                remedy='give model.dropout 0, or the kernel "math"',
            )
        if kernel == "matmul" and "compile" in config.techniques:
            raise UsageError(
                "the attention kernel 'matmul' cannot be seen in compiled code",
                remedy='leave out compile, or give the kernel "math", which is compiled',
            )
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

    @contextmanager
    def process(self) -> Iterator[None]:
        if self.settings.kernel != "fa3":
            yield
            return
        # FlashAttention-3 replaces torch's own in the whole process, so it is restored at the end.
        torch_attention.activate_flash_attention_impl("FA3")
        try:
            yield
        finally:
            torch_attention.restore_flash_attention_impl()

    def apply(self, run: StepState) -> None:
        name = self.settings.kernel
        if name == "matmul":
            kernel: AttentionFunction = matmul_attention
        else:
            kernel = _flex_kernel() if name == "flex" else _fixed_kernel(_BACKENDS[name], self._dtype)
        for attention in run.model.attentions:
            attention.kernel = kernel

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.attention_kernel = self.settings.kernel

    def verify(self, run: StepState) -> Verification:
        projections, requested = [each.out for each in run.model.attentions], self.settings.kernel
        # In the graph, fa3 looks like the kernel that it replaces.
        expected, kernels = "flash" if requested == "fa3" else requested, Counter[str]()
        with (
            observe_inputs(projections, lambda module, attended: kernels.update([_kernel_of(attended)])),
            self._reasons_in_error(),
            # The profiler also sees operators that other operators call.
            profile(activities=[ProfilerActivity.CPU]) if requested == "fa3" else nullcontext() as profiler,
        ):
            yield
        count = kernels[expected]
        of_fa3 = count if profiler is None else sum(each.name == _FA3_OPERATOR for each in profiler.events())
        if set(kernels) == {expected} and of_fa3 < count:
            raise self.not_active(f"of {count} calls of attention, FlashAttention-3 computed {of_fa3}", "leave it out")
        if set(kernels) != {expected}:
            found = ", ".join(f"{kernel} ({count})" for kernel, count in kernels.items()) or "none"
            raise self.not_active(f"attention was computed by {found} instead of {requested}", "leave it out")
        precision = "" if self._dtype is None else " in bfloat16"
        return Proof(f"{requested} computed attention {count} times{precision}", kernel=requested, times=count)

    @contextmanager
    def _reasons_in_error(self) -> Iterator[None]:
        # torch gives the reasons why no kernel fits as warnings, and its error does not repeat them.
        with warnings.catch_warnings(record=True) as caught:
            # Only UserWarning: they are given again without their module, and filters of other kinds go by module.
            warnings.simplefilter("always", UserWarning)
            try:
                yield
            except RuntimeError as error:
                if not any(each in str(error) for each in _NO_KERNEL):
                    raise
                reasons = [str(each.message).partition("(Triggered")[0].strip() for each in caught]
                reasons += [str(error)] if _FA3_ERROR in str(error) else []
                raise self.not_active(
                    " ".join(["torch could not use it.", *dict.fromkeys(reasons)]), "give another kernel"
                ) from error
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _missing_fa3(machine: Machine) -> str | None:
    lack = machine.missing_cuda(least=_HOPPER)
    if lack is not None:
        return lack
    if machine.capability >= (10, 0):
        return f"computes with fa3 on compute capability 9.0 only; this GPU has {machine.capability[0]}.0"
    if tuple(int(each) for each in torch.__version__.split(".")[:2]) < _FA3_TORCH:
        return f"needs torch 2.13 for fa3; torch is {torch.__version__}"
    return machine.missing_package("flash_attn_interface", install=f"flash-attn-3 --find-links {_FA3_WHEELS}")


def _best_kernel(machine: Machine, config: Config) -> _Kernel:
    if not machine.on_cuda:
        return "math" if config.model.dropout else "flash"
    size, mixed = config.model.head_size, config.techniques.get("mixed-precision")
    if size % _ALIGNED:
        return "math"
    in_16_bits = mixed is not None and mixed.get("attention") != "float32"
    if not in_16_bits or size > _LARGEST_HEAD or machine.capability < _AMPERE:
        return "efficient"
    if machine.capability < _HOPPER or torch.version.hip is not None:
        return "flash"
    return "fa3" if _missing_fa3(machine) is None and not config.model.dropout else "cudnn"


def _fixed_kernel(backend: SDPBackend, dtype: torch.dtype | None) -> AttentionFunction:
    """Return a kernel that computes in a dtype (None: the query's) and returns the query's dtype."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        # Without gradients torch chooses: generation has masks and shapes that not all kernels support.
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **options)
        with sdpa_kernel([backend]):
            if dtype is None:
                return scaled_dot_product_attention(query, key, value, **options)
            rounded = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), **options)
            return rounded.to(query.dtype)

    return kernel


def _flex_kernel() -> AttentionFunction:
    masks: dict[int, BlockMask] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scaled_dot_product_attention(query, key, value, **options)
        length = query.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(_causal, None, None, length, length, device=query.device)
        return attend_within(query, key, value, masks[length])

    return kernel


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _kernel_of(tensor: Tensor) -> str:
    """Return the kernel that computed a tensor, also if the result was reshaped or cast."""
    node = tensor.grad_fn
    # Follow the graph back through nodes that do not compute.
    while node is not None and node.name().removesuffix("Backward0") in _PASS_THROUGH_NODES:
        node = node.next_functions[0][0]
    name = "nothing" if node is None else node.name()
    return next((kernel for begin, kernel in _NODES.items() if name.startswith(begin)), name)


class _MatmulAttention(torch.autograd.Function):
    """Attention by batched matmuls, [batch * heads, positions, head size]; a mask is added to the scores."""

    # Scores have at least 32 bits: in 16 bits, training reaches a higher loss. The probabilities, which are kept for
    # the gradient, and later results have the dtype of the queries.

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.scale = query.shape[-1] ** -0.5
        # Under autocast, baddbmm would multiply in 16 bits.
        with torch.autocast(query.device.type, enabled=False):
            scores = torch.baddbmm(mask, query.to(mask.dtype), key.to(mask.dtype).mT, alpha=ctx.scale)
        weights = scores.softmax(-1).to(query.dtype)
        ctx.save_for_backward(query, key, value, weights)
        return torch.bmm(weights, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        by_value = torch.bmm(weights.mT, gradient)
        # The gradient of a softmax needs its result only, so the scores are not kept.
        by_scores = torch._softmax_backward_data(torch.bmm(gradient, value.mT), weights, -1, weights.dtype)
        by_scores *= ctx.scale
        return torch.bmm(by_scores, key), torch.bmm(by_scores.mT, query), by_value, None


def matmul_attention(
    query: Tensor, key: Tensor, value: Tensor, /, *, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    if not torch.is_grad_enabled():
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = _causal_mask(query.shape[-2], wide, query.device) if is_causal else query.new_zeros((), dtype=wide)
    if attn_mask is not None:
        mask = torch.where(attn_mask, mask, -torch.inf).expand(*query.shape[:-1], key.shape[-2]).flatten(0, 1)
    result: Tensor = _MatmulAttention.apply(  # type: ignore[no-untyped-call]
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), mask
    )
    return result.view(query.shape)


@lru_cache(maxsize=2)
def _causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Added to the scores, so that no position attends to a later one.
    return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu(1)
