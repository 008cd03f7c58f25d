"""Tensors that share storage: stored once, shared again on load.

A leaf whose memory lies wholly inside that of another leaf of the same dtype, dense and in C order, is stored as an
`Alias` of it: a tied weight, a transposed one, ``q = qkv[:n]``, an expanded row. So are two views of the very same
elements in any layout. Leaves that overlap only partly, with no leaf that holds both, are stored separately and come
back unshared; so do lazily conjugated or negated tensors, and a tensor and a numpy array of the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorkeep.state.memory import extent_of

if TYPE_CHECKING:
    from tensorkeep.state.leaf import Leaf
    from tensorkeep.state.strided import Array

_MOST = 2**63


@dataclass(frozen=True, slots=True)
class Alias:
    """A view of another leaf.

    Attributes
    ----------
    of : str
        Name of the leaf that is stored; never itself an alias.
    offset_elements : int
        Where the view's first element lies among the stored leaf's, in C order.
    shape : tuple of int
        Lengths of the view's dimensions.
    strides : tuple of int
        Steps of the view's dimensions, in elements; negative ones for numpy arrays only.
    """

    of: str
    offset_elements: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def validate(self, base_shape: Sequence[int]) -> None:
        """Check a view that comes from a file.

        Raises
        ------
        ValueError
            If a field is of the wrong type or an element would lie outside the base.
        """
        numbers = (self.offset_elements, *self.shape, *self.strides)
        if not all(type(number) is int and -_MOST < number < _MOST for number in numbers):
            raise ValueError("the view of another tensor has a field that is no 64-bit integer")
        if len(self.shape) != len(self.strides) or len(self.shape) > 64 or min(self.shape, default=0) < 0:
            raise ValueError("the view of another tensor has an impossible shape")
        if math.prod(self.shape) >= _MOST // 16:
            raise ValueError("the view of another tensor is larger than any memory")
        if 0 in self.shape:
            raise ValueError("an empty tensor is no view of another")
        spans = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        low = self.offset_elements + sum(span for span in spans if span < 0)
        high = self.offset_elements + sum(span for span in spans if span > 0)
        if low < 0 or high >= math.prod(base_shape):
            raise ValueError(f"the view reaches elements {low} to {high} of a tensor of {math.prod(base_shape)}")

    @property
    def is_run(self) -> bool:
        """Whether its elements follow one another in the stored leaf."""
        dense = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return all(length == 1 or stride == expected for length, stride, expected in dense)

    def is_whole(self, base_shape: Sequence[int]) -> bool:
        """Return whether the view is the stored leaf itself, so that both come back as one object."""
        return (
            self.offset_elements == 0
            and self.shape == tuple(base_shape)
            and self.strides == contiguous_strides(self.shape)
        )


def whole(name: str, shape: Sequence[int]) -> Alias:
    """Return the view of a stored leaf that is all of it."""
    return Alias(name, 0, tuple(shape), contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array in C order."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


def make_view(base: Array, alias: Alias) -> Array:
    """Return the view of a loaded leaf that an alias describes; the leaf itself when the alias is all of it.

    Parameters
    ----------
    base : torch.Tensor or numpy.ndarray
        The leaf that ``alias.of`` names, in C order unless the alias is all of it.
    alias : Alias
        Checked here, too.

    Raises
    ------
    ValueError
        If the view does not lie within the base.
    """
    alias.validate(base.shape)
    if alias.is_whole(base.shape):
        return base
    if isinstance(base, np.ndarray):
        return _numpy_view(base, alias)
    if min(alias.strides, default=0) < 0:
        raise ValueError("a tensor cannot have negative strides")
    if not base.is_contiguous():
        raise ValueError("views can be made of tensors in C order only")
    import torch

    with torch.no_grad():
        offset = base.storage_offset() + alias.offset_elements
        return base.detach().as_strided(alias.shape, alias.strides, offset)


def find_aliases(leaves: Iterable[Leaf]) -> dict[str, Alias]:
    """Return the leaves that need not be stored, by name, each as a view of one that is.

    The base is the largest leaf around the view; among equals one in C order, then the first in traversal order.
    """
    groups: dict[object, list[_Extent]] = {}
    for order, leaf in enumerate(leaves):
        extent = _extent(leaf, order)
        if extent is not None:
            groups.setdefault((extent.place, leaf.dtype.name), []).append(extent)
    found: dict[int, tuple[str, Alias]] = {}
    for group in groups.values():
        if len(group) > 1:
            found.update(_within(group))
    return dict(found[order] for order in sorted(found))


class _Extent(NamedTuple):
    """Where a leaf lies in memory: bytes [low, high) of a place, the first element at ``origin``."""

    low: int
    high: int
    origin: int
    strides: tuple[int, ...]
    dense: bool
    order: int
    place: str
    leaf: Leaf


def _extent(leaf: Leaf, order: int) -> _Extent | None:
    """Return a leaf's place in memory, or None for what is never shared: empty, lazy, odd strides."""
    size = leaf.dtype.itemsize
    if leaf.nbytes == 0 or (leaf.is_torch and (leaf.array.is_conj() or leaf.array.is_neg())):
        return None
    memory = extent_of(leaf)
    if any(stride % size for stride in memory.strides):
        return None
    dense = leaf.array.is_contiguous() if leaf.is_torch else leaf.array.flags.c_contiguous
    # The strides of dimensions of length 1 mean nothing and differ between equal views.
    strides = contiguous_strides(leaf.shape) if dense else tuple(stride // size for stride in memory.strides)
    place = memory.device if leaf.is_torch else "numpy"
    return _Extent(memory.low, memory.high, memory.origin, strides, bool(dense), order, place, leaf)


def _within(group: list[_Extent]) -> dict[int, tuple[str, Alias]]:
    """Return the aliases among leaves of one dtype in one place, by traversal index.

    Sorted by address, larger first, the last leaf that became a base reaches furthest: if it does not hold a leaf,
    no other base does.
    """
    found: dict[int, tuple[str, Alias]] = {}
    base: _Extent | None = None
    alike: dict[Any, _Extent] = {}
    for extent in sorted(group, key=lambda e: (e.low, -e.high, not e.dense, e.order)):
        leaf = extent.leaf
        size = leaf.dtype.itemsize
        if base is not None and extent.high <= base.high and (extent.origin - base.origin) % size == 0:
            offset = (extent.origin - base.origin) // size
            found[extent.order] = leaf.name, Alias(base.leaf.name, offset, leaf.shape, extent.strides)
        elif extent.dense:
            base = extent
        else:
            first = alike.setdefault((extent.origin, leaf.shape, extent.strides), extent)
            if first is not extent:
                strides = contiguous_strides(leaf.shape)
                found[extent.order] = leaf.name, Alias(first.leaf.name, 0, leaf.shape, strides)
    return found


def _numpy_view(base: Array, alias: Alias) -> Array:
    if not base.flags.c_contiguous:
        raise ValueError("views can be made of arrays in C order only")
    memory = base.reshape(-1).view(np.uint8)
    size = base.itemsize
    # Unlike as_strided, this checks the bounds once more.
    return np.ndarray(
        alias.shape, base.dtype, memory, alias.offset_elements * size, tuple(stride * size for stride in alias.strides)
    )
