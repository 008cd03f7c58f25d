"""Each token's embedding with a share of the one before, so that the first block sees pairs already."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.config import ModelConfig


class TokenShift(nn.Module):
    """Adds a learned share of the embedding of the token before to each, channel by channel; at first none.

    RWKV shifts the input of every layer so (Peng et al., arXiv 2305.13048); here it is that of the first one.

    Attributes
    ----------
    share : nn.Parameter
        Of shape [d_model].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(config.d_model))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the embeddings with their shares, of the shape of x, [batch, positions, d_model].

        Parameters
        ----------
        x : Tensor
        cache : Cache, optional
            Has the embedding of the last token before these, and is given that of the last of these.
        """
        first = torch.zeros_like(x[:, :1]) if cache is None or cache.embedded is None else cache.embedded
        if cache is not None:
            cache.embedded = x[:, -1:]
        return torch.addcmul(x, torch.cat((first, x[:, :-1]), dim=1), self.share)
