"""Which tensors and arrays can be stored, and what to do about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.state import dtypes
from tensorkeep.state.dtypes import DType

if TYPE_CHECKING:
    import torch


def numpy_dtype(name: str, dtype: np.dtype[Any]) -> DType:
    """Return the table's entry of a numpy dtype; UnsupportedLeafError if it has none."""
    found = dtypes.of_numpy(dtype)
    if found is not None and dtype.isnative and dtype.fields is None:
        return found
    if not dtype.isnative:
        remedy = "convert it with x.astype(x.dtype.newbyteorder('='))"
    elif dtype.kind in "OUST":
        remedy = "save strings and objects as lists of plain values, e.g. x.tolist()"
    elif dtype.kind in "Mm":
        remedy = "save x.view('int64') and the unit"
    elif dtype.fields is not None:
        remedy = "save each field as an array of its own"
    else:
        remedy = "convert it to a dtype that torch or ml_dtypes has"
    raise UnsupportedLeafError(f"numpy dtype {dtype} cannot be saved", name=name, remedy=remedy)


def torch_dtype(name: str, dtype: torch.dtype) -> DType:
    """Return the table's entry of a torch dtype; UnsupportedLeafError if it has none."""
    found = dtypes.of_torch(dtype)
    if found is None:
        raise UnsupportedLeafError(
            f"a tensor of {dtype} cannot be saved", name=name, remedy="convert it to a dtype of whole bytes"
        )
    return found


def refuse_array(name: str, array: npt.NDArray[Any]) -> None:
    """Raise UnsupportedLeafError for a subclass of ndarray, memory maps excepted."""
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedLeafError(
            f"{type(array).__name__} is a subclass of numpy.ndarray",
            name=name,
            remedy="save np.asarray(x), and what the subclass adds (such as a mask) beside it",
        )


def refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedLeafError for a tensor that is not plain strided memory."""
    import torch
    from torch.nn.parameter import is_lazy

    problem = remedy = None
    if tensor.layout is not torch.strided:
        problem, remedy = f"a tensor of layout {tensor.layout}", "save x.to_dense(), or its indices and values"
    elif tensor.is_nested:
        problem, remedy = "a nested tensor", "save x.unbind() as a list"
    elif is_lazy(tensor):
        problem, remedy = "a lazy parameter without data", "run the module once before saving"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"the tensor subclass {type(tensor).__name__}"
        remedy = "save what it is made of as plain tensors: x.to_local() or x.full_tensor() of a DTensor, "
        remedy += "x.dequantize() of a quantised one"
    elif tensor.is_quantized:
        problem, remedy = "a quantised tensor", "save x.int_repr() with its scale and zero point, or x.dequantize()"
    elif tensor.is_meta:
        problem, remedy = "a tensor on the meta device, which has no data", "materialise it first"
    if problem:
        raise UnsupportedLeafError(f"{problem} cannot be saved", name=name, remedy=remedy)
