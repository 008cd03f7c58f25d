"""Where leaves lie in memory: which share elements, and whether a checkpoint shares them in the same way."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tensorkeep.state.aliases import Alias
    from tensorkeep.state.leaf import Leaf

_MOST_WORK = 10_000
"""Steps that the search for an element of two layouts may take; every layout that slicing makes needs far fewer."""


class Extent(NamedTuple):
    """The memory of a leaf that is not empty.

    Attributes
    ----------
    device : str
        ``"cpu"`` for tensors of the CPU and numpy arrays alike.
    low, high : int
        All elements lie at the addresses [low, high).
    origin : int
        Address of the first element in C order.
    shape, strides : tuple of int
        Lengths of the dimensions, and their steps in bytes.
    itemsize : int
    """

    device: str
    low: int
    high: int
    origin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def extent_of(leaf: Leaf) -> Extent:
    """Return where a leaf lies that is not empty."""
    size = leaf.dtype.itemsize
    if leaf.is_torch:
        device, origin = str(leaf.array.device), leaf.array.data_ptr()
        strides = tuple(stride * size for stride in leaf.array.stride())
    else:
        device, origin, strides = "cpu", leaf.array.ctypes.data, tuple(leaf.array.strides)
    spans = [(length - 1) * stride for length, stride in zip(leaf.shape, strides, strict=True)]
    low = origin + sum(span for span in spans if span < 0)
    high = origin + sum(span for span in spans if span > 0) + size
    return Extent(device, low, high, origin, leaf.shape, strides, size)


def share_elements(a: Extent, b: Extent) -> bool:
    """Return whether any byte belongs to both: interleaved columns do not share, a tensor and its slice do."""
    if a.device != b.device or a.high <= b.low or b.high <= a.low:
        return False
    try:
        # Any number of steps may be given, whatever numpy's type stubs say.
        return np.shares_memory(np.asarray(_Addresses(a)), np.asarray(_Addresses(b)), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Shows numpy a layout of memory; the addresses may be another device's, since nothing is ever read."""

    def __init__(self, extent: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{extent.itemsize}",
            "shape": extent.shape,
            "strides": extent.strides,
            "data": (extent.origin, True),
        }


class _Placed(NamedTuple):
    name: str
    extent: Extent
    mapping: Hashable


def sharing_conflict(
    leaves: Mapping[str, Leaf], saved: Mapping[str, Alias], chosen: Collection[str]
) -> tuple[str, str] | None:
    """Return two leaves that share memory though the checkpoint has other elements there, or None.

    Parameters
    ----------
    leaves : mapping of str to Leaf
        Leaves in memory.
    saved : mapping of str to Alias
        For each that has the shape and dtype of the checkpoint, which elements of which stored leaf it is there.
    chosen : collection of str
        Those to be filled; two others may share as they like.
    """
    placed = [
        _Placed(name, extent, _mapping(leaf, extent, saved.get(name)))
        for name, leaf in leaves.items()
        if leaf.nbytes
        for extent in [extent_of(leaf)]
    ]
    # Swept by address: only leaves that begin before another ends can share with it.
    around: list[_Placed] = []
    for one in sorted(placed, key=lambda p: (p.extent.device, p.extent.low)):
        around = [p for p in around if p.extent.device == one.extent.device and p.extent.high > one.extent.low]
        for other in around:
            touched = one.name in chosen or other.name in chosen
            if touched and one.mapping != other.mapping and share_elements(one.extent, other.extent):
                return other.name, one.name
        around.append(one)
    return None


def _mapping(leaf: Leaf, extent: Extent, saved: Alias | None) -> Hashable:
    """Return how addresses map to stored elements; leaves of equal mappings agree wherever they meet."""
    if saved is None or (leaf.is_torch and (leaf.array.is_conj() or leaf.array.is_neg())):
        return "like no other", leaf.name
    size = extent.itemsize
    steps = [
        (length, stride, saved_stride * size)
        for length, stride, saved_stride in zip(extent.shape, extent.strides, saved.strides, strict=True)
        if length > 1
    ]
    if all(stride == saved_stride for _, stride, saved_stride in steps):
        return saved.of, saved.offset_elements * size - extent.origin
    # Another order of the dimensions is the same mapping.
    return saved.of, saved.offset_elements, extent.origin, tuple(sorted(steps))
