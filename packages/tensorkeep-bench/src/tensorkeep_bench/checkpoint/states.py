"""The state that is saved, memory of the same structure to load into, and the gate: a load must return every bit."""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from tensorkeep.errors import UsageError
from tensorkeep.ext.state import Alias, Array, DType, Flat, Leaf, LeafKind, allocate, flatten, make_view, unflatten
from tensorkeep_bench.checkpoint.tools import Tool
from tensorkeep_bench.workload import GateError

# The memory that a measurement needs, in multiples of the state: source, target, and what a call allocates.
COPIES_IN_MEMORY = 4

_FILL = 0x5A
_CHUNK_BYTES = 4 * 1024**2


class Blueprint(NamedTuple):
    """The structure of a state without its data, which another process can allocate."""

    skeleton: object
    leaves: tuple[tuple[str, LeafKind, DType, tuple[int, ...]], ...]
    aliases: dict[str, Alias]

    @classmethod
    def of(cls, flat: Flat[Leaf]) -> Self:
        leaves = tuple((name, leaf.kind, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items())
        return cls(flat.skeleton, leaves, flat.aliases)

    def allocate(self) -> Any:
        arrays: dict[str, Array] = {name: allocate(kind, dtype, shape) for name, kind, dtype, shape in self.leaves}
        for name, alias in self.aliases.items():
            arrays[name] = make_view(arrays[alias.of], alias)
        return unflatten(self.skeleton, arrays)


class Expected(NamedTuple):
    """What a load must return: a digest of the state, and its structure."""

    digest: str
    blueprint: Blueprint


class StatePair:
    """A state to save, which never changes, and memory to load into; UsageError if it holds no tensor."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.flat = flatten(source)
        self.nbytes = sum(leaf.nbytes for leaf in self.flat.leaves.values())
        self._expected: dict[bool, Expected] = {}
        if self.nbytes == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor")

    @cached_property
    def target(self) -> Any:
        # Allocated on first use: loads into new memory do not need it.
        return Blueprint.of(self.flat).allocate()

    def expected_from(self, tool: Tool) -> Expected:
        # Computed once for nested states and once for flat ones.
        if tool.nested not in self._expected:
            view = tool.view(self.source)
            self._expected[tool.nested] = Expected(digest(view), Blueprint.of(flatten(view)))
        return self._expected[tool.nested]

    @property
    def fillable(self) -> bool:
        # Numpy scalars, for example, are not writable.
        return all(leaf.writable for leaf in self.flat.leaves.values())


def wipe(state: Any) -> None:
    for leaf in flatten(state).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None and leaf.writable:
            # A load that does nothing must fail the comparison.
            memory[:] = _FILL


def check_equal(loaded: Any, saved: Any, arm: str) -> None:
    """Compare two states bit for bit; GateError names the arm and the first tensor that differs."""
    found, expected = flatten(loaded), flatten(saved)
    if found.skeleton != expected.skeleton or found.leaves.keys() != expected.leaves.keys():
        raise GateError(f"{arm} loaded a structure that differs from the saved one")
    for name, leaf in expected.leaves.items():
        other = found.leaves[name]
        # Compared as integers, because NaN != NaN and -0.0 == 0.0. In chunks that fit into the processor's cache.
        if (other.dtype, other.shape) != (leaf.dtype, leaf.shape) or not all(
            np.array_equal(a, b) for a, b in zip(_chunks(other), _chunks(leaf), strict=True)
        ):
            raise GateError(f"{arm} loaded values that differ from the saved ones", name=name)


def digest(state: Any) -> str:
    """Return a hash of all that `check_equal` compares, for a process that has no copy of the saved state."""
    flat = flatten(state)
    # Structure and plain values first, then each tensor with its name, dtype and shape.
    found = xxhash.xxh3_128(json.dumps(flat.skeleton, sort_keys=True).encode())
    # Sorted, because tools return tensors in their own order.
    for name, leaf in sorted(flat.leaves.items()):
        found.update(f"{name} {leaf.dtype.name} {leaf.shape}".encode())
        for chunk in _chunks(leaf):
            found.update(chunk)
    return found.hexdigest()


def _chunks(leaf: Leaf) -> Iterator[np.ndarray[Any, Any]]:
    memory = leaf.host_bytes()
    for start in range(0, leaf.nbytes, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, leaf.nbytes)
        chunk = np.empty(stop - start, np.uint8) if memory is None else memory[start:stop]
        if memory is None:
            leaf.read(start, stop, chunk)
        # Comparing eight bytes at once is faster.
        yield chunk.view(np.uint64) if chunk.size % 8 == 0 else chunk
