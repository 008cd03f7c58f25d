"""Triton kernels for activations of an MLP, forward and backward, each in one pass over memory.

This module needs Triton; nothing imports it before the technique is on. All are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

RELU2 = tl.constexpr(0)
SWIGLU = tl.constexpr(1)
KINDS = {"relu2": 0, "swiglu": 1, "geglu": 2}

_BLOCK = 1024


# tl.sigmoid is no builtin, and Triton's interpreter runs nothing else.
@triton.jit  # type: ignore[untyped-decorator]
def _forward(gate, up, result, count, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if KIND == RELU2:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    else:
        other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        if KIND == SWIGLU:
            y = x / (1.0 + tl.exp(-x)) * other
        else:
            y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)) * other
    tl.store(result + place, y.to(result.dtype.element_ty), mask=inside)


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
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if KIND == RELU2:
        slope = g * 2.0 * tl.maximum(x, 0.0)
    else:
        other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        if KIND == SWIGLU:
            share = 1.0 / (1.0 + tl.exp(-x))
            slope = g * other * share * (1.0 + x * (1.0 - share))
        else:
            share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            slope = g * other * (share + x * density)
        tl.store(by_up + place, (g * x * share).to(by_up.dtype.element_ty), mask=inside)
    tl.store(by_gate + place, slope.to(by_gate.dtype.element_ty), mask=inside)


def activation(kind: str, gate: Tensor, up: Tensor | None, launched: Callable[[str], object]) -> Tensor:
    """Return ``relu(gate) ** 2``, or ``silu(gate) * up``, or ``gelu(gate) * up``.

    Parameters
    ----------
    kind : str
        ``"relu2"``, which takes no ``up``, ``"swiglu"`` or ``"geglu"``.
    gate, up : Tensor
        Of one shape and dtype.
    launched : callable
        Told of each kernel that runs: ``"forward"`` or ``"backward"``.
    """
    result: Tensor = _Activation.apply(KINDS[kind], gate, up, launched)  # type: ignore[no-untyped-call]
    return result


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: int, gate: Tensor, up: Tensor | None, launched: Callable[[str], object]) -> Tensor:
        gate = gate.contiguous()
        # A kernel that does not read it still wants a place.
        other = gate if up is None else up.contiguous()
        ctx.save_for_backward(gate, other)
        ctx.kind, ctx.launched = kind, launched
        result = torch.empty_like(gate)
        _launch(_forward, gate, other, result, kind=kind)
        launched("forward")
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        gate, other = ctx.saved_tensors
        by_gate = torch.empty_like(gate)
        by_other = None if ctx.kind == KINDS["relu2"] else torch.empty_like(other)
        place = by_gate if by_other is None else by_other
        _launch(_backward, gradient.contiguous(), gate, other, by_gate, place, kind=ctx.kind)
        ctx.launched("backward")
        return None, by_gate, by_other, None


def _launch(kernel: Any, *tensors: Tensor, kind: int) -> None:
    count = tensors[0].numel()
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[(triton.cdiv(count, _BLOCK),)](*tensors, count, KIND=kind, BLOCK=_BLOCK)
