"""Tensors sharded among ranks: the boxes of a `DTensor` that this process has, and their memory."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.state.dtypes import check_torch
from tensorkeep.state.leaf import Leaf, LeafKind, check_plain, may_overlap

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class TensorShard(Leaf):
    """A box of a tensor: ``whole`` is the shape of the full tensor, ``offsets`` is where the box begins."""

    whole: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    @classmethod
    def of_leaf(cls, leaf: Leaf) -> "TensorShard":
        return cls(leaf.name, leaf.kind, leaf.dtype, leaf.array, leaf.requires_grad, leaf.shape, (0,) * len(leaf.shape))

    def rows(self, start: int, stop: int) -> "TensorShard":
        offsets = (self.offsets[0] + start, *self.offsets[1:])
        return TensorShard(
            self.name, self.kind, self.dtype, self.array[start:stop], self.requires_grad, self.whole, offsets
        )


@dataclass(slots=True)
class ShardedLeaf(Leaf):
    """A `DTensor`: ``shape`` and ``nbytes`` describe the full tensor, ``array`` is the local tensor."""

    whole: tuple[int, ...] = ()
    layout: str = ""
    # Along each dimension: ranges of the full tensor, in the order of the local tensor.
    runs: tuple[tuple[range, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        # `Leaf` would take the shape of the local tensor.
        self.shape = self.whole
        self.nbytes = prod(self.whole) * self.dtype.itemsize

    @property
    def writable(self) -> bool:
        return not may_overlap(tuple(self.array.shape), self.array.stride(), 1)

    @property
    def sharing(self) -> Hashable:
        """Equal only for DTensors of the same local memory and placements, also where that memory is empty."""
        array = self.array
        # The storage object, not its address: all empty storages have the address 0.
        memory = array.untyped_storage()._cdata, array.storage_offset(), tuple(array.stride())
        return *memory, self.dtype.name, self.shape, self.layout

    @classmethod
    def of(cls, name: str, value: Any) -> "ShardedLeaf | None":
        """None for other values. Raises UnsupportedLeafError for a partial sum, or what cannot be stored."""
        if not is_dtensor(value):
            return None
        import torch
        from torch.distributed.tensor import Partial

        if any(isinstance(placement, Partial) for placement in value.placements):
            text = f"a DTensor of placements {value.placements}: each rank has only a part of a sum"
            remedy = "redistribute it before saving: x.redistribute(placements=[Replicate()])"
            raise UnsupportedLeafError(text, name=name, remedy=remedy)
        local = value.detach().to_local()
        check_plain(name, local)
        kind: LeafKind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return cls(
            name,
            kind,
            check_torch(name, value.dtype),
            local,
            value.requires_grad,
            tuple(value.shape),
            _layout(value),
            _runs(name, value),
        )

    def pieces(self) -> Iterator[TensorShard]:
        """Yield the boxes of this process, in the order of the local tensor; nothing if it is empty."""
        spans = [list(_spans(runs)) for runs in self.runs]
        for box in product(*spans):
            offsets = tuple(run.start for run, _ in box)
            array = self.array[tuple(place for _, place in box)]
            if array.numel():
                yield TensorShard(self.name, self.kind, self.dtype, array, self.requires_grad, self.shape, offsets)


def is_dtensor(value: object) -> bool:
    """Recognises parameters that are DTensors, too; does not import torch's distributed code."""
    return any(
        (kind.__module__, kind.__name__) == ("torch.distributed.tensor", "DTensor") for kind in type(value).__mro__
    )


def shards_of(leaf: Leaf) -> list[TensorShard]:
    if isinstance(leaf, ShardedLeaf):
        return list(leaf.pieces())
    return [TensorShard.of_leaf(leaf)] if leaf.nbytes else []


def row_ranges(piece: TensorShard, most_bytes: int) -> Iterator[TensorShard]:
    """Yield parts of a box, some rows each, of about ``most_bytes`` or less."""
    rows = piece.shape[0] if piece.shape else 1
    if piece.nbytes <= most_bytes or rows == 1:
        yield piece
        return
    # At multiples in the full tensor, where saves cut its blocks.
    whole_row = prod(piece.whole[1:]) * piece.dtype.itemsize
    step = max(1, most_bytes // max(1, whole_row))
    at = 0
    while at < rows:
        stop = min(rows, ((piece.offsets[0] + at) // step + 1) * step - piece.offsets[0])
        yield piece.rows(at, stop)
        at = stop


def bytes_here(leaf: Leaf) -> int:
    return leaf.array.numel() * leaf.dtype.itemsize if isinstance(leaf, ShardedLeaf) else leaf.nbytes


def _spans(runs: tuple[range, ...]) -> Iterator[tuple[range, slice]]:
    """Yield ranges along one dimension of the full tensor, with their places in the local one."""
    at = 0
    for run in runs:
        yield run, slice(at, at + len(run))
        at += len(run)


def _layout(value: "DTensor") -> str:
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"mesh ({sizes}): {', '.join(map(str, value.placements))}"


def _runs(name: str, value: "DTensor") -> tuple[tuple[range, ...], ...]:
    """The rows, columns, ... of the full tensor that this rank has, as torch divides them."""
    coordinate = value.device_mesh.get_coordinate()
    shape = tuple(value.to_local().shape)
    if coordinate is None or 0 in shape:  # this rank is not in the mesh, or has nothing
        return tuple(() for _ in shape)
    divisions = list(zip(value.placements, value.device_mesh.shape, coordinate, strict=True))
    runs = tuple(_divided(length, dim, divisions) for dim, length in enumerate(value.shape))
    lengths = tuple(sum(map(len, each)) for each in runs)
    # A DTensor can be made from any local tensor: what torch's rules do not explain would be stored in the wrong place.
    if lengths != shape:
        raise UnsupportedLeafError(
            f"the local tensor of a DTensor has shape {list(shape)}, but its placements {value.placements} on the mesh "
            f"{tuple(value.device_mesh.shape)} give {list(lengths)} at {tuple(coordinate)}",
            name=name,
            remedy="make it by distribute_tensor, or redistribute it",
        )
    return runs


def _divided(length: int, dim: int, divisions: Sequence[tuple[Any, int, int]]) -> tuple[range, ...]:
    """The ranges of one dimension that a rank has; mesh dimensions have a placement, a count and a position."""
    from torch.distributed.tensor.placement_types import _StridedShard

    # Mesh dimensions divide from left to right.
    own = [each for each in divisions if not each[0].is_replicate() and each[0].dim == dim]
    runs: tuple[range, ...] = (range(length),)
    last = list[tuple[int, int]]()
    for number, (placement, count, position) in enumerate(own):
        # `_StridedShard` divides after the placements on its right, which together are ``split_factor`` shards: FSDP
        # after tensor parallel.
        if not isinstance(placement, _StridedShard):
            runs = _chunk(runs, count, position)
        elif placement.split_factor == prod(count for _, count, _ in own[number + 1 :]):
            last.append((count, position))
        else:
            parts = [_chunk(runs, int(placement.split_factor), part) for part in range(int(placement.split_factor))]
            runs = tuple(run for part in parts for run in _chunk(part, count, position))
    for count, position in reversed(last):
        runs = _chunk(runs, count, position)
    return runs


def _chunk(runs: tuple[range, ...], count: int, position: int) -> tuple[range, ...]:
    """The ranges that `torch.chunk` gives to one of ``count`` chunks."""
    # Rounded up, so that the last chunks may be shorter, or empty.
    size = -(-sum(map(len, runs)) // count)
    found = []
    start, stop = size * position, size * (position + 1)
    for run in runs:
        found.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return tuple(run for run in found if run)
