"""A leaf: one tensor or array of a state, read and written as one stream of bytes."""

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import OutOfMemoryError, UnsupportedLeafError, UsageError, did_you_mean
from tensorkeep.state.dtypes import BY_NAME, DType, check_numpy, check_torch
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    import torch


# The stream holds the elements in C order, little-endian, whatever the memory layout: transposed, expanded, reversed,
# on a GPU, lazily conjugated.
# Strided memory as a stream of elements in C order. A range is split by recursion over the leading dimension (the end
# of a row, whole rows, the start of a row), so that gathering needs extra memory for the range, not for the array.

# A one-dimensional, contiguous array of bytes.
Bytes = npt.NDArray[np.uint8]
# A ``torch.Tensor`` or a ``numpy.ndarray``.
Array = Any
# The device of new tensors; the CPU if it is None.
Device: TypeAlias = "torch.device | str | None"


def may_overlap(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Exact for every layout that slicing produces."""
    if 0 in shape:
        return False
    # By stride: each dimension must step over everything that the smaller strides reach.
    reach = width
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def slices(array: Array, first: int, last: int) -> Iterator[Array]:
    """Yield the elements [first, last) of the C order: a partial row, whole rows at once, a partial row."""
    if first >= last:
        return
    if array.ndim == 0 or last - first == math.prod(array.shape):
        yield array
        return
    row = math.prod(array.shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:
        yield from slices(array[begin - 1], first - (begin - 1) * row, last - (begin - 1) * row)
        return
    if first < begin * row:
        yield from slices(array[begin - 1], first - (begin - 1) * row, row)
    if begin < end:
        yield array[begin:end]
    if end * row < last:
        yield from slices(array[end], 0, last - end * row)


def is_lazy(tensor: "torch.Tensor") -> bool:
    """Whether the tensor is conjugated or negated on reading, so that its memory has other values."""
    return tensor.is_conj() or tensor.is_neg()


def integer_dtype(itemsize: int) -> "torch.dtype | None":
    """None for 16 bytes."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(itemsize)


def gather_tensor(piece: "torch.Tensor", out: Bytes) -> None:
    import torch

    target = torch.from_numpy(out)
    # Not aligned to the elements: copied as bytes.
    if out.ctypes.data % piece.element_size():
        whole = torch.empty(piece.shape, dtype=piece.dtype).copy_(piece)
        target.copy_(whole.reshape(-1).view(torch.uint8))
    else:
        target.view(piece.dtype).reshape(piece.shape).copy_(piece)


def scatter_tensor(piece: "torch.Tensor", data: Bytes) -> None:
    import torch

    # torch has no read-only tensors and warns about such arrays.
    aligned = data.ctypes.data % piece.element_size() == 0 and data.flags.writeable
    source = torch.from_numpy(data if aligned else data.copy())
    # An inference tensor can only be written in inference mode.
    with torch.inference_mode() if piece.is_inference() else torch.no_grad():
        piece.copy_(source.view(piece.dtype).reshape(piece.shape))


LeafKind = Literal["tensor", "parameter", "ndarray", "npscalar"]
LEAF_KINDS: tuple[LeafKind, ...] = ("tensor", "parameter", "ndarray", "npscalar")
# As numpy has. The product of millions of lengths, which a hostile file may have, would take hours.
MOST_DIMENSIONS = 64


class Source(Protocol):
    """What a writer stores: a `Leaf` in memory, or a tensor of another checkpoint."""

    @property
    def name(self) -> str:
        """The full dotted name."""

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
    """One tensor or array of a state in memory; a `Source` that can also be overwritten."""

    name: str
    kind: LeafKind
    dtype: DType
    # The data, detached from autograd, in the value's memory; a copy of a numpy scalar.
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
        """None for any other value. Raises UnsupportedLeafError if a tensor or array cannot be stored."""
        if isinstance(value, np.generic):
            return cls(name, "npscalar", check_numpy(name, value.dtype), np.array(value))
        if isinstance(value, np.ndarray):
            # A subclass has more than its elements, such as a mask, which would be lost without notice.
            if type(value) not in (np.ndarray, np.memmap):
                text = f"{type(value).__name__} is a subclass of numpy.ndarray"
                remedy = "save np.asarray(x), and what the subclass adds (such as a mask) beside it"
                raise UnsupportedLeafError(text, name=name, remedy=remedy)
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
        return self.kind in ("tensor", "parameter")

    @property
    def writable(self) -> bool:
        """False for a numpy scalar, a read-only array, or a view with overlapping elements."""
        if self.kind == "npscalar" or (self.kind == "ndarray" and not self.array.flags.writeable):
            return False
        strides = self.array.stride() if self.is_torch else self.array.strides
        return not may_overlap(self.shape, strides, 1 if self.is_torch else self.dtype.itemsize)

    def host_bytes(self) -> Bytes | None:
        """Return the stream as a view of the value's memory, or None; UnsupportedLeafError if memory was freed."""
        if self.nbytes == 0:
            return np.empty(0, np.uint8)
        if not self.is_torch:
            contiguous = self.array.flags.c_contiguous
            return self.array.reshape(-1).view(np.uint8) if contiguous else None
        tensor = self.array
        # Every time: FSDP frees and fills the storage of its parameters meanwhile.
        _check_memory(self.name, tensor)
        if tensor.device.type != "cpu" or is_lazy(tensor) or not tensor.is_contiguous():
            return None
        return np.asarray(_Memory(tensor, self.nbytes))

    def read(self, start: int, stop: int, out: Bytes) -> None:
        """``out`` is C-contiguous uint8 of shape (stop - start,). Extra memory is at most the size of the range."""
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
        """Overwrite the bytes [start, stop) in the value's own memory. Raises UsageError if it is not writable."""
        self._check_range(start, stop, data)
        if not self.writable:
            text = "the value cannot be written in place"
            raise UsageError(text, name=self.name, remedy="give a writable array without overlapping elements")
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
        size = self.dtype.itemsize
        if not 0 <= start <= stop <= self.nbytes or start % size or stop % size or len(data) != stop - start:
            raise ValueError(f"bytes [{start}, {stop}) of {self.nbytes} do not fit {len(data)} bytes of {self.dtype}")

    def _pieces(self, start: int, stop: int, data: Bytes) -> Iterator[tuple[Array, Bytes]]:
        size = self.dtype.itemsize
        array = self.array
        # Integers are copied bit for bit in every layout, on every device. A lazy tensor must be read as what it is, so
        # that torch conjugates or negates it.
        if not self.is_torch:
            array = array.view(f"u{size}") if size <= 8 else array
        elif not is_lazy(array):
            array = array.view(integer_dtype(size) or array.dtype)
        # One dimension needs no recursion over rows.
        if self.is_torch and array.is_contiguous():
            array = array.reshape(-1)
        begin = 0
        for piece in slices(array, start // size, stop // size):
            end = begin + math.prod(piece.shape) * size
            yield piece, data[begin:end]
            begin = end


class _Memory:
    """Shows numpy the memory of a contiguous tensor, and keeps it alive."""

    def __init__(self, tensor: "torch.Tensor", nbytes: int) -> None:
        # `Tensor.numpy` would do so, too, but torch then refuses to resize the tensor for ever, which FSDP does.
        self._tensor = tensor
        address = tensor.data_ptr(), False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": address}


def _check_memory(name: str, tensor: "torch.Tensor") -> None:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # torch does not check this when memory is read.
    if (tensor.storage_offset() + last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        text = "its memory was freed or made smaller, as FSDP does with parameters that it does not use at the moment"
        remedy = "save a full or sharded state dict of torch.distributed.checkpoint.state_dict, which gathers them"
        raise UnsupportedLeafError(text, name=name, remedy=remedy)


def check_plain(name: str, tensor: "torch.Tensor") -> None:
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
            problem = "a DTensor, sharded over the ranks,"
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
    """Uninitialised memory; 0-d for a numpy scalar. Raises UnsupportedError for an unknown dtype; OutOfMemoryError."""
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


def check_device(device: Device) -> None:
    """Raises UsageError if tensors cannot be allocated on a device, before anything is read."""
    if device is None:
        return
    import torch

    try:
        torch.empty(1, device=device)
    # A build of torch without CUDA raises an AssertionError.
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        message = str(error).splitlines()[0]
        text = f"tensors cannot be allocated on device {str(device)!r}: {message}"
        raise UsageError(text, remedy='give "cpu", or a device that torch finds here') from None


# The CUDA streams of copies in other threads.


def wait_for_caller(leaves: Iterable[Leaf]) -> None:
    """Wait for the caller's kernels on the leaves' devices; call it in the caller's thread."""
    # Every thread has its own current stream. Inside ``with torch.cuda.stream(s)`` the caller's kernels run on ``s``,
    # while the threads that gather and scatter copy on the default stream, which does not wait for ``s``.
    for device in _cuda_devices(leaves):
        import torch

        torch.cuda.current_stream(device).synchronize()


def wait_for_copies(leaves: Iterable[Leaf]) -> None:
    for device in _cuda_devices(leaves):
        import torch

        # The threads that scatter copy on the default streams; each thread would otherwise have to wait itself.
        torch.cuda.default_stream(device).synchronize()


def on_cuda(leaves: Iterable[Leaf]) -> bool:
    return bool(_cuda_devices(leaves))


def side_stream(source: Source) -> AbstractContextManager[Any]:
    """Let this thread copy a leaf on a stream of its own; call `wait_for_caller` before."""
    if not isinstance(source, Leaf) or not source.is_torch or not source.array.is_cuda:
        return nullcontext()
    import torch

    device = source.array.device
    if device not in _side_streams.by_device:
        _side_streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The copy does not wait for kernels queued later on the default stream, nor delay them.
    return torch.cuda.stream(_side_streams.by_device[device])


class _SideStreams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_side_streams = _SideStreams()


def _cuda_devices(leaves: Iterable[Leaf]) -> "set[torch.device]":
    return {leaf.array.device for leaf in leaves if leaf.is_torch and leaf.array.is_cuda}


# Converting the stored elements of a tensor while they are written into its memory.

# A torch dtype or its name; None keeps the dtype of every tensor.
DTypeLike: TypeAlias = "torch.dtype | str | None"


def float_dtype(dtype: DTypeLike) -> DType:
    """Raises UsageError if it is not a floating point dtype of torch."""
    name = str(dtype).removeprefix("torch.")
    floats = [each.name for each in BY_NAME.values() if each.kind == "float" and each.has_torch]
    if name not in floats:
        text = f"{name!r} is not a floating point dtype of torch"
        raise UsageError(text, remedy=did_you_mean(name, floats, "give one of"))
    return BY_NAME[name]


@dataclass(slots=True)
class CastLeaf(Leaf):
    """A stream of elements of ``dtype`` that are written into a new tensor of another dtype, ``array``."""

    def host_bytes(self) -> Bytes | None:
        # So that readers decode into a buffer, and call `write`.
        return None

    def write(self, start: int, stop: int, data: Bytes) -> None:
        import torch

        size = self.dtype.itemsize
        elements = torch.from_numpy(data).view(self.dtype.torch)
        self.array.view(-1)[start // size : stop // size].copy_(elements)
