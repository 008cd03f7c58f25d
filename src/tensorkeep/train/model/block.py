"""One block of the transformer: attention, then an MLP, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from tensorkeep.train.model.attention import Attention
from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.mlp import MLP
from tensorkeep.train.model.norms import build_norm
from tensorkeep.train.model.positions import Rotation


class Block(nn.Module):
    """A pre-norm block: the stream itself is never normalised (Radford et al., 2019, GPT-2).

    Attributes
    ----------
    norm1, norm2 : nn.Module
        Before the attention and before the MLP.
    attention : Attention
    mlp : MLP
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = build_norm(config)
        self.attention = Attention(config)
        self.norm2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None) -> Tensor:
        """Return the stream after this block, of the shape of x, [batch, positions, d_model]; see `Attention`."""
        x = x + self.attention(self.norm1(x), rotation, past)
        after: Tensor = x + self.mlp(self.norm2(x))
        return after
