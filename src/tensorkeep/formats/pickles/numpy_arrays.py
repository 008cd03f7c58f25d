"""Arrays and scalars of numpy in pickles, rebuilt from recorded arguments; nothing that a pickle names is called."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorkeep.formats.pickles.inert_pickle import Call, Global
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMPY = {
    "numpy.dtype",
    "numpy.ndarray",
    *(f"{module}.{name}" for module in _MODULES for name in ("scalar", "_reconstruct")),
}
"""What rebuilds arrays and scalars; allowed together as "numpy"."""

_REMEDY = "save strings and objects as lists of plain values, e.g. x.tolist()"


def _dtype(call: Any) -> np.dtype[Any] | None:
    """Return a recorded dtype; None if its elements are not numbers."""
    if type(call) is not Call or str(call.function) != "numpy.dtype" or not call.args:
        raise ValueError("an array has no dtype")
    kind = call.args[0]
    if type(kind) is Global and kind.module == "ml_dtypes" and kind.name in BY_NAME:
        return BY_NAME[kind.name].numpy
    if type(kind) is not str or not re.fullmatch(r"[biufc]\d{1,2}|\?", kind):
        return None
    dtype: np.dtype[Any] = np.dtype(kind)
    is_big_endian = type(call.state) is tuple and len(call.state) > 1 and call.state[1] == ">"
    return dtype.newbyteorder(">") if is_big_endian else dtype


def _elements(dtype: np.dtype[Any], content: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if type(content) is str:  # bytes of Python 2
        content = content.encode("utf-8", "surrogateescape")
    if type(content) not in (bytes, bytearray):
        raise ValueError("an array has no elements")
    # A copy, in memory that may be written.
    return np.frombuffer(content, dtype).astype(dtype.newbyteorder("="))


def _array(call: Call) -> Any:
    if not call.args or str(call.args[0]) != "numpy.ndarray" or type(call.state) is not tuple:
        return Placeholder("", f"an array of the class {call.args[0]}", "save np.asarray(x)")
    shape, kind, is_fortran, content = call.state[-4:]
    dtype = _dtype(kind)
    if dtype is None:
        return Placeholder("", "an array of strings, objects, times or records", _REMEDY)
    return _elements(dtype, content).reshape(shape, order="F" if is_fortran else "C")


def _scalar(call: Call) -> Any:
    dtype = _dtype(call.args[0])
    if dtype is None:
        return Placeholder("", "a numpy scalar that is not a number", _REMEDY)
    (found,) = _elements(dtype, call.args[1])
    return found


REBUILD_NUMPY: dict[str, Callable[[Call], Any]] = {
    "_reconstruct": _array,
    "scalar": _scalar,
    "dtype": lambda call: Placeholder("", "a numpy dtype", "save its name"),
    "ndarray": lambda call: Placeholder("", "an array that was made by a call", _REMEDY),
}
"""By the last part of the name of the class or function."""
