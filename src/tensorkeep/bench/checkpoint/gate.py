"""The gate of loads: a load counts only if it returned the saved state, bit for bit."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorkeep.bench.experiment.workload import GateError
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.strided import Bytes
from tensorkeep.state.tree import flatten

_PIECE_BYTES = 4 * 1024**2


def check_equal(loaded: Any, saved: Any, arm: str) -> None:
    """Compare two states: structure, plain values, dtypes, shapes and every bit.

    Raises GateError if they differ. It names the arm and the first tensor that differs.
    """
    found, expected = flatten(loaded), flatten(saved)
    if found.skeleton != expected.skeleton or found.leaves.keys() != expected.leaves.keys():
        raise GateError(f"{arm} loaded a structure that differs from the saved one")
    for name, leaf in expected.leaves.items():
        if not _equal_bits(found.leaves[name], leaf):
            raise GateError(f"{arm} loaded values that differ from the saved ones", name=name)


def touch_pages(loaded: Any) -> None:
    """Read one byte of every page of a state, so that a file that is only mapped is read."""
    for leaf in flatten(loaded).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            np.add.reduce(memory[:: mmap.PAGESIZE])


def _equal_bits(a: Leaf, b: Leaf) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # Compared as integers, because NaN != NaN and -0.0 == 0.0. In pieces that fit into the processor's cache.
    return all(np.array_equal(x, y) for x, y in zip(_pieces(a), _pieces(b), strict=True))


def _pieces(leaf: Leaf) -> Iterator[np.ndarray[Any, Any]]:
    whole = leaf.host_bytes()
    for start in range(0, leaf.nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, leaf.nbytes)
        piece: Bytes
        if whole is not None:
            piece = whole[start:stop]
        else:
            piece = np.empty(stop - start, np.uint8)
            leaf.read(start, stop, piece)
        yield piece.view(np.uint64) if piece.size % 8 == 0 else piece
