"""The small layers of a block: linear layers with adapters (LoRA), positions, the token shift and the convolution."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from chatgot.model.config import LoraConfig, ModelConfig, RopeScaling

ADAPTER_A, ADAPTER_B = "lora_a", "lora_b"

# Cosines and signed sines for some positions, each of shape [positions, 1, head size].
Rotation = tuple[Tensor, Tensor]
# For each module that shifts or convolves: the last positions of its input, [batch, positions, channels].
Tails = dict[nn.Module, Tensor]


class LoraLinear(nn.Linear):
    """A linear layer with an adapter of low rank: ``W x + b + alpha / rank * B A x`` (Hu et al., arXiv 2106.09685).

    Checkpoints hold A as ``lora_a`` [rank, inputs] and B as ``lora_b`` [outputs, rank] beside the ``weight``.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, lora: LoraConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = lora.alpha / lora.rank
        self.lora_a = nn.Parameter(torch.empty(lora.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        adapted = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.scale * adapted


def build_linear(config: ModelConfig, part: Literal["attention", "mlp"], inputs: int, outputs: int) -> nn.Linear:
    if config.lora.adapts(part):
        return LoraLinear(inputs, outputs, bias=config.bias, lora=config.lora)
    return nn.Linear(inputs, outputs, bias=config.bias)


def is_adapter(name: str) -> bool:
    return name.endswith((ADAPTER_A, ADAPTER_B))


def initial_adapter(name: str, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Return new values of an adapter: A is normal with a variance of 1 / inputs, B is 0."""
    device = generator.device if generator is not None else "cpu"
    if name.endswith(ADAPTER_B):
        # Training starts with the outputs of the frozen weights.
        return torch.zeros(shape, device=device)
    return torch.empty(shape, device=device).normal_(0.0, shape[1] ** -0.5, generator=generator)


def merge_adapters(state: Mapping[str, Tensor], config: ModelConfig) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Return the tensors and the configuration of the same model without adapters: the weights include them."""
    if not config.lora.rank:
        return state, config
    scale = config.lora.alpha / config.lora.rank
    merged = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name, adapter in state.items():
        if name.endswith(ADAPTER_A):
            layer = name.removesuffix(ADAPTER_A)
            # In float32: a small change would be lost in 16 bits before it is added.
            change = state[layer + ADAPTER_B].float() @ adapter.float()
            weight = merged[f"{layer}weight"]
            merged[f"{layer}weight"] = (weight.float() + scale * change).to(weight.dtype)
    return merged, msgspec.structs.replace(config, lora=LoraConfig())


class LearnedPositions(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.context_length, config.d_model))

    def forward(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop]


class RotaryPositions(nn.Module):
    """The rotation angles of queries and keys (Su et al., arXiv 2104.09864)."""

    # Element i of a head is paired with element i + head size / 2, as in the LLaMA of transformers, so that weights can
    # be exported unchanged; the paper pairs neighbours.
    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.base = config.rope_base
        self.scaling = config.rope_scaling
        shape = (config.context_length, 1, config.head_size)
        # Not persistent: the configuration determines the tables, so checkpoints need not hold them.
        self.register_buffer("cosines", torch.empty(shape), persistent=False)
        self.register_buffer("sines", torch.empty(shape), persistent=False)

    def fill(self, device: torch.device) -> None:
        # Not in `__init__`: a model is made on the meta device, and `to_empty` leaves its tables without values.
        length, _, size = self.cosines.shape
        # In float32 on the CPU, as transformers does.
        frequencies = 1.0 / self.base ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), scaled_frequencies(frequencies, self.scaling))
        self.cosines = torch.cat((angles.cos(), angles.cos()), dim=1).unsqueeze(1).to(device)
        self.sines = torch.cat((-angles.sin(), angles.sin()), dim=1).unsqueeze(1).to(device)

    def forward(self, start: int, stop: int) -> Rotation:
        return self.cosines[start:stop], self.sines[start:stop]


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # LLaMA 3.1: slow angles, which turn less than once in the original context, are stretched; fast angles are not.
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unchanged = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unchanged) * frequencies / scaling.factor + unchanged * frequencies


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head by its position's angles; heads of shape [batch, positions, heads, head size]."""
    cosines, sines = rotation
    # Cast first: on a CPU, products of a 16-bit and a 32-bit tensor take 1.5 times as long.
    wide = heads.to(cosines.dtype)
    # Rolling by half a head pairs each element with its partner; the sines have the signs.
    rotated = torch.addcmul(wide * cosines, wide.roll(wide.shape[-1] // 2, -1), sines)
    return rotated.to(heads.dtype)


class TokenShift(nn.Module):
    """Adds a learned fraction of the previous position, channel by channel, as RWKV (Peng et al., arXiv 2305.13048)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, tails: Tails | None = None) -> Tensor:
        return _add_earlier(self, x, [self.share], tails)


class CausalConvolution(nn.Module):
    """A causal depthwise convolution, as in Primer (So et al., arXiv 2109.08668)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        # The position itself has no factor: the projection before the convolution has one.
        # `taps[i]` has the factors of the position i + 1 before.
        self.taps = nn.ParameterList(torch.empty(channels) for _ in range(width - 1))

    def forward(self, x: Tensor, tails: Tails | None = None) -> Tensor:
        return _add_earlier(self, x, list(self.taps), tails)


def _add_earlier(module: nn.Module, x: Tensor, taps: Sequence[Tensor], tails: Tails | None) -> Tensor:
    """Add earlier positions times the taps. With tails, generation continues from them and updates them."""
    if tails is None:
        added: Tensor = _AddEarlier.apply(x, *taps)  # type: ignore[no-untyped-call]
        return added
    first = tails.get(module)
    if first is None:
        # Before the first position there are zeros.
        first = torch.zeros_like(x[:, :1]).expand(-1, len(taps), -1)
    # The earlier positions are prepended, and their results are cut off at the end.
    whole = torch.cat((first, x), dim=1)
    tails[module] = whole[:, -len(taps) :]
    added = _AddEarlier.apply(whole, *taps)  # type: ignore[no-untyped-call]
    return added[:, len(taps) :]


class _AddEarlier(torch.autograd.Function):
    """Adds to each position of [batch, positions, channels] the one i + 1 before it, times the i-th tap."""

    # Autograd's own backward pass for this makes many copies, and takes twice as long on a CPU.
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
        by_x, by_taps = gradient.clone(), []
        for lag, tap in enumerate(taps, start=1):
            by_x[:, :-lag].addcmul_(gradient[:, lag:], tap.to(gradient.dtype))
            # Summed in the dtype of the tap: 16-bit sums over a batch would lose the small terms.
            by_taps.append((gradient[:, lag:] * x[:, :-lag]).sum((0, 1), dtype=tap.dtype))
        return by_x, *by_taps
