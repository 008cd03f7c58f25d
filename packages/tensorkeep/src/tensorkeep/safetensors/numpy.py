"""Drop-in for ``safetensors.numpy``: numpy arrays in safetensors files and bytes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Bound at import, because users may replace these functions by ours.
from safetensors.numpy import save as serialize

from tensorkeep.errors import PathLike
from tensorkeep.safetensors.file import (
    bytes_of_file,
    checked_tensors,
    safe_open,
    safetensor_errors,
    tensors_in,
    write_file,
)
from tensorkeep.state.aliases import find_aliases
from tensorkeep.state.leaf import Leaf

__all__ = ["load", "load_file", "save", "save_file"]

Arrays = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


def save_file(tensor_dict: Arrays, filename: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Save arrays as one safetensors file of any name; see `tensorkeep.safetensors.torch.save_file`."""
    with safetensor_errors():
        write_file(_native(tensor_dict), filename, metadata)


def load_file(filename: PathLike, *, backend: str = "mmap") -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Load the arrays of a safetensors file; see `tensorkeep.safetensors.torch.load_file`."""
    with safe_open(filename, framework="np", backend=backend) as file:
        return file.get_tensors()


def save(tensor_dict: Arrays, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as the bytes of a safetensors file.

    Examples
    --------
    >>> import numpy as np
    >>> from tensorkeep.safetensors.numpy import load, save
    >>> load(save({"w": np.ones(2)}))
    {'w': array([1., 1.])}
    """
    with safetensor_errors():
        found = _native(tensor_dict)
        return bytes_of_file(serialize, found, metadata)


def load(data: bytes) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return the arrays in the bytes of a safetensors file; SafetensorError for other bytes."""
    return tensors_in(data, "np")


def _native(arrays: Arrays) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return checked arrays in this machine's byte order and in C order; arrays that share memory are copied."""
    checked = checked_tensors(arrays, np.ndarray)
    found = {name: np.asarray(each, each.dtype.newbyteorder("="), order="C") for name, each in checked.items()}
    # A safetensors file stores each tensor under one name, so views become copies.
    shared = find_aliases(leaf for name, each in found.items() if (leaf := Leaf.of(name, each)) is not None)
    return {name: each.copy() if name in shared else each for name, each in found.items()}
