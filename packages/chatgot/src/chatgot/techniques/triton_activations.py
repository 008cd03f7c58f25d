"""Triton kernels for the activation of an MLP, forward and backward, each in one pass over memory.

Everything is computed in float32 and rounded once. Only the technique imports this module: it needs Triton.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

RELU2 = tl.constexpr(0)
SWIGLU = tl.constexpr(1)
# relu(gate) ** 2, silu(gate) * up, gelu(gate) * up.
KINDS = {"relu2": 0, "swiglu": 1, "geglu": 2}

_BLOCK = 1024


# tl.sigmoid is not a builtin, and Triton's interpreter runs only builtins.
@triton.jit  # type: ignore[untyped-decorator]
def _forward(gate, up, result, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    # In 64 bits: a large activation has more elements than 32 bits can number.
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offset < count
    x = tl.load(gate + offset, mask=valid, other=0.0).to(tl.float32)
    if KIND == RELU2:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    else:
        other = tl.load(up + offset, mask=valid, other=0.0).to(tl.float32)
        if KIND == SWIGLU:
            y = x / (1.0 + tl.exp(-x)) * other
        else:
            y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)) * other
    tl.store(result + offset, y.to(result.dtype.element_ty), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    gate,
    up,
    by_gate,
    by_up,
    count,
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offset < count
    g = tl.load(gradient + offset, mask=valid, other=0.0).to(tl.float32)
    x = tl.load(gate + offset, mask=valid, other=0.0).to(tl.float32)
    if KIND == RELU2:
        derivative = g * 2.0 * tl.maximum(x, 0.0)
    else:
        other = tl.load(up + offset, mask=valid, other=0.0).to(tl.float32)
        if KIND == SWIGLU:
            factor = 1.0 / (1.0 + tl.exp(-x))
            derivative = g * other * factor * (1.0 + x * (1.0 - factor))
        else:
            factor = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            derivative = g * other * (factor + x * density)
        tl.store(by_up + offset, (g * x * factor).to(by_up.dtype.element_ty), mask=valid)
    tl.store(by_gate + offset, derivative.to(by_gate.dtype.element_ty), mask=valid)


def activation(kind: str, gate: Tensor, up: Tensor | None, count_launch: Callable[[str], object]) -> Tensor:
    """Return the activation; ``count_launch`` gets ``"forward"`` or ``"backward"`` for each kernel that runs."""
    result: Tensor = _Activation.apply(KINDS[kind], gate, up, count_launch)  # type: ignore[no-untyped-call]
    return result


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: int, gate: Tensor, up: Tensor | None, count_launch: Callable[[str], object]) -> Tensor:
        # The kernel reads memory in order, whatever the strides.
        gate = gate.contiguous()
        # The kernel needs a second pointer even if it does not read from it.
        other = gate if up is None else up.contiguous()
        # The inputs only: the backward kernel computes the activation again.
        ctx.save_for_backward(gate, other)
        ctx.kind, ctx.count_launch = kind, count_launch
        result = torch.empty_like(gate)
        _launch(_forward, gate, other, result, kind=kind)
        count_launch("forward")
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        gate, other = ctx.saved_tensors
        by_gate = torch.empty_like(gate)
        by_other = None if ctx.kind == KINDS["relu2"] else torch.empty_like(other)
        # The kernel needs a pointer here too, and does not write to it for relu2.
        up_result = by_gate if by_other is None else by_other
        _launch(_backward, gradient.contiguous(), gate, other, by_gate, up_result, kind=ctx.kind)
        ctx.count_launch("backward")
        return None, by_gate, by_other, None


def _launch(kernel: Any, *tensors: Tensor, kind: int) -> None:
    count = tensors[0].numel()
    # Triton launches on the current device, which may not be the device of the tensors.
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[(triton.cdiv(count, _BLOCK),)](*tensors, count, KIND=kind, BLOCK=_BLOCK)
