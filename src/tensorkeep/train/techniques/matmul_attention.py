"""Attention by batched matmuls, with a gradient of its own: for short contexts on a CPU."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class _MatmulAttention(torch.autograd.Function):
    """Attention of [batch * heads, positions, head size]; a mask is added to the scores.

    The scores have at least 32 bits: in 16 bits, training reaches a higher loss. The probabilities, which are kept for
    the gradient, and everything after them have the dtype of the queries.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.scale = query.shape[-1] ** -0.5
        # Autocast would multiply in 16 bits.
        with torch.autocast(query.device.type, enabled=False):
            scores = torch.baddbmm(mask, query.to(mask.dtype), key.to(mask.dtype).mT, alpha=ctx.scale)
        shares = scores.softmax(-1).to(query.dtype)
        ctx.save_for_backward(query, key, value, shares)
        return torch.bmm(shares, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares = ctx.saved_tensors
        of_value = torch.bmm(shares.mT, gradient)
        of_scores = torch._softmax_backward_data(torch.bmm(gradient, value.mT), shares, -1, shares.dtype)
        of_scores *= ctx.scale
        return torch.bmm(of_scores, key), torch.bmm(of_scores.mT, query), of_value, None


def matmul_attention(
    query: Tensor, key: Tensor, value: Tensor, /, *, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Compute attention without dropout; see `tensorkeep.train.model.attention.Kernel`."""
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
    """Return what is added to scores so that no position attends to a later one."""
    return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu(1)
