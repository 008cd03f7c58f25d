"""Token shift: adds a learned fraction of the previous token's embedding to each embedding."""

import torch
from torch import Tensor, nn

from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.config import ModelConfig


class TokenShift(nn.Module):
    """Adds a learned fraction of the previous token's embedding to each, channel by channel; initially 0.

    RWKV shifts the input of every layer this way (Peng et al., arXiv 2305.13048); here only that of the first layer.

    Attributes
    ----------
    share : nn.Parameter
        Of shape [d_model].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(config.d_model))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the shifted embeddings, [batch, positions, d_model] like x.

        Parameters
        ----------
        cache : Cache, optional
            Holds the embedding of the token before these; updated to that of the last of these.
        """
        first = torch.zeros_like(x[:, :1]) if cache is None or cache.embedded is None else cache.embedded
        if cache is not None:
            cache.embedded = x[:, -1:]
        return torch.addcmul(x, torch.cat((first, x[:, :-1]), dim=1), self.share)
