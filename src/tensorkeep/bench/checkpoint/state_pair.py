"""A state to save, and memory of the same structure to load into."""

from functools import cached_property
from typing import Any

from tensorkeep.errors import UsageError
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import allocate
from tensorkeep.state.strided import Array
from tensorkeep.state.tree import flatten, unflatten

COPIES_IN_MEMORY = 4
"""The memory that a measurement needs, in multiples of the state: source, target, and what a call allocates."""

_FILL = 0x5A


class StatePair:
    """A state to save, which never changes, and memory of the same structure to load into.

    ``flat`` has the leaves of the source, ``nbytes`` is their size. Raises UsageError if the state holds no tensor.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.flat = flatten(source)
        self.nbytes = sum(leaf.nbytes for leaf in self.flat.leaves.values())
        if self.nbytes == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor")

    @cached_property
    def target(self) -> Any:
        """What is loaded into: tensors of the source's dtypes and shapes, allocated on first use."""
        arrays: dict[str, Array] = {
            name: allocate(leaf.kind, leaf.dtype, leaf.shape) for name, leaf in self.flat.leaves.items()
        }
        for name, alias in self.flat.aliases.items():
            arrays[name] = make_view(arrays[alias.of], alias)
        return unflatten(self.flat.skeleton, arrays)

    @property
    def fillable(self) -> bool:
        """Whether every leaf can be loaded into existing memory. Numpy scalars, for example, cannot."""
        return all(leaf.writable for leaf in self.flat.leaves.values())

    def wipe_target(self) -> None:
        """Overwrite the target, so that a load that does nothing fails the comparison."""
        for leaf in flatten(self.target).leaves.values():
            memory = leaf.host_bytes()
            if memory is not None and leaf.writable:
                memory[:] = _FILL
