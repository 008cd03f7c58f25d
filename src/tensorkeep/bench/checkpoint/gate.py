"""The gate that every load must pass before its speed counts: what came back is what was saved, bit for bit."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorkeep.errors import TensorkeepError
from tensorkeep.state.leaf import Bytes, Leaf
from tensorkeep.state.tree import flatten

_PIECE = 4 * 1024**2


class GateError(TensorkeepError):
    """What was loaded is not what was saved; there is no speed to speak of."""

    kind = "gate"


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
