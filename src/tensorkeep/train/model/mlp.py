"""The multi-layer perceptron (MLP) of a block, with or without a gate."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.config import ModelConfig


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
    """``down(activation(up(x)))``, or, for a gated activation, ``down(activation(gate(x)) * up(x))``.

    Attributes
    ----------
    up, down : nn.Linear
        From d_model to the hidden width, and back.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp_width, bias=config.bias)
        self.gate = nn.Linear(config.d_model, config.mlp_width, bias=config.bias) if config.gated else None
        self.down = nn.Linear(config.mlp_width, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP, of the shape of x."""
        up: Tensor = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        added: Tensor = self.dropout(self.down(hidden))
        return added
