"""Which TensorStore dtype each of ours is stored as, and how one becomes the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME, DType

# As TensorStore 0.1.86 says; a test asks it.
TENSORSTORE_LACKS = frozenset(
    ("complex32", "float4_e2m1fn_x2", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn", "uint4", "uint2")
)
_STAND_INS = {1: "uint8", 2: "uint16", 4: "uint32"}


@dataclass(frozen=True, slots=True)
class StoredType:
    """What elements of a dtype are in an array's files.

    Attributes
    ----------
    dtype : DType
        What they are in the state.
    stored : DType
        What they are in the files: the same, or float32, or, where TensorStore lacks the dtype, unsigned integers of
        its size that hold the same bits.
    """

    dtype: DType
    stored: DType

    @property
    def converts(self) -> bool:
        """Whether values are converted, rather than bits kept."""
        return self.dtype is not self.stored and self.stored.name == "float32"

    def to_stored(self, data: Bytes) -> npt.NDArray[Any]:
        """Return elements as they are stored; a view of the same memory unless values are converted."""
        if not self.converts:
            return data.view(self.stored.numpy)
        # What is beyond the range becomes infinite, as everywhere.
        with np.errstate(over="ignore", invalid="ignore"):
            return data.view(self.dtype.numpy).astype(np.float32)

    def from_stored(self, array: npt.NDArray[Any]) -> Bytes:
        """Return the bytes of the state's elements for a C-contiguous array of stored ones."""
        flat = array.reshape(-1)
        if self.converts:
            with np.errstate(over="ignore", invalid="ignore"):
                flat = flat.astype(self.dtype.numpy)
        return flat.view(np.uint8)


def stored_type(dtype: DType, wanted: str = "keep") -> StoredType:
    """Return how a dtype is stored, where ``wanted`` is ``"keep"`` or ``"float32"``."""
    if wanted == "float32" and dtype.kind == "float" and dtype.has_numpy:
        return StoredType(dtype, BY_NAME["float32"])
    if dtype.name in TENSORSTORE_LACKS:
        return StoredType(dtype, BY_NAME[_STAND_INS[dtype.itemsize]])
    return StoredType(dtype, dtype)


def is_possible(found: StoredType) -> bool:
    """Say whether a dtype may be stored as the other, for what a file claims."""
    return found in (stored_type(found.dtype), stored_type(found.dtype, "float32"))
