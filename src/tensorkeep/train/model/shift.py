"""Features of earlier positions that are added to each: the token shift and the causal convolution.

Both start as the identity. In a cache of generation they keep the last positions that they have seen.
"""

import torch
from torch import Tensor, nn

Tails = dict[nn.Module, Tensor]
"""The last positions of the input of each such module, [batch, positions, channels], for its next call."""


def _with_earlier(module: nn.Module, x: Tensor, count: int, tails: Tails | None) -> Tensor:
    """Return x with the ``count`` positions before it in front, which are 0 before the first; update the tails."""
    first = None if tails is None else tails.get(module)
    if first is None:
        first = torch.zeros_like(x[:, :1]).expand(-1, count, -1)
    whole = torch.cat((first, x), dim=1)
    if tails is not None:
        tails[module] = whole[:, -count:]
    return whole


class TokenShift(nn.Module):
    """Adds a learned fraction of the previous position to each, channel by channel; initially 0.

    RWKV shifts the input of every layer this way (Peng et al., arXiv 2305.13048).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, tails: Tails | None = None) -> Tensor:
        """Return the shifted features, [batch, positions, channels] like x."""
        before = _with_earlier(self, x, 1, tails)[:, :-1]
        return torch.addcmul(x, before, self.share.to(x.dtype))


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
        length, count = x.shape[1], len(self.taps)
        whole = _with_earlier(self, x, count, tails)
        for number, tap in enumerate(self.taps, start=1):
            x = torch.addcmul(x, whole[:, count - number : count - number + length], tap.to(x.dtype))
        return x
