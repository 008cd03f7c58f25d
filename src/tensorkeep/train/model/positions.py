"""What depends on positions: learned embeddings, and rotations of queries and keys (RoPE)."""

import math

import torch
from torch import Tensor, nn

from tensorkeep.train.model.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines for some positions, each of shape [positions, 1, head size]."""


class LearnedPositions(nn.Module):
    """One learned vector for each position, which is added to the embedding of its token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.context_length, config.d_model))

    def forward(self, start: int, stop: int) -> Tensor:
        """Return the vectors of the positions from start to stop, of shape [stop - start, d_model]."""
        return self.weight[start:stop]


class RotaryPositions(nn.Module):
    """The angles by which queries and keys are rotated (Su et al., arXiv 2104.09864).

    Element i of a head is paired with element i + head size / 2, as in the LLaMA of transformers, so that weights can
    be exported unchanged; the paper pairs neighbours. The tables are computed from the configuration, not saved.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.base = config.rope_base
        self.scaling = config.rope_scaling
        shape = (config.context_length, 1, config.head_size)
        self.register_buffer("cosines", torch.empty(shape), persistent=False)
        self.register_buffer("sines", torch.empty(shape), persistent=False)

    def fill(self, device: torch.device) -> None:
        """Compute the tables in float32, as transformers does, and put them on a device."""
        length, _, size = self.cosines.shape
        frequencies = 1.0 / self.base ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), scaled_frequencies(frequencies, self.scaling))
        self.cosines = torch.cat((angles.cos(), angles.cos()), dim=1).unsqueeze(1).to(device)
        self.sines = torch.cat((-angles.sin(), angles.sin()), dim=1).unsqueeze(1).to(device)

    def forward(self, start: int, stop: int) -> Rotation:
        """Return the rotation of the positions from start to stop."""
        return self.cosines[start:stop], self.sines[start:stop]


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the angles between two positions as a scaling changes them; see `RopeScaling`."""
    if scaling.kind is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unchanged = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unchanged) * frequencies / scaling.factor + unchanged * frequencies


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head by its position's angles; heads of shape [batch, positions, heads, head size]."""
    cosines, sines = rotation
    # Cast first: on a CPU, mixed 16- and 32-bit products take 1.5 times as long.
    wide = heads.to(cosines.dtype)
    # Rolling by half pairs each element with its partner; the signs are in the sines.
    rotated = torch.addcmul(wide * cosines, wide.roll(wide.shape[-1] // 2, -1), sines)
    return rotated.to(heads.dtype)
