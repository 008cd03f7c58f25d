"""The contract of a tool: settings that are checked before anything runs, a way to save, and ways to load.

What is timed is what a person would write: ``torch.load`` and then ``copy_`` where a tool cannot load into tensors that
exist. The peers check nothing while they load; Tensorkeep checks every block.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from tensorkeep.state.tree import flatten

if TYPE_CHECKING:
    import torch


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="tool"):
    """One way to save and load; its fields are its settings.

    Attributes
    ----------
    suffix : str
        Of its files.
    needs : str or None
        The package that it comes with, if Tensorkeep does not need that anyway.
    maps : bool
        Whether a load only maps the file, so that its pages have to be touched for anything to be loaded.
    nested : bool
        Whether it holds nested states and plain values; otherwise a state is flattened to a dict of tensors.
    """

    suffix: ClassVar[str] = ".ckpt"
    needs: ClassVar[str | None] = None
    maps: ClassVar[bool] = False
    nested: ClassVar[bool] = False

    @property
    def durable(self) -> bool:
        """Whether all it wrote is on the disk when `save` returns: files, directories, and their names."""
        return False

    def check(self) -> None:
        """Raise UsageError if the settings do not go together, beyond their types."""

    def missing(self) -> str | None:
        """Return why it cannot run here, or None."""
        if self.needs is None or find_spec(self.needs) is not None:
            return None
        return f"the package {self.needs!r} is not installed"

    def view(self, state: Any) -> Any:
        """Return what it can hold of a state."""
        return state if self.nested else _tensors(state)

    @abstractmethod
    def save(self, state: Any, path: Path) -> None:
        """Write what `view` returned; ``path`` does not exist yet."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Return what was saved, in new memory."""

    def load_into(self, path: Path, state: Any) -> None:
        """Fill what `view` returned of a state of the same shape."""
        targets = flatten(state).leaves
        for name, leaf in flatten(self.load(path)).leaves.items():
            if leaf.is_torch:
                targets[name].array.copy_(leaf.array)
            else:
                np.copyto(targets[name].array, leaf.array)


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    import torch

    leaves = flatten(state).leaves.values()
    # A name that ends in nothing, as that of a single tensor, is no key that every tool takes.
    return {
        leaf.name or "state": leaf.array if leaf.is_torch else torch.from_numpy(np.asarray(leaf.array))
        for leaf in leaves
    }
