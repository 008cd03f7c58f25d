"""The contract of a tool: typed settings, one way to save, and ways to load.

A tool does what its users would write. Where it cannot load into existing tensors, `Tool.load_into` loads new ones and
copies them. Only Tensorkeep verifies checksums while it loads.
"""

from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec
import numpy as np

from tensorkeep.bench.experiment.validation import convert
from tensorkeep.state.tree import flatten

Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="tool"):
    """One way to save and load a state. The fields of a subclass are its settings, its tag is its name."""

    suffix: ClassVar[str] = ".ckpt"  # of the path that it writes
    package: ClassVar[str | None] = None  # that it needs beyond Tensorkeep's own dependencies
    # Whether `load` only maps the file. The bench then reads a byte of every page within the measured time.
    maps_files: ClassVar[bool] = False
    # Whether it stores nested states and plain values. Other tools get a flat dict of tensors.
    nested: ClassVar[bool] = False

    @property
    def durable(self) -> bool:
        """Whether `save` returns only after the files and their directory entries are on the disk."""
        return False

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        """Return the tool with some settings; UsageError if one is unknown, of another type, or out of range."""
        return convert(settings, cls, what=f"tool {cls.__struct_config__.tag!r}")

    def missing(self) -> str | None:
        """Return why the tool cannot run on this machine, or None."""
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"the package {self.package!r} is not installed"

    def view(self, state: Any) -> Any:
        """Return the form of a state that the tool can store: the state itself, or its tensors by flat names."""
        if self.nested:
            return state
        import torch

        # A state that is a single tensor has an empty name, which not every tool accepts as a key.
        return {
            leaf.name or "state": leaf.array if leaf.is_torch else torch.from_numpy(np.asarray(leaf.array))
            for leaf in flatten(state).leaves.values()
        }

    @abstractmethod
    def save(self, state: Any, path: Path) -> None:
        """Write the result of `view` to ``path``, which does not exist yet."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Return the saved state, in new memory."""

    def load_into(self, path: Path, state: Any) -> None:
        """Fill the tensors of ``state``, which `view` returned for a state of the same structure."""
        targets = flatten(state).leaves
        for name, leaf in flatten(self.load(path)).leaves.items():
            if leaf.is_torch:
                targets[name].array.copy_(leaf.array)
            else:
                np.copyto(targets[name].array, leaf.array)
