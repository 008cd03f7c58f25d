"""Features of earlier positions that are added to each: the token shift and the causal convolution.

Both start as the identity. In a cache of generation they keep the last positions that they have seen.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Tails = dict[nn.Module, Tensor]
"""The last positions of the input of each such module, [batch, positions, channels], for its next call."""


class _AddEarlier(torch.autograd.Function):
    """Adds to each position of [batch, positions, channels] the one i + 1 before it, times the i-th of some taps.

    Autograd's own gradient of the same operations makes many copies, and takes twice as long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, *taps)
        result = x.clone()
        for lag, tap in enumerate(taps, start=1):
            result[:, lag:].addcmul_(x[:, :-lag], tap.to(x.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, *taps = ctx.saved_tensors
        of_x, of_taps = gradient.clone(), []
        for lag, tap in enumerate(taps, start=1):
            of_x[:, :-lag].addcmul_(gradient[:, lag:], tap.to(gradient.dtype))
            of_taps.append((gradient[:, lag:] * x[:, :-lag]).sum((0, 1), dtype=tap.dtype))
        return of_x, *of_taps


def _add_earlier(module: nn.Module, x: Tensor, taps: Sequence[Tensor], tails: Tails | None) -> Tensor:
    """Add earlier positions, which are 0 before the first; with tails, those of former calls, and update the tails."""
    if tails is None:
        added: Tensor = _AddEarlier.apply(x, *taps)  # type: ignore[no-untyped-call]
        return added
    first = tails.get(module)
    if first is None:
        first = torch.zeros_like(x[:, :1]).expand(-1, len(taps), -1)
    whole = torch.cat((first, x), dim=1)
    tails[module] = whole[:, -len(taps) :]
    added = _AddEarlier.apply(whole, *taps)  # type: ignore[no-untyped-call]
    return added[:, len(taps) :]


class TokenShift(nn.Module):
    """Adds a learned fraction of the previous position to each, channel by channel; initially 0.

    RWKV shifts the input of every layer this way (Peng et al., arXiv 2305.13048).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, tails: Tails | None = None) -> Tensor:
        """Return the shifted features, [batch, positions, channels] like x."""
        return _add_earlier(self, x, [self.share], tails)


class CausalConvolution(nn.Module):
    """A causal convolution of each channel by itself, as Primer has it (So et al., arXiv 2109.08668).

    ``taps[i]`` has the factors of the position i + 1 before, initially 0. The position itself has no factor: the
    projection before the convolution has one.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.taps = nn.ParameterList(torch.empty(channels) for _ in range(width - 1))

    def forward(self, x: Tensor, tails: Tails | None = None) -> Tensor:
        """Return the convolved features, [batch, positions, channels] like x."""
        return _add_earlier(self, x, list(self.taps), tails)
