"""Strided memory as a stream: ranges of the elements of any layout, in C order.

A range is split by recursion over the leading dimension (the end of a row, whole rows, the start of a row), so that
gathering it needs extra memory of the range's size, not of the array's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Array = Any
"""A ``torch.Tensor`` or a ``numpy.ndarray``."""
Device: TypeAlias = "torch.device | str | None"
"""The device of new tensors; the CPU if it is None."""


def may_overlap(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether two elements could share memory; exact for every layout that slicing produces."""
    if 0 in shape:
        return False
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
    """Return whether the tensor is conjugated or negated on reading, so that its memory has other values."""
    return tensor.is_conj() or tensor.is_neg()


def integer_dtype(itemsize: int) -> "torch.dtype | None":
    """Return torch's integer dtype of that many bytes; None for 16."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(itemsize)


def as_integers(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a view as integers, which is copied bit for bit in every layout, on every device; complex128 as it is."""
    carrier = integer_dtype(tensor.element_size())
    return tensor if carrier is None else tensor.view(carrier)


def as_unsigned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of a numpy array that is copied bit for bit."""
    return array.view(f"u{array.itemsize}") if array.itemsize <= 8 else array


def gather_tensor(piece: "torch.Tensor", out: Bytes) -> None:
    """Copy a tensor of any layout into its bytes."""
    import torch

    target = torch.from_numpy(out)
    if out.ctypes.data % piece.element_size():
        whole = torch.empty(piece.shape, dtype=piece.dtype).copy_(piece)
        target.copy_(whole.reshape(-1).view(torch.uint8))
    else:
        target.view(piece.dtype).reshape(piece.shape).copy_(piece)


def scatter_tensor(piece: "torch.Tensor", data: Bytes) -> None:
    """Copy bytes into a tensor of any layout."""
    import torch

    aligned = data.ctypes.data % piece.element_size() == 0 and data.flags.writeable
    source = torch.from_numpy(data if aligned else data.copy())
    with torch.inference_mode() if piece.is_inference() else torch.no_grad():
        piece.copy_(source.view(piece.dtype).reshape(piece.shape))
