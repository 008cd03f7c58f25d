"""What is saved and loaded: a state, and memory of the same shape to load into."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tensorkeep.errors import UsageError
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Array, Leaf, allocate
from tensorkeep.state.tree import Flat, flatten, unflatten

COPIES_IN_MEMORY = 4
"""How much memory a subject takes, in states: what is saved, what is loaded into, and what a call takes."""

_WIPE = 0x5A


class Subject:
    """A state to save, and memory of the same shape to load into.

    Parameters
    ----------
    state : nested state
        Kept, never changed.

    Attributes
    ----------
    state : nested state
        What is saved.
    flat : Flat
        The state's leaves.
    nbytes : int
        Raw bytes of its tensors.

    Raises
    ------
    UsageError
        If the state holds no tensor.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.flat = flatten(state)
        self.nbytes = sum(leaf.nbytes for leaf in self.flat.leaves.values())
        if self.nbytes == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor")

    @cached_property
    def target(self) -> Any:
        """What is loaded into: memory of the state's shape, made on first use."""
        return _same_shape(self.flat)

    @property
    def fillable(self) -> bool:
        """Whether all of it can be loaded into memory that exists; numpy scalars, for one, cannot."""
        return all(leaf.writable for leaf in self.flat.leaves.values())

    def wipe(self) -> None:
        """Overwrite the target, so that what one arm loaded cannot pass for what the next one did."""
        for leaf in flatten(self.target).leaves.values():
            memory = leaf.host_bytes()
            if memory is not None and leaf.writable:
                memory[:] = _WIPE


def _same_shape(flat: Flat[Leaf]) -> Any:
    arrays: dict[str, Array] = {}
    for name, leaf in flat.leaves.items():
        arrays[name] = allocate(leaf.kind, leaf.dtype, leaf.shape)
    for name, alias in flat.aliases.items():
        arrays[name] = make_view(arrays[alias.of], alias)
    return unflatten(flat.skeleton, arrays)
