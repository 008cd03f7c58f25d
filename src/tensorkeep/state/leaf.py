"""A leaf: one tensor or array of a state, with its dtype, its shape and its bytes.

Whatever lies in memory (transposed, expanded, reversed, on a GPU, lazily conjugated), a leaf reads and writes as one
stream of bytes: the elements in C order, little-endian. Where the memory already is that stream, `Leaf.host_bytes`
gives it without a copy; elsewhere a range of the stream is gathered with extra memory of the range's size only.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from tensorkeep.errors import OutOfMemoryError, UsageError
from tensorkeep.state.dtypes import DType
from tensorkeep.state.storable import numpy_dtype, refuse_array, refuse_tensor, torch_dtype
from tensorkeep.state.strided import (
    Array,
    Bytes,
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

__all__ = ["LEAF_KINDS", "Array", "Bytes", "Leaf", "LeafKind", "allocate"]

LeafKind = Literal["tensor", "parameter", "ndarray", "npscalar"]
LEAF_KINDS: tuple[LeafKind, ...] = ("tensor", "parameter", "ndarray", "npscalar")

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensorkeep stores little-endian bytes and runs on little-endian machines only")


@dataclass(slots=True)
class Leaf:
    """One tensor or array of a state.

    Attributes
    ----------
    name : str
        Its dotted path, unique in the state.
    kind : str
        ``"tensor"``, ``"parameter"``, ``"ndarray"`` or ``"npscalar"``: what the value is in the state.
    dtype : DType
        The element type.
    array : torch.Tensor or numpy.ndarray
        The data, detached from autograd, sharing the value's memory (a numpy scalar's is a copy).
    requires_grad : bool
        Whether the value tracks gradients.
    shape : tuple of int
        The lengths of its dimensions.
    nbytes : int
        The bytes of its stream: elements times item size, whatever the memory layout.
    """

    name: str
    kind: LeafKind
    dtype: DType
    array: Array
    requires_grad: bool = False
    # A save asks for them many times.
    shape: tuple[int, ...] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.array.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, value: object) -> Leaf | None:
        """Return the leaf of a tensor, parameter, numpy array or numpy scalar; None for any other value.

        Raises
        ------
        UnsupportedLeafError
            If the value is a tensor or array that cannot be stored: sparse, quantised, nested, without data, of a
            subclass, or of a dtype that is not in the table.
        """
        if isinstance(value, np.generic):
            return cls(name, "npscalar", numpy_dtype(name, value.dtype), np.array(value))
        if isinstance(value, np.ndarray):
            refuse_array(name, value)
            return cls(name, "ndarray", numpy_dtype(name, value.dtype), np.asarray(value))
        # A state cannot hold tensors when torch was never imported.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        refuse_tensor(name, value)
        dtype = torch_dtype(name, value.dtype)
        kind: LeafKind = "parameter" if type(value) is torch.nn.Parameter else "tensor"
        return cls(name, kind, dtype, value.detach(), value.requires_grad)

    @property
    def is_torch(self) -> bool:
        """Whether ``array`` is a torch tensor."""
        return self.kind in ("tensor", "parameter")

    @property
    def writable(self) -> bool:
        """Whether `write` may change it: no numpy scalar, no read-only array, no two elements at one address."""
        if self.kind == "npscalar" or (self.kind == "ndarray" and not self.array.flags.writeable):
            return False
        strides = self.array.stride() if self.is_torch else self.array.strides
        return not may_overlap(self.shape, strides, 1 if self.is_torch else self.dtype.itemsize)

    def host_bytes(self) -> Bytes | None:
        """Return the stream as a zero-copy view of the value's memory, or None where the memory is not the stream.

        Returns
        -------
        uint8 array, shape (nbytes,), or None
            None for memory of another device, elements out of C order or with gaps, and lazily conjugated or negated
            tensors.
        """
        if self.nbytes == 0:
            return np.empty(0, np.uint8)
        if not self.is_torch:
            contiguous = self.array.flags.c_contiguous
            return self.array.reshape(-1).view(np.uint8) if contiguous else None
        tensor = self.array
        if tensor.device.type != "cpu" or is_lazy(tensor) or not tensor.is_contiguous():
            return None
        import torch

        # Not reshape(-1): one element may lie with any stride, which view() then objects to.
        flat = as_integers(tensor).as_strided((tensor.numel(),), (1,))
        view: Bytes = flat.view(torch.uint8).numpy()
        return view

    def read(self, start: int, stop: int, out: Bytes) -> None:
        """Copy the bytes [start, stop) of the stream into ``out``.

        Extra memory is at most of the order of the range, never of the tensor.

        Parameters
        ----------
        start, stop : int
            Byte offsets, multiples of the item size.
        out : uint8 array, shape (stop - start,), C-contiguous
            Overwritten.
        """
        self._check_range(start, stop, out)
        host = self.host_bytes()
        if host is not None:
            out[:] = host[start:stop]
            return
        for piece, place in self._pieces(start, stop):
            part = out[place : place + math.prod(piece.shape) * self.dtype.itemsize]
            if self.is_torch:
                gather_tensor(piece, part)
            else:
                part.view(piece.dtype).reshape(piece.shape)[...] = piece

    def write(self, start: int, stop: int, data: Bytes) -> None:
        """Overwrite the bytes [start, stop) of the stream, in the value's own memory.

        Parameters
        ----------
        start, stop : int
            Byte offsets, multiples of the item size.
        data : uint8 array, shape (stop - start,), C-contiguous
            Not changed.

        Raises
        ------
        UsageError
            If the value is not writable.
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
        for piece, place in self._pieces(start, stop):
            part = data[place : place + math.prod(piece.shape) * self.dtype.itemsize]
            if self.is_torch:
                scatter_tensor(piece, part)
            else:
                piece[...] = part.view(piece.dtype).reshape(piece.shape)

    def _check_range(self, start: int, stop: int, data: Bytes) -> None:
        size = self.dtype.itemsize
        if not 0 <= start <= stop <= self.nbytes or start % size or stop % size or len(data) != stop - start:
            raise ValueError(f"bytes [{start}, {stop}) of {self.nbytes} do not fit {len(data)} bytes of {self.dtype}")

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Array, int]]:
        """Yield sub-arrays that together hold the range, in order, each with its byte offset in the range."""
        size = self.dtype.itemsize
        array = self.array
        if not self.is_torch:
            array = as_unsigned(array)
        elif not is_lazy(array):
            array = as_integers(array)
        if self.is_torch and array.is_contiguous():
            array = array.reshape(-1)
        place = 0
        for piece in slices(array, start // size, stop // size):
            yield piece, place
            place += math.prod(piece.shape) * size


def allocate(kind: str, dtype: DType, shape: Sequence[int], *, device: torch.device | str | None = None) -> Array:
    """Return uninitialised memory for a leaf.

    Parameters
    ----------
    kind : str
        A leaf kind. Parameters get a plain tensor, which ``unflatten`` wraps; numpy scalars a 0-d array.
    dtype : DType
        Element type.
    shape : sequence of int
        Lengths of the dimensions.
    device : torch.device or str, optional
        Where tensors go; numpy arrays are always in host memory.

    Raises
    ------
    UnsupportedError
        If torch (or numpy, by kind) lacks the dtype.
    StoreError
        If the memory cannot be had.
    """
    target = dtype.numpy if kind in ("ndarray", "npscalar") else dtype.torch
    try:
        if isinstance(target, np.dtype):
            return np.empty(tuple(shape), target)
        import torch

        # Made as integers, because torch warns at the birth of some exotic dtypes.
        tensor = torch.empty(tuple(shape), dtype=integer_dtype(dtype.itemsize) or target, device=device)
        if tensor.device.type == "cpu":
            _ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor.view(target)
    except (MemoryError, RuntimeError, ValueError) as error:
        wanted = format_bytes(math.prod(shape) * dtype.itemsize)
        raise OutOfMemoryError(f"cannot allocate {wanted} for a {dtype} of shape {tuple(shape)}: {error}") from error


_PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 * 1024**2


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advise the kernel to back untouched memory by huge pages; numpy does the same for its own.

    Filling new memory is bound by the first touch of each page: with pages of 4 KiB that costs three times the read.
    A kernel that declines changes nothing but the speed.
    """
    if nbytes >= 2 * _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
        length = (address + nbytes - start) // _PAGE_BYTES * _PAGE_BYTES
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
