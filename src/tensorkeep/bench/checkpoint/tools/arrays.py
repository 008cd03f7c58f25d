"""Tensors as numpy arrays and back, sharing memory, for the tools that know no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return CPU tensors as arrays of the same dtype; bfloat16 as that of ``ml_dtypes``, which torch does not give."""
    import ml_dtypes
    import torch

    return {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def to_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return arrays as tensors; the inverse of `to_arrays`."""
    import torch

    return {
        name: torch.from_numpy(np.asarray(array).view(np.uint16)).view(torch.bfloat16)
        if array.dtype.name == "bfloat16"
        else torch.from_numpy(np.asarray(array))
        for name, array in arrays.items()
    }
