"""Weights that change from step to step, for tests of incremental saves."""

from pathlib import Path
from typing import Any

import torch

import tensorkeep

LOSSLESS: dict[str, Any] = {"compression": "lossless"}
DELTA: dict[str, Any] = {"delta": True, **LOSSLESS}


def weights(count: int = 4, shape: tuple[int, ...] = (100, 300), seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": (torch.randn(shape, generator=generator) * 0.02).bfloat16() for number in range(count)}


def changed(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensor + 1 if name in names else tensor for name, tensor in state.items()}


def trained(state: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """Return weights after a small update, as of an optimizer with a low learning rate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + 1e-4 * torch.randn(t.shape, generator=generator)).to(t.dtype) for name, t in state.items()
    }


def codecs(path: Path) -> str:
    return " ".join(tensorkeep.info(path).by_codec)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    with file.open("r+b") as target:  # changes every hard link to the file
        target.write(content)
