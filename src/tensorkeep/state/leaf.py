"""A leaf: one tensor or array of a state, read and written as one stream of bytes.

The stream holds the elements in C order, little-endian, whatever the memory layout: transposed, expanded, reversed, on
a GPU, lazily conjugated. If the memory is that stream already, `Leaf.host_bytes` returns it without a copy. Otherwise a
range of the stream is gathered, with extra memory of the range's size only.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from tensorkeep.errors import OutOfMemoryError, UnsupportedLeafError, UsageError
from tensorkeep.state.dtypes import DType, check_numpy, check_torch
from tensorkeep.state.strided import (
    Array,
    Bytes,
    Device,
    as_integers,
    as_unsigned,
    gather_tensor,
    integer_dtype,
    is_lazy,
    may_overlap,
    scatter_tensor,
    slices,
)
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    import torch

LeafKind = Literal["tensor", "parameter", "ndarray", "npscalar"]
LEAF_KINDS: tuple[LeafKind, ...] = ("tensor", "parameter", "ndarray", "npscalar")

MOST_DIMENSIONS = 64
"""As numpy has. The product of millions of lengths, which a hostile file may have, would take hours."""


class Source(Protocol):
    """What a writer stores: a `Leaf` in memory, or a tensor of another checkpoint."""

    @property
    def name(self) -> str:
        """Its full dotted name."""

    @property
    def dtype(self) -> DType:
        """The element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its dimensions."""

    @property
    def nbytes(self) -> int:
        """The bytes of its stream."""

    def host_bytes(self) -> Bytes | None:
        """Return the stream without a copy if it lies in host memory in C order, else None."""

    def read(self, start: int, stop: int, out: Bytes) -> None:
        """Copy the bytes ``start:stop`` of the stream to ``out``; both are multiples of the item size."""


@dataclass(slots=True)
class Leaf:
    """One tensor or array of a state in memory; a `Source` that can also be overwritten.

    ``name`` is its dotted path, ``kind`` what the value is in the state. ``array`` is the data, detached from autograd,
    sharing the value's memory (a numpy scalar's is a copy).
    """

    name: str
    kind: LeafKind
    dtype: DType
    array: Array
    requires_grad: bool = False
    # Stored, because a save reads them many times.
    shape: tuple[int, ...] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.array.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, value: object) -> "Leaf | None":
        """Return the leaf of a tensor, parameter, numpy array or numpy scalar; None for any other value.

        Raises UnsupportedLeafError if the value is a tensor or array that cannot be stored: sparse, quantised, nested,
        without data, of a subclass, or of a dtype that is not in the table.
        """
        if isinstance(value, np.generic):
            return cls(name, "npscalar", check_numpy(name, value.dtype), np.array(value))
        if isinstance(value, np.ndarray):
            if type(value) not in (np.ndarray, np.memmap):
                raise UnsupportedLeafError(
                    f"{type(value).__name__} is a subclass of numpy.ndarray",
                    name=name,
                    remedy="save np.asarray(x), and what the subclass adds (such as a mask) beside it",
                )
            return cls(name, "ndarray", check_numpy(name, value.dtype), np.asarray(value))
        # A state cannot hold tensors if torch was never imported.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        check_plain(name, value)
        dtype = check_torch(name, value.dtype)
        kind: LeafKind = "parameter" if type(value) is torch.nn.Parameter else "tensor"
        return cls(name, kind, dtype, value.detach(), value.requires_grad)

    @property
    def is_torch(self) -> bool:
        """Whether ``array`` is a torch tensor."""
        return self.kind in ("tensor", "parameter")

    @property
    def writable(self) -> bool:
        """Whether `write` can change it: not a numpy scalar, a read-only array, or a view with overlapping elements."""
        if self.kind == "npscalar" or (self.kind == "ndarray" and not self.array.flags.writeable):
            return False
        strides = self.array.stride() if self.is_torch else self.array.strides
        return not may_overlap(self.shape, strides, 1 if self.is_torch else self.dtype.itemsize)

    def host_bytes(self) -> Bytes | None:
        """Return the stream as a view of the value's memory, a uint8 array of shape (nbytes,), without a copy.

        None is returned if the memory is not the stream: on another device, elements out of C order or with gaps, a
        lazily conjugated or negated tensor.

        Raises UnsupportedLeafError if a tensor's memory was freed or made smaller.
        """
        if self.nbytes == 0:
            return np.empty(0, np.uint8)
        if not self.is_torch:
            contiguous = self.array.flags.c_contiguous
            return self.array.reshape(-1).view(np.uint8) if contiguous else None
        tensor = self.array
        _check_memory(self.name, tensor)
        if tensor.device.type != "cpu" or is_lazy(tensor) or not tensor.is_contiguous():
            return None
        return np.asarray(_Memory(tensor, self.nbytes))

    def read(self, start: int, stop: int, out: Bytes) -> None:
        """Copy the bytes [start, stop) of the stream, multiples of the item size, to ``out``.

        ``out`` is a C-contiguous uint8 array of shape (stop - start,). Extra memory is at most the size of the range.
        """
        self._check_range(start, stop, out)
        host = self.host_bytes()
        if host is not None:
            out[:] = host[start:stop]
            return
        for piece, part in self._pieces(start, stop, out):
            if self.is_torch:
                gather_tensor(piece, part)
            else:
                part.view(piece.dtype).reshape(piece.shape)[...] = piece

    def write(self, start: int, stop: int, data: Bytes) -> None:
        """Overwrite the bytes [start, stop) of the stream, multiples of the item size, in the value's own memory.

        ``data`` is a C-contiguous uint8 array of shape (stop - start,). Raises UsageError if the value is not writable.
        """
        self._check_range(start, stop, data)
        if not self.writable:
            raise UsageError(
                "the value cannot be written in place",
                name=self.name,
                remedy="give a writable array whose elements do not overlap",
            )
        host = self.host_bytes()
        if host is not None:
            host[start:stop] = data
            return
        for piece, part in self._pieces(start, stop, data):
            if self.is_torch:
                scatter_tensor(piece, part)
            else:
                piece[...] = part.view(piece.dtype).reshape(piece.shape)

    def _check_range(self, start: int, stop: int, data: Bytes) -> None:
        """Raise ValueError unless the range lies in the stream, at whole elements, and has the length of the data."""
        size = self.dtype.itemsize
        if not 0 <= start <= stop <= self.nbytes or start % size or stop % size or len(data) != stop - start:
            raise ValueError(f"bytes [{start}, {stop}) of {self.nbytes} do not fit {len(data)} bytes of {self.dtype}")

    def _pieces(self, start: int, stop: int, data: Bytes) -> Iterator[tuple[Array, Bytes]]:
        """Yield sub-arrays that together are the range, in order, each with its bytes in ``data``."""
        size = self.dtype.itemsize
        array = self.array
        if not self.is_torch:
            array = as_unsigned(array)
        elif not is_lazy(array):
            array = as_integers(array)
        if self.is_torch and array.is_contiguous():
            array = array.reshape(-1)
        begin = 0
        for piece in slices(array, start // size, stop // size):
            end = begin + math.prod(piece.shape) * size
            yield piece, data[begin:end]
            begin = end


class _Memory:
    """Shows numpy the memory of a contiguous tensor, and keeps it alive.

    ``Tensor.numpy`` would do so, but torch then refuses to resize the tensor for ever, which FSDP does.
    """

    def __init__(self, tensor: "torch.Tensor", nbytes: int) -> None:
        self._tensor = tensor
        address = tensor.data_ptr(), False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": address}


def _check_memory(name: str, tensor: "torch.Tensor") -> None:
    """Raise UnsupportedLeafError if elements of a tensor lie behind the end of its storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if (tensor.storage_offset() + last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsupportedLeafError(
            "its memory was freed or made smaller, as FSDP does with parameters that it does not use at the moment",
            name=name,
            remedy="save a full or sharded state dict of torch.distributed.checkpoint.state_dict, which gathers them",
        )


def check_plain(name: str, tensor: "torch.Tensor") -> None:
    """Raise UnsupportedLeafError for a tensor that is not plain strided memory."""
    import torch
    from torch.nn.parameter import is_lazy

    if tensor.layout is not torch.strided:
        problem, remedy = f"a tensor of layout {tensor.layout}", "save x.to_dense(), or its indices and values"
    elif tensor.is_nested:
        problem, remedy = "a nested tensor", "save x.unbind() as a list"
    elif is_lazy(tensor):
        problem, remedy = "a lazy parameter without data", "run the module once before saving"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"the tensor subclass {type(tensor).__name__}"
        remedy = "save the plain tensors that it consists of: x.dequantize() of a quantised one"
        if type(tensor).__name__ == "DTensor":
            problem = "a DTensor, of which each rank has a part,"
            remedy = "call it on all ranks with group=torch.distributed.group.WORLD, or use x.full_tensor()"
    elif tensor.is_quantized:
        problem, remedy = "a quantised tensor", "save x.int_repr() with its scale and zero point, or x.dequantize()"
    elif tensor.is_meta:
        problem = "a tensor on the meta device, without memory,"
        remedy = "make the module on another device, or fill it first: module.load_state_dict(state, assign=True)"
    else:
        return
    raise UnsupportedLeafError(f"{problem} cannot be saved", name=name, remedy=remedy)


def allocate(kind: LeafKind, dtype: DType, shape: Sequence[int], *, device: Device = None) -> Array:
    """Return uninitialised memory for a leaf: a plain tensor for a parameter, a 0-d array for a numpy scalar.

    ``device`` is that of a tensor; numpy arrays are always in host memory. Raises UnsupportedError if torch (numpy, for
    its kinds) does not have the dtype; OutOfMemoryError if the allocation fails.
    """
    target = dtype.numpy if kind in ("ndarray", "npscalar") else dtype.torch
    try:
        if isinstance(target, np.dtype):
            return np.empty(tuple(shape), target)
        import torch

        # Allocated as integers, because torch warns when some exotic dtypes are created.
        return torch.empty(tuple(shape), dtype=integer_dtype(dtype.itemsize) or target, device=device).view(target)
    except (MemoryError, RuntimeError, ValueError) as error:
        size = format_bytes(math.prod(shape) * dtype.itemsize)
        raise OutOfMemoryError(f"cannot allocate {size} for a {dtype} of shape {tuple(shape)}: {error}") from error
