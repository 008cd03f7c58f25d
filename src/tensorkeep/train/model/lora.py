"""Adapters of low rank beside frozen weights (LoRA; Hu et al., arXiv 2106.09685).

A layer with an adapter computes ``W x + b + alpha / rank * B A x``. A and B are trained, and B is 0 at first, so that
training starts with the outputs of the frozen weights. Checkpoints hold them as ``lora_a`` [rank, inputs] and
``lora_b`` [outputs, rank] beside the ``weight``.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.train.model.config import LoraConfig, ModelConfig

A, B = "lora_a", "lora_b"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, lora: LoraConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = lora.alpha / lora.rank
        self.lora_a = nn.Parameter(torch.empty(lora.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer and its adapter."""
        adapted = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.scale * adapted


def build_linear(config: ModelConfig, part: Literal["attention", "mlp"], inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer of a block, with an adapter if the configuration says so."""
    if config.lora.adapts(part):
        return LoraLinear(inputs, outputs, bias=config.bias, lora=config.lora)
    return nn.Linear(inputs, outputs, bias=config.bias)


def is_adapter(name: str) -> bool:
    """Return whether the parameter of a name belongs to an adapter."""
    return name.endswith((A, B))


def initial_adapter(name: str, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Return new values of an adapter: A is normal with a variance of 1 / inputs, B is 0."""
    place = generator.device if generator is not None else "cpu"
    if name.endswith(B):
        return torch.zeros(shape, device=place)
    return torch.empty(shape, device=place).normal_(0.0, shape[1] ** -0.5, generator=generator)


def merged(state: Mapping[str, Tensor], config: ModelConfig) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Return the tensors of the same model without adapters, which are added to the weights, and its configuration."""
    if not config.lora.rank:
        return state, config
    scale = config.lora.alpha / config.lora.rank
    found = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, adapter in state.items():
        if name.endswith(A):
            layer = name.removesuffix(A)
            change = state[layer + B].float() @ adapter.float()
            weight = found[f"{layer}weight"]
            found[f"{layer}weight"] = (weight.float() + scale * change).to(weight.dtype)
    return found, msgspec.structs.replace(config, lora=LoraConfig())
