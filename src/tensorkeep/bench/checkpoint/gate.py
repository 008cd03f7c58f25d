"""Reading a state as its user would, and the gate of a load: it must return every bit of the saved state."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.experiment.workload import GateError
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import flatten

_PIECE_BYTES = 4 * 1024**2


def read_state(tool: Tool, path: Path, existing: Any) -> Any:
    """Load into existing tensors if there are any, else into new ones; return them."""
    if existing is not None:
        tool.load_into(path, existing)
        return existing
    loaded = tool.load(path)
    if tool.maps_files:
        touch_pages(loaded)
    return loaded


def check_equal(loaded: Any, saved: Any, arm: str) -> None:
    """Compare two states: structure, plain values, dtypes, shapes and every bit.

    Raises GateError if they differ. It names the arm and the first tensor that differs.
    """
    found, expected = flatten(loaded), flatten(saved)
    if found.skeleton != expected.skeleton or found.leaves.keys() != expected.leaves.keys():
        raise GateError(f"{arm} loaded a structure that differs from the saved one")
    for name, leaf in expected.leaves.items():
        other = found.leaves[name]
        # Compared as integers, because NaN != NaN and -0.0 == 0.0. In pieces that fit into the processor's cache.
        if (other.dtype, other.shape) != (leaf.dtype, leaf.shape) or not all(
            np.array_equal(a, b) for a, b in zip(_pieces(other), _pieces(leaf), strict=True)
        ):
            raise GateError(f"{arm} loaded values that differ from the saved ones", name=name)


def digest(state: Any) -> str:
    """Return a hash of all that `check_equal` compares, for a process that has no copy of the saved state."""
    flat = flatten(state)
    found = xxhash.xxh3_128(json.dumps(flat.skeleton, sort_keys=True).encode())
    for name, leaf in sorted(flat.leaves.items()):
        found.update(f"{name} {leaf.dtype.name} {leaf.shape}".encode())
        for piece in _pieces(leaf):
            found.update(piece)
    return found.hexdigest()


def touch_pages(loaded: Any) -> None:
    """Read one byte of every page of a state, so that a file that is only mapped is read."""
    for leaf in flatten(loaded).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            np.add.reduce(memory[:: mmap.PAGESIZE])


def _pieces(leaf: Leaf) -> Iterator[np.ndarray[Any, Any]]:
    whole = leaf.host_bytes()
    for start in range(0, leaf.nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, leaf.nbytes)
        piece = np.empty(stop - start, np.uint8) if whole is None else whole[start:stop]
        if whole is None:
            leaf.read(start, stop, piece)
        yield piece.view(np.uint64) if piece.size % 8 == 0 else piece
