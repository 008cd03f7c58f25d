"""One block of the transformer: attention and an MLP, each added to the residual stream."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.attention import Attention
from tensorkeep.train.model.cache import LayerCache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.document_mask import Mask
from tensorkeep.train.model.lora import build_linear
from tensorkeep.train.model.positions import Rotation
from tensorkeep.train.model.shift import TokenShift


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": _relu2,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
}


class MLP(nn.Module):
    """``down(activation(up(x)))``, or, for a gated activation, ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = build_linear(config, "mlp", config.d_model, config.mlp_width)
        self.gate = build_linear(config, "mlp", config.d_model, config.mlp_width) if config.gated else None
        self.down = build_linear(config, "mlp", config.mlp_width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP, of the shape of x."""
        up: Tensor = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        added: Tensor = self.dropout(self.down(hidden))
        return added


def build_norm(config: ModelConfig) -> nn.Module:
    """Return the norm of a configuration, over the last dimension of size d_model."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A pre-norm block: only the inputs of attention and MLP are normalised (Radford et al., 2019, GPT-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shifts = config.token_shift == "blocks"
        self.norm1 = build_norm(config)
        self.shift1 = TokenShift(config.d_model) if shifts else None
        self.attention = Attention(config)
        self.norm2 = build_norm(config)
        self.shift2 = TokenShift(config.d_model) if shifts else None
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Return the residual stream after this block, [batch, positions, d_model] like x; see `Attention`."""
        tails = None if past is None else past.tails
        normed = self.norm1(x)
        x = x + self.attention(normed if self.shift1 is None else self.shift1(normed, tails), rotation, past, mask)
        normed = self.norm2(x)
        after: Tensor = x + self.mlp(normed if self.shift2 is None else self.shift2(normed, tails))
        return after
