"""One block of the transformer: attention and an MLP, each added to the residual stream."""

from torch import Tensor, nn

from tensorkeep.train.model.attention import Attention
from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.mlp import MLP
from tensorkeep.train.model.positions import Rotation


def build_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of a configuration, over the last dimension of size d_model."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A pre-norm block: only the inputs of attention and MLP are normalised (Radford et al., 2019, GPT-2).

    Attributes
    ----------
    norm1, norm2 : nn.Module
        Before the attention and before the MLP.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = build_norm(config)
        self.attention = Attention(config)
        self.norm2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None) -> Tensor:
        """Return the residual stream after this block, [batch, positions, d_model] like x; see `Attention`."""
        x = x + self.attention(self.norm1(x), rotation, past)
        after: Tensor = x + self.mlp(self.norm2(x))
        return after
