"""The table of dtypes: their names (torch's or ml_dtypes'), sizes and bits in torch, numpy and safetensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from tensorkeep.errors import UnsupportedError, UnsupportedLeafError

if TYPE_CHECKING:
    import torch

Kind = Literal["float", "int", "uint", "bool", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type; its ``name`` is used in manifests and on the command line."""

    name: str
    itemsize: int  # bytes
    kind: Kind
    safetensors: str | None  # the tag in a header; without one the dtype is stored there as ``U8``, with a note
    exponent_bits: int = 0  # of a float, or of the real part of a complex number
    has_torch: bool = True
    has_numpy: bool = True  # numpy itself or ml_dtypes
    packs: int = 1  # numbers in one element

    def __str__(self) -> str:
        return self.name

    def numbers_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Convert a shape that counts elements to one that counts numbers, as safetensors does."""
        return (*shape[:-1], shape[-1] * self.packs) if shape else shape

    def tag(self, shape: tuple[int, ...]) -> str | None:
        """None if the tensor is stored as ``U8``, with a note."""
        # A dimension to count the numbers in is missing for a single element that packs several.
        return self.safetensors if shape or self.packs == 1 else None

    @property
    def torch(self) -> "torch.dtype":
        """Raises UnsupportedError if torch does not have it."""
        # Here only: headers are read and tables printed without torch.
        import torch

        found = getattr(torch, self.name, None) if self.has_torch else None
        if found is None:
            raise UnsupportedError(f"torch has no dtype {self.name}", remedy="read it as a numpy array instead")
        assert isinstance(found, torch.dtype)
        return found

    @property
    def numpy(self) -> np.dtype[Any]:
        """From ml_dtypes if numpy itself lacks it. Raises UnsupportedError if neither has it."""
        if not self.has_numpy:
            raise UnsupportedError(f"numpy has no dtype {self.name}", remedy="read it as a torch tensor instead")
        return np.dtype(getattr(ml_dtypes, self.name, None) or self.name)


_TABLE = (
    DType("float64", 8, "float", "F64", 11),
    DType("float32", 4, "float", "F32", 8),
    DType("float16", 2, "float", "F16", 5),
    DType("bfloat16", 2, "float", "BF16", 8),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3", 4),
    DType("float8_e5m2", 1, "float", "F8_E5M2", 5),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ", 4),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ", 5),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0", 8),
    DType("int64", 8, "int", "I64"),
    DType("int32", 4, "int", "I32"),
    DType("int16", 2, "int", "I16"),
    DType("int8", 1, "int", "I8"),
    DType("uint64", 8, "uint", "U64"),
    DType("uint32", 4, "uint", "U32"),
    DType("uint16", 2, "uint", "U16"),
    DType("uint8", 1, "uint", "U8"),
    DType("bool", 1, "bool", "BOOL"),
    DType("complex64", 8, "complex", "C64", 8),
    # Not in safetensors.
    DType("complex128", 16, "complex", None, 11),
    DType("complex32", 4, "complex", None, 5, has_numpy=False),
    # Two four-bit floats in a byte: torch counts the bytes, safetensors the floats.
    DType("float4_e2m1fn_x2", 1, "uint", "F4", has_numpy=False, packs=2),
    # Numpy arrays of ml_dtypes: one byte an element, also for the narrower ones.
    DType("float8_e4m3", 1, "float", None, 4, has_torch=False),
    DType("float8_e3m4", 1, "float", None, 3, has_torch=False),
    DType("float8_e4m3b11fnuz", 1, "float", None, 4, has_torch=False),
    DType("float6_e2m3fn", 1, "float", None, 2, has_torch=False),
    DType("float6_e3m2fn", 1, "float", None, 3, has_torch=False),
    DType("float4_e2m1fn", 1, "float", None, 2, has_torch=False),
    DType("int4", 1, "int", None, has_torch=False),
    DType("uint4", 1, "uint", None, has_torch=False),
    DType("int2", 1, "int", None, has_torch=False),
    DType("uint2", 1, "uint", None, has_torch=False),
)

BY_NAME = {dtype.name: dtype for dtype in _TABLE}
_BY_NUMPY = {dtype.numpy: dtype for dtype in _TABLE if dtype.has_numpy}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors is not None}


def of_numpy(dtype: np.dtype[Any]) -> DType | None:
    """None for strings, objects, records, foreign byte orders and the like."""
    return _BY_NUMPY.get(dtype) if dtype.isnative and dtype.fields is None else None


def check_numpy(name: str, dtype: np.dtype[Any]) -> DType:
    """Raises UnsupportedLeafError, with the array's ``name``, if the dtype has no entry."""
    found = of_numpy(dtype)
    if found is not None:
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


def check_torch(name: str, dtype: "torch.dtype") -> DType:
    """Raises UnsupportedLeafError if the dtype has no entry (quantised, sub-byte)."""
    found = BY_NAME.get(str(dtype).removeprefix("torch."))
    if found is not None and found.has_torch:
        return found
    text = f"a tensor of {dtype} cannot be saved"
    raise UnsupportedLeafError(text, name=name, remedy="convert it to a dtype of whole bytes")
