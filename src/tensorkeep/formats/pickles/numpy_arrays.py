"""Arrays and scalars of numpy in pickles, rebuilt from recorded arguments; nothing that a pickle names is called."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorkeep.formats.pickles.inert_pickle import Call, Global, name_of
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME

_MODULES = ("numpy.core", "numpy._core")
NUMPY = {
    "numpy.dtype",
    "numpy.ndarray",
    *(f"{module}.multiarray.{name}" for module in _MODULES for name in ("scalar", "_reconstruct")),
    *(f"{module}.numeric._frombuffer" for module in _MODULES),
}
"""What rebuilds arrays and scalars; allowed together as "numpy"."""

_REMEDY = "save strings and objects as lists of plain values, e.g. x.tolist()"


def _dtype(call: Any) -> np.dtype[Any] | None:
    """Return a recorded dtype; None if its elements are not numbers."""
    if type(call) is not Call or name_of(call.function) != "numpy.dtype" or not call.args:
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
    kind = name_of(call.args[0])
    if kind != "numpy.ndarray" or type(call.state) is not tuple:
        return Placeholder("", f"an array of the class {kind or '...'}", "save np.asarray(x)")
    shape, dtype, is_fortran, content = call.state[-4:]
    return _shaped(content, dtype, shape, "F" if is_fortran else "C")


def _from_buffer(call: Call) -> Any:
    """Return an array that protocol 5 of pickle wrote."""
    content, dtype, shape, order = call.args
    return _shaped(content, dtype, shape, order)


def _shaped(content: Any, kind: Any, shape: Any, order: Any) -> Any:
    dtype = _dtype(kind)
    if dtype is None:
        return Placeholder("", "an array of strings, objects, times or records", _REMEDY)
    return _elements(dtype, content).reshape(shape, order=order)


def _scalar(call: Call) -> Any:
    dtype = _dtype(call.args[0])
    if dtype is None:
        return Placeholder("", "a numpy scalar that is not a number", _REMEDY)
    (found,) = _elements(dtype, call.args[1])
    return found


REBUILD_NUMPY: dict[str, Callable[[Call], Any]] = {
    "_reconstruct": _array,
    "_frombuffer": _from_buffer,
    "scalar": _scalar,
    "dtype": lambda call: Placeholder("", "a numpy dtype", "save its name"),
    "ndarray": lambda call: Placeholder("", "an array that was made by a call", _REMEDY),
}
"""By the last part of the name of the class or function."""
