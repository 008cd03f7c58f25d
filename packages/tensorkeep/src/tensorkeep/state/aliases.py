"""Tensors that share storage: stored once, shared again on load."""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tensorkeep.state.leaf import Array, Leaf, is_lazy
from tensorkeep.state.sharded import ShardedLeaf

_MAX_INTEGER = 2**63
# Limit of numpy's search for an element that two layouts share; layouts made by slicing need far fewer steps.
_MAX_SEARCH_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Alias:
    """A view of another leaf, which is stored: ``Alias("w", 0, (3, 2), (1, 3))`` is the transpose of a 2 x 3 matrix."""

    of: str  # never itself an alias
    offset_elements: int  # of the view's first element among the stored leaf's, in C order
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; negative ones for numpy arrays only

    def validate(self, base_shape: Sequence[int]) -> None:
        """Raises ValueError if a field has the wrong type or an element would lie outside the stored leaf."""
        numbers = (self.offset_elements, *self.shape, *self.strides)
        if not all(type(number) is int and -_MAX_INTEGER < number < _MAX_INTEGER for number in numbers):
            raise ValueError("the view of another tensor has a field that is not a 64-bit integer")
        # An empty tensor is never an alias, and has no lowest or highest element.
        is_empty = min(self.shape, default=1) < 1
        # numpy's limit of dimensions, see `leaf.MOST_DIMENSIONS`.
        if len(self.shape) != len(self.strides) or len(self.shape) > 64 or is_empty:
            raise ValueError("the view of another tensor has an impossible shape")
        # The bytes of the view must fit 64 bits, at 16 bytes for each element.
        if math.prod(self.shape) >= _MAX_INTEGER // 16:
            raise ValueError("the view of another tensor is too large")
        low, high = (self.offset_elements + distance for distance in _reach(self.shape, self.strides))
        if low < 0 or high >= math.prod(base_shape):
            raise ValueError(f"the view reaches elements {low} to {high} of a tensor of {math.prod(base_shape)}")

    @property
    def is_contiguous(self) -> bool:
        dense = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return all(length == 1 or stride == expected for length, stride, expected in dense)

    def is_full(self, base_shape: Sequence[int]) -> bool:
        # A load then returns one object for both names.
        return self == full_view(self.of, base_shape)


def full_view(name: str, shape: Sequence[int]) -> Alias:
    return Alias(name, 0, tuple(shape), contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


def make_view(base: Array, alias: Alias) -> Array:
    """Return the leaf itself for a full view. Raises ValueError if the view is outside, or the leaf not in C order."""
    alias.validate(base.shape)
    if alias.is_full(base.shape):
        return base
    is_dense = base.flags.c_contiguous if isinstance(base, np.ndarray) else base.is_contiguous()
    if not is_dense:
        raise ValueError("only a tensor in C order can have views")
    if isinstance(base, np.ndarray):
        size = base.itemsize
        strides = tuple(stride * size for stride in alias.strides)
        # Unlike as_strided, the constructor checks the bounds once more.
        return np.ndarray(
            alias.shape, base.dtype, base.reshape(-1).view(np.uint8), alias.offset_elements * size, strides
        )
    if min(alias.strides, default=0) < 0:
        raise ValueError("a tensor cannot have negative strides")
    import torch

    # A view of a base that tracks gradients would be a non-leaf tensor.
    with torch.no_grad():
        offset = base.storage_offset() + alias.offset_elements
        return base.detach().as_strided(alias.shape, alias.strides, offset)


class Extent(NamedTuple):
    """The memory of a leaf that is not empty, in bytes; all elements are at the addresses [low, high)."""

    device: str  # "cpu" for numpy arrays, too
    low: int
    high: int
    origin: int  # of the first element in C order
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def extent_of(leaf: Leaf) -> Extent:
    size = leaf.dtype.itemsize
    if leaf.is_torch:
        device, origin = str(leaf.array.device), leaf.array.data_ptr()
        strides = tuple(stride * size for stride in leaf.array.stride())
    else:
        device, origin, strides = "cpu", leaf.array.ctypes.data, tuple(leaf.array.strides)
    low, high = _reach(leaf.shape, strides)
    return Extent(device, origin + low, origin + high + size, origin, leaf.shape, strides, size)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Distances of the lowest and the highest element of a layout from its first one."""
    spans = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)


# Saving: which leaves are views of others


def find_aliases(leaves: Iterable[Leaf]) -> dict[str, Alias]:
    """Return the leaves that need not be stored, each as a view of the largest leaf around it."""
    # If a leaf lies within another leaf of the same dtype, dense and in C order, it is stored as an `Alias`: a tied
    # weight, a transposed weight, ``q = qkv[:n]``, an expanded row. Two views of the same elements in any layout are
    # stored once, too. Partly overlapping leaves, lazy tensors, and a tensor and an array with the same memory are
    # stored separately.
    groups: dict[Hashable, list[_Candidate]] = {}
    leaves = list(leaves)
    found: dict[str, Alias] = {}
    tied: dict[Hashable, ShardedLeaf] = {}
    for leaf in leaves:
        # Of DTensors only full views count: other ranks could not make a view of a part of this local tensor.
        if isinstance(leaf, ShardedLeaf):
            if (base := tied.setdefault(leaf.sharing, leaf)) is not leaf:
                found[leaf.name] = full_view(base.name, leaf.shape)
        elif (candidate := _candidate(leaf)) is not None:
            # A tensor and an array never share, even at one address.
            place = candidate.extent.device if leaf.is_torch else "numpy"
            groups.setdefault((place, leaf.dtype.name), []).append(candidate)
    for group in groups.values():
        if len(group) > 1:
            found.update(_aliases_in(group))
    # In the order of the state, so that manifests do not depend on addresses.
    return {leaf.name: found[leaf.name] for leaf in leaves if leaf.name in found}


class _Candidate(NamedTuple):
    leaf: Leaf
    dense: bool
    strides: tuple[int, ...]
    extent: Extent


def _candidate(leaf: Leaf) -> _Candidate | None:
    # A lazy tensor's memory has other values than the tensor.
    size = leaf.dtype.itemsize
    if leaf.nbytes == 0 or (leaf.is_torch and is_lazy(leaf.array)):
        return None
    extent = extent_of(leaf)
    # A view of a structured array may begin between two elements.
    if any(stride % size for stride in extent.strides):
        return None
    dense = bool(leaf.array.is_contiguous() if leaf.is_torch else leaf.array.flags.c_contiguous)
    # The strides of dimensions of length 1 mean nothing and differ between equal views.
    strides = contiguous_strides(leaf.shape) if dense else tuple(stride // size for stride in extent.strides)
    return _Candidate(leaf, dense, strides, extent)


def _aliases_in(group: list[_Candidate]) -> dict[str, Alias]:
    """Return the aliases among leaves of one dtype and device, given in traversal order."""
    found: dict[str, Alias] = {}
    base: _Candidate | None = None
    first_of_layout: dict[Hashable, _Candidate] = {}
    # Swept by address, the largest first. The last base has the highest end: a leaf outside it is outside all bases.
    for each in sorted(group, key=lambda c: (c.extent.low, -c.extent.high, not c.dense)):
        leaf, extent = each.leaf, each.extent
        distance = extent.origin - base.extent.origin if base is not None else 0
        if base is not None and extent.high <= base.extent.high and distance % extent.itemsize == 0:
            found[leaf.name] = Alias(base.leaf.name, distance // extent.itemsize, leaf.shape, each.strides)
        elif each.dense:
            base = each
        else:
            first = first_of_layout.setdefault((extent.origin, leaf.shape, each.strides), each)
            if first is not each:
                found[leaf.name] = full_view(first.leaf.name, leaf.shape)
    return found


# Loading into existing memory: whether it is shared as in the checkpoint


def sharing_conflict(
    leaves: Mapping[str, Leaf], saved: Mapping[str, Alias], chosen: Collection[str]
) -> tuple[str, str] | None:
    """Return two leaves that share memory although the checkpoint has different elements there."""
    extents = {name: extent_of(leaf) for name, leaf in leaves.items() if leaf.nbytes}
    mappings = {name: _mapping(leaves[name], extent, saved.get(name)) for name, extent in extents.items()}
    # Swept by address: only leaves that begin before another ends can share with it.
    overlapping: list[str] = []
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].device, item[1].low)):
        overlapping = [o for o in overlapping if extents[o].device == extent.device and extents[o].high > extent.low]
        for other in overlapping:
            written = name in chosen or other in chosen
            if written and mappings[name] != mappings[other] and share_elements(extent, extents[other]):
                return other, name
        overlapping.append(name)
    return None


def _mapping(leaf: Leaf, extent: Extent, saved: Alias | None) -> Hashable:
    """How addresses map to stored elements; equal mappings have equal elements where they overlap."""
    if saved is None or (leaf.is_torch and is_lazy(leaf.array)):
        # Never equal to another mapping: any sharing is a conflict.
        return "unlike any other", leaf.name
    size = extent.itemsize
    steps = [
        (length, stride, saved_stride * size)
        for length, stride, saved_stride in zip(extent.shape, extent.strides, saved.strides, strict=True)
        if length > 1
    ]
    if all(stride == saved_stride for _, stride, saved_stride in steps):
        # The difference of the offsets counts: it is equal for all parts of one tensor.
        return saved.of, saved.offset_elements * size - extent.origin
    # Dimensions in another order are the same mapping.
    return saved.of, saved.offset_elements, extent.origin, tuple(sorted(steps))


def share_elements(a: Extent, b: Extent) -> bool:
    """Interleaved columns do not share, a tensor and its slice do."""
    if a.device != b.device or a.high <= b.low or b.high <= a.low:
        return False
    try:
        # numpy takes any number of steps, although its type stubs do not.
        return np.shares_memory(np.asarray(_Addresses(a)), np.asarray(_Addresses(b)), max_work=_MAX_SEARCH_STEPS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        # Assume that they share: the caller then refuses, and nothing is overwritten twice.
        return True


class _Addresses:
    """Shows numpy a layout of memory. Nothing is read, so the addresses may be another device's."""

    def __init__(self, extent: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{extent.itemsize}",
            "shape": extent.shape,
            "strides": extent.strides,
            # Read-only, and with a void type: numpy must not interpret what is there.
            "data": (extent.origin, True),
        }
