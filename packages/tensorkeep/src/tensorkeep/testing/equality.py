"""Compares two states exactly: types, structure, order, dtypes, shapes and every bit."""

import dataclasses
import struct
from collections import OrderedDict
from typing import Any

import numpy as np

from tensorkeep.state.leaf import Leaf
from tensorkeep.state.names import key_text


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal in every bit."""
    return difference(a, b) is None


# ``==`` cannot do that: NaN differs from itself, 0.0 equals -0.0, ``1 == True``, and tensors have no truth value.
def difference(a: Any, b: Any, path: str = "state") -> str | None:
    """Describe the first difference between two states; None if they are equal.

    Named tuples of the same name and fields are one type, because `load` creates classes for unregistered ones.
    """
    if _type(a) != _type(b):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    leaf = Leaf.of(path, a)
    if leaf is not None:
        other = Leaf.of(path, b)
        assert other is not None
        return _leaf_difference(leaf, other)
    if isinstance(a, dict):
        return _dict_difference(a, b, path)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: lengths {len(a)} and {len(b)}"
        return _first(difference(x, y, f"{path}[{index}]") for index, (x, y) in enumerate(zip(a, b, strict=True)))
    if isinstance(a, set | frozenset):
        equal = {_scalar(item) for item in a} == {_scalar(item) for item in b}
        return None if equal else f"{path}: {a!r} and {b!r}"
    if dataclasses.is_dataclass(a):
        fields = [field.name for field in dataclasses.fields(a)]
        return _first(difference(getattr(a, name), getattr(b, name), f"{path}.{name}") for name in fields)
    return None if _scalar(a) == _scalar(b) else f"{path}: two different values of type {type(a).__name__}"


def leaf_bytes(value: Any) -> bytes:
    """Return the bytes of a tensor or array in C order; slow, but independent of `tensorkeep.state`, to check it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    import torch

    tensor = value.detach()
    # Conjugation and negation are flags of a tensor: its storage then has other values. A copy resolves them.
    resolved = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_conj() or tensor.is_neg() else None
    )
    source = tensor.cpu() if resolved is None else resolved.copy_(tensor)
    storage = bytes(source.untyped_storage())
    size = source.element_size()
    parts = []
    for index in np.ndindex(tuple(source.shape)):
        position = source.storage_offset() + sum(i * stride for i, stride in zip(index, source.stride(), strict=True))
        parts.append(storage[position * size : (position + 1) * size])
    return b"".join(parts)


def _leaf_difference(a: Leaf, b: Leaf) -> str | None:
    for what in ("kind", "dtype", "shape", "requires_grad"):
        if getattr(a, what) != getattr(b, what):
            return f"{a.name}: {what} {getattr(a, what)} and {getattr(b, what)}"
    return None if _stream(a) == _stream(b) else f"{a.name}: the bits differ"


def _stream(leaf: Leaf) -> bytes:
    out = np.empty(leaf.nbytes, np.uint8)
    leaf.read(0, leaf.nbytes, out)
    return out.tobytes()


def _dict_difference(a: dict[Any, Any], b: dict[Any, Any], path: str) -> str | None:
    if [_scalar(key) for key in a] != [_scalar(key) for key in b]:
        return f"{path}: keys {[*map(key_text, a)]} and {[*map(key_text, b)]}"
    found = _first(
        difference(x, y, f"{path}[{key_text(key)}]") for key, x, y in zip(a, a.values(), b.values(), strict=True)
    )
    if found is None and isinstance(a, OrderedDict):
        # A state dict has the ``_metadata`` of a module as an attribute.
        return difference(dict(vars(a)), dict(vars(b)), f"{path}.__dict__")
    return found


def _first(differences: Any) -> str | None:
    return next((found for found in differences if found is not None), None)


def _type(value: Any) -> object:
    cls = type(value)
    fields = getattr(cls, "_fields", None)
    # `load` creates classes for named tuples that are not registered, so names and fields decide.
    return (cls.__name__, fields) if isinstance(value, tuple) and fields is not None else cls


def _scalar(value: Any) -> object:
    if isinstance(value, float):
        # By bits, with the type: 1, 1.0 and True are equal and have one hash.
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    return type(value), value
