"""What is saved and loaded: a state, a second one to load into, and the gate that every load must pass."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.bench.probes import MemoryReserve
from holdfast.errors import HoldfastError, UsageError
from holdfast.state.aliases import make_view
from holdfast.state.leaf import Array, Leaf, allocate
from holdfast.state.source import Bytes
from holdfast.state.tree import Flat, flatten, unflatten

COPIES_IN_MEMORY = 4
"""How much memory a workload takes, in states: what is saved, what is loaded into, and the reserve."""

_PIECE = 4 * 1024**2
_WIPE = 0x5A


class GateError(HoldfastError):
    """What was loaded is not what was saved; there is no speed to speak of."""

    kind = "gate"


class Workload:
    """A state to save, and memory of the same shape to load into.

    Parameters
    ----------
    state : nested state
        Kept, never changed.

    Attributes
    ----------
    state, target : nested state
        What is saved, and what is loaded into.
    flat : Flat
        The state's leaves.
    nbytes : int
        Raw bytes of its tensors.
    reserve : MemoryReserve
        Enough for what a timed call may take: a new state, and the page cache of as much.

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
        self.target = _same_shape(self.flat)
        self.reserve = MemoryReserve(2 * self.nbytes)

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


def check_same(loaded: Any, saved: Any, arm: str) -> None:
    """Hold two states to be the same: structure, plain values, dtypes, shapes, every bit.

    Raises
    ------
    GateError
        Naming the arm and the first tensor that differs.
    """
    found, wanted = flatten(loaded), flatten(saved)
    if found.skeleton != wanted.skeleton or found.leaves.keys() != wanted.leaves.keys():
        raise GateError(f"{arm} gave back another structure than was saved")
    for name, leaf in wanted.leaves.items():
        if not _same_bits(found.leaves[name], leaf):
            raise GateError(f"{arm} gave back other bits than were saved", name=name)


def touch(loaded: Any) -> None:
    """Read a byte of every page of a state: a peer that only maps a file has loaded nothing yet."""
    for leaf in flatten(loaded).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            np.add.reduce(memory[:: mmap.PAGESIZE])


def _same_shape(flat: Flat[Leaf]) -> Any:
    arrays: dict[str, Array] = {}
    for name, leaf in flat.leaves.items():
        arrays[name] = allocate(leaf.kind, leaf.dtype, leaf.shape)
    for name, alias in flat.aliases.items():
        arrays[name] = make_view(arrays[alias.of], alias)
    return unflatten(flat.skeleton, arrays)


def _same_bits(a: Leaf, b: Leaf) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # As integers: a NaN is equal to itself. In pieces that stay in the cache.
    return all(np.array_equal(_widest(x), _widest(y)) for x, y in zip(_pieces(a), _pieces(b), strict=True))


def _pieces(leaf: Leaf) -> Iterator[Bytes]:
    whole = leaf.host_bytes()
    for start in range(0, leaf.nbytes, _PIECE):
        stop = min(start + _PIECE, leaf.nbytes)
        if whole is not None:
            yield whole[start:stop]
        else:
            piece = np.empty(stop - start, np.uint8)
            leaf.read(start, stop, piece)
            yield piece


def _widest(data: Bytes) -> np.ndarray[Any, Any]:
    return data.view(np.uint64) if data.size % 8 == 0 else data
