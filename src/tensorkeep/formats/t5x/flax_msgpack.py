"""Flax's msgpack, the encoding of T5X's ``checkpoint`` file.

It stores plain values, and those of numpy in three extension types. Type 1 is an array: msgpack of its shape, the name
of its dtype, and its bytes in C order. Type 2 is a complex number, type 3 a numpy scalar (an array without dimensions).
An array of more than 2**30 bytes is split: a dict with the key ``__msgpack_chunked_array__``, its shape, and flat
arrays under ``chunks``; lists are dicts with keys "0", "1"... The format is that of ``flax/serialization.py``.
"""

from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.state.dtypes import BY_NAME

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
CHUNKED = "__msgpack_chunked_array__"
MAX_ARRAY_BYTES = 2**30
"""Of an array that is not split."""


def encode(value: object) -> bytes:
    """Return the msgpack of a tree of dicts, lists, plain values and numpy arrays.

    Raises OverflowError if an integer has more than 64 bits.

    Examples
    --------
    >>> decode(encode({"step": np.int32(3), "rate": 0.5}))
    {'step': np.int32(3), 'rate': 0.5}
    """
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _pack(value)) if value.nbytes <= MAX_ARRAY_BYTES else _split(value)
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_SCALAR, _pack(np.asarray(value)))
    raise NotImplementedError(f"msgpack cannot hold a {type(value).__name__}")


def _pack(array: npt.NDArray[Any]) -> bytes:
    return msgspec.msgpack.encode((array.shape, array.dtype.name, array.tobytes("C")))


def _split(array: npt.NDArray[Any]) -> dict[str, Any]:
    flat = array.reshape(-1)
    step = max(1, MAX_ARRAY_BYTES // array.itemsize)
    pieces = [flat[start : start + step] for start in range(0, flat.size, step)]
    return {CHUNKED: True, "shape": _numbered(list(array.shape)), "chunks": _numbered(pieces)}


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def decode(content: bytes) -> Any:
    """Return the value that `encode` was given; tuples come back as lists, split arrays as dicts (see `join`).

    Raises CorruptCheckpointError if it is not valid msgpack, or an array in it is malformed; UnsupportedError if it has
    an unknown extension type or dtype.
    """
    try:
        return msgspec.msgpack.decode(content, ext_hook=_decode)
    except TensorkeepError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"is not msgpack as Flax writes it ({error})") from error


def _decode(code: int, data: memoryview) -> Any:
    if code == _COMPLEX:
        real, imaginary = msgspec.msgpack.decode(data, type=tuple[float, float])
        return complex(real, imaginary)
    if code not in (_ARRAY, _SCALAR):
        raise UnsupportedError(f"holds the msgpack extension type {code}, which Flax does not write")
    shape, name, content = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], str, bytes])
    dtype = BY_NAME.get(name)
    if dtype is None or not dtype.has_numpy:
        raise UnsupportedError(f"holds an array of dtype {name!r}, which is not supported")
    if len(shape) > 32 or any(length < 0 for length in shape) or prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content):,} bytes for a {name} array of shape {list(shape)}")
    array = np.frombuffer(content, dtype.numpy).reshape(shape)
    if code == _SCALAR and shape:
        raise ValueError("a scalar has dimensions")
    # A copy, because an array over bytes is read-only.
    return array[()] if code == _SCALAR else array.copy()


def is_split(value: Any) -> bool:
    """Return whether a value is an array that `encode` has split."""
    return isinstance(value, dict) and value.get(CHUNKED) is True


def join(value: dict[str, Any]) -> npt.NDArray[Any]:
    """Return an array that was split.

    Raises ValueError if the pieces do not make up the shape.
    """
    shape, pieces = _listed(value.get("shape")), _listed(value.get("chunks"))
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > 32:
        raise ValueError("a split array has no valid shape")
    if not pieces or not all(isinstance(piece, np.ndarray) and piece.ndim == 1 for piece in pieces):
        raise ValueError("a split array has no valid pieces")
    if len({piece.dtype for piece in pieces}) > 1 or sum(piece.size for piece in pieces) != prod(shape):
        raise ValueError("the pieces of a split array do not make up its shape")
    return np.concatenate(pieces).reshape(shape)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, dict) or set(value) != {str(index) for index in range(len(value))}:
        raise ValueError("the pieces of a split array are not numbered")
    return [value[str(index)] for index in range(len(value))]
