"""The arms of a comparison: each saves a state its own way and gives it back.

What is timed is what a person would write: ``torch.load`` and then ``copy_`` where a peer cannot load into tensors that
exist. The peers check nothing while they load; Holdfast checks every block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from holdfast.checkpoint.load import load
from holdfast.checkpoint.save import save
from holdfast.state.tree import flatten


class Arm(ABC):
    """One way to save and load.

    Attributes
    ----------
    name : str
        What tables call it.
    suffix : str
        Of its files.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]

    def view(self, state: Any) -> Any:
        """Return what it can hold of a state: all of it, unless said otherwise."""
        return state

    @abstractmethod
    def save(self, state: Any, path: Path) -> None:
        """Write what `view` returned."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Return what was saved, in new memory."""

    @abstractmethod
    def load_into(self, path: Path, state: Any) -> None:
        """Fill what `view` returned of a state of the same shape."""


class TorchArm(Arm):
    """``torch.save`` and ``torch.load(weights_only=True)``."""

    name = "torch"
    suffix = ".pt"

    def save(self, state: Any, path: Path) -> None:
        import torch

        torch.save(state, path)

    def load(self, path: Path) -> Any:
        import torch

        return torch.load(path, weights_only=True)

    def load_into(self, path: Path, state: Any) -> None:
        _copy(self.load(path), state)


class SafetensorsArm(Arm):
    """``safetensors.torch.save_file`` and ``load_file``; it holds a flat dict of tensors, so a state is flattened."""

    name = "safetensors"
    suffix = ".safetensors"

    def view(self, state: Any) -> Any:
        import torch

        leaves = flatten(state).leaves.values()
        return {leaf.name: leaf.array if leaf.is_torch else torch.from_numpy(leaf.array) for leaf in leaves}

    def save(self, state: Any, path: Path) -> None:
        from safetensors.torch import save_file

        # It refuses tensors that are not contiguous; making them so is part of saving with it.
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> Any:
        from safetensors.torch import load_file

        return load_file(path)

    def load_into(self, path: Path, state: Any) -> None:
        _copy(self.load(path), state)


class HoldfastArm(Arm):
    """Holdfast's own format, raw."""

    name = "holdfast"
    suffix = ".ckpt"
    compression: ClassVar[str] = "none"

    def save(self, state: Any, path: Path) -> None:
        save(state, path, compression=self.compression)

    def load(self, path: Path) -> Any:
        return load(path)

    def load_into(self, path: Path, state: Any) -> None:
        load(path, into=state)


class HoldfastLosslessArm(HoldfastArm):
    """Holdfast's own format, compressed without loss."""

    name = "holdfast-lossless"
    suffix = ".lossless.ckpt"
    compression = "lossless"


def arms() -> list[Arm]:
    """Return the arms that every comparison has, the baseline first."""
    return [TorchArm(), SafetensorsArm(), HoldfastArm(), HoldfastLosslessArm()]


def _copy(loaded: Any, state: Any) -> None:
    targets = flatten(state).leaves
    for name, leaf in flatten(loaded).leaves.items():
        if leaf.is_torch:
            targets[name].array.copy_(leaf.array)
        else:
            np.copyto(targets[name].array, leaf.array)
