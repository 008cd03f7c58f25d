"""A state to save, and memory of the same structure to load into."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from tensorkeep.bench.checkpoint.gate import digest
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.errors import UsageError
from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Array, Leaf, LeafKind, allocate
from tensorkeep.state.tree import Flat, flatten, unflatten

COPIES_IN_MEMORY = 4
"""The memory that a measurement needs, in multiples of the state: source, target, and what a call allocates."""

_FILL = 0x5A


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The structure of a state without its data, which another process can allocate."""

    skeleton: object
    leaves: tuple[tuple[str, LeafKind, DType, tuple[int, ...]], ...]
    aliases: dict[str, Alias]

    @classmethod
    def of(cls, flat: Flat[Leaf]) -> Self:
        """Return the blueprint of a flattened state."""
        leaves = tuple((name, leaf.kind, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items())
        return cls(flat.skeleton, leaves, flat.aliases)

    def allocate(self) -> Any:
        """Return a state of this structure in new memory."""
        arrays: dict[str, Array] = {name: allocate(kind, dtype, shape) for name, kind, dtype, shape in self.leaves}
        for name, alias in self.aliases.items():
            arrays[name] = make_view(arrays[alias.of], alias)
        return unflatten(self.skeleton, arrays)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a load must return: a digest of the state, and its structure."""

    digest: str
    blueprint: Blueprint


class StatePair:
    """A state to save, which never changes, and memory of the same structure to load into.

    ``flat`` has the leaves of the source, ``nbytes`` is their size. Raises UsageError if the state holds no tensor.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.flat = flatten(source)
        self.nbytes = sum(leaf.nbytes for leaf in self.flat.leaves.values())
        self._expected: dict[bool, Expected] = {}
        if self.nbytes == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor")

    @cached_property
    def target(self) -> Any:
        """What is loaded into: tensors of the source's dtypes and shapes, allocated on first use."""
        return Blueprint.of(self.flat).allocate()

    def of(self, tool: Tool) -> Expected:
        """Return what the tool must load, which is computed once for each form of the state."""
        if tool.nested not in self._expected:
            view = tool.view(self.source)
            self._expected[tool.nested] = Expected(digest(view), Blueprint.of(flatten(view)))
        return self._expected[tool.nested]

    @property
    def fillable(self) -> bool:
        """Whether every leaf can be loaded into existing memory. Numpy scalars, for example, cannot."""
        return all(leaf.writable for leaf in self.flat.leaves.values())


def wipe(state: Any) -> None:
    """Overwrite the data of a state, so that a load that does nothing fails the comparison."""
    for leaf in flatten(state).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None and leaf.writable:
            memory[:] = _FILL
