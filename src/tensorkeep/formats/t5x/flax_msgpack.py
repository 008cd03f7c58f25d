"""The msgpack of Flax, which T5X's ``checkpoint`` file is: plain values, and numpy's through three extension types.

Type 1 is an array: msgpack of its shape, the name of its dtype, and its bytes in C order. Type 2 is a complex number,
type 3 a numpy scalar (as an array without dimensions). An array of more than 2**30 bytes lies in pieces: a dict with
the key ``__msgpack_chunked_array__``, its shape, and flat arrays under ``chunks``; lists in it are dicts of "0", "1"...
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.state.dtypes import BY_NAME

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
CHUNKED = "__msgpack_chunked_array__"
LARGEST_ARRAY = 2**30
"""Bytes of an array that lies in one piece."""


def encode(value: object) -> bytes:
    """Return the bytes of a tree of dicts, lists, plain values and numpy arrays.

    Raises
    ------
    OverflowError
        If an integer has more than 64 bits.
    """
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _packed(value)) if value.nbytes <= LARGEST_ARRAY else _pieces(value)
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_SCALAR, _packed(np.asarray(value)))
    raise NotImplementedError(f"a {type(value).__name__} has no place in msgpack")


def _packed(array: npt.NDArray[Any]) -> bytes:
    return msgspec.msgpack.encode((array.shape, array.dtype.name, array.tobytes("C")))


def _pieces(array: npt.NDArray[Any]) -> dict[str, Any]:
    flat = array.reshape(-1)
    step = max(1, LARGEST_ARRAY // array.itemsize)
    parts = [flat[at : at + step] for at in range(0, flat.size, step)]
    return {CHUNKED: True, "shape": _numbered(list(array.shape)), "chunks": _numbered(parts)}


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def decode(content: bytes) -> Any:
    """Return what `encode` was given; tuples come back as lists.

    Raises
    ------
    CorruptCheckpointError
        If it is no such msgpack.
    UnsupportedError
        If it holds an extension type or a dtype that is not known here.
    """
    try:
        return msgspec.msgpack.decode(content, ext_hook=_decode)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"is no msgpack as Flax writes it ({error})") from error


def _decode(code: int, data: memoryview) -> Any:
    if code == _COMPLEX:
        real, imaginary = msgspec.msgpack.decode(data, type=tuple[float, float])
        return complex(real, imaginary)
    if code not in (_ARRAY, _SCALAR):
        raise UnsupportedError(f"holds the msgpack extension type {code}, which Flax does not know")
    shape, name, content = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], str, bytes])
    dtype = BY_NAME.get(name)
    if dtype is None or not dtype.has_numpy:
        raise UnsupportedError(f"holds an array of dtype {name!r}, which is not known here")
    if len(shape) > 32 or any(length < 0 for length in shape) or prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content):,} bytes are no {name} of shape {list(shape)}")
    array = np.frombuffer(content, dtype.numpy).reshape(shape)
    if code == _SCALAR and shape:
        raise ValueError("a scalar has dimensions")
    # A copy, because what is read from bytes cannot be written to.
    return array[()] if code == _SCALAR else array.copy()


def is_chunked(value: Any) -> bool:
    """Say whether a dict is an array that lies in pieces."""
    return isinstance(value, dict) and value.get(CHUNKED) is True


def join(value: dict[str, Any]) -> npt.NDArray[Any]:
    """Return the array that lies in pieces in a dict.

    Raises
    ------
    ValueError
        If the pieces do not make up the shape.
    """
    shape, chunks = _listed(value.get("shape")), _listed(value.get("chunks"))
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > 32:
        raise ValueError("an array in pieces has no shape")
    if not chunks or not all(isinstance(chunk, np.ndarray) and chunk.ndim == 1 for chunk in chunks):
        raise ValueError("an array in pieces has none")
    if len({chunk.dtype for chunk in chunks}) > 1 or sum(chunk.size for chunk in chunks) != prod(shape):
        raise ValueError("the pieces of an array do not make it up")
    return np.concatenate(chunks).reshape(shape)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, dict) or set(value) != {str(index) for index in range(len(value))}:
        raise ValueError("an array in pieces is not numbered")
    return [value[str(index)] for index in range(len(value))]
