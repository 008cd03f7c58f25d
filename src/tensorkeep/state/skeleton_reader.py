"""Skeleton -> state: the value of each node; ``skeleton_writer.py`` lists the nodes.

Skeletons come from untrusted files. A malformed one raises `ValueError` and nothing else; one that needs a class that
is not registered in this process raises `UnsupportedError`.
"""

import dataclasses
import enum
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tensorkeep.errors import UnsupportedError
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.leaf import LEAF_KINDS, LeafKind
from tensorkeep.state.registry import is_namedtuple, registered_class
from tensorkeep.state.scalars import (
    brief,
    check_text,
    decode_bytes,
    decode_float,
    decode_int,
    decode_key,
    decode_long_int,
)
from tensorkeep.state.strided import Array

T = TypeVar("T")

MAX_DEPTH = 128
"""The deepest nesting of containers, both when saving and when loading."""

_AS_SAVED = "register the class as it was when the state was saved"


class LeafSpec(NamedTuple):
    """What a skeleton records of a leaf: its kind, and whether it tracks gradients."""

    kind: LeafKind
    requires_grad: bool


class SkeletonReader:
    """Decodes one skeleton; ``leaf_specs`` has the leaves decoded so far, in order.

    Without ``values`` the skeleton is only checked: leaves and registered objects decode to None. The values
    of ``as_is`` are used unchanged, whatever kinds the skeleton records.
    """

    def __init__(self, values: Mapping[str, Array] | None, *, as_is: Collection[str] = ()) -> None:
        self.leaf_specs: dict[str, LeafSpec] = {}
        self._values = values
        self._as_is = as_is
        self._finished: dict[tuple[int, LeafSpec], tuple[Array, Any]] = {}

    def decode(self, node: object, depth: int = 0) -> Any:
        """Return a node's value; raises ValueError or UnsupportedError."""
        if node is None or isinstance(node, int):  # A bool is an int.
            return node
        if isinstance(node, str):
            return check_text(node)
        if depth > MAX_DEPTH:
            raise ValueError(f"the state is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, list):
            return [self.decode(child, depth + 1) for child in node]
        if not isinstance(node, dict) or not node:
            raise ValueError(f"{brief(node)} is not a node")
        tag = next(iter(node))
        if tag in LEAF_KINDS:
            return self._leaf(node, tag)
        is_ordered = tag in ("ordered", "ordered_items")
        if tag not in _DECODERS or node.keys() - {tag} - ({"_metadata"} if is_ordered else set()):
            raise ValueError(f"{brief(node)} is not a node")
        value = _DECODERS[tag](self, node[tag], depth)
        if "_metadata" in node:
            value._metadata = self.decode(node["_metadata"], depth + 1)
        return value

    def _leaf(self, node: dict[str, object], kind: LeafKind) -> Any:
        name = check_text(node[kind])
        grad = node.get("requires_grad", kind == "parameter")
        is_plain = len(node) == 1 or (kind in ("tensor", "parameter") and node.keys() == {kind, "requires_grad"})
        if not name or not isinstance(grad, bool) or not is_plain:
            raise ValueError(f"{brief(node)} is not a leaf")
        if name in self.leaf_specs:
            raise ValueError(f"two leaves are called {name!r}")
        spec = self.leaf_specs[name] = LeafSpec(kind, grad)
        if self._values is None:
            return None
        if name not in self._values:
            raise ValueError(f"there is no data for the leaf {name!r}")
        value = self._values[name]
        if name in self._as_is:
            return value
        identity = (id(value), spec)
        if identity not in self._finished:
            # The value is kept, so that no later one can have its id.
            self._finished[identity] = value, _finish(value, name, spec)
        return self._finished[identity][1]

    def _dict(self, body: object, depth: int) -> dict[str, Any]:
        return {check_text(key): self.decode(child, depth + 1) for key, child in _expect(dict, body).items()}

    def _items(self, body: object, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_node, child in map(_pair, _expect(list, body)):
            key = decode_key(key_node)
            if key in result:
                raise ValueError(f"the key {brief(key_node)} is in one dict twice")
            result[key] = self.decode(child, depth + 1)
        return result

    def _namedtuple(self, body: object, depth: int) -> Any:
        name, fields = _pair(body)
        values = self._dict(fields, depth)
        return namedtuple_class(check_text(name), tuple(values))._make(values.values())

    def _registered(self, body: object, depth: int) -> Any:
        name, fields = _pair(body)
        check_text(name)
        values = self._dict(fields, depth)
        if self._values is None:
            return None
        cls = registered_class(name)
        if is_namedtuple(cls):
            names = cls._fields
        elif dataclasses.is_dataclass(cls):
            names = tuple(field.name for field in dataclasses.fields(cls))
        else:
            raise UnsupportedError(f"{name} is no longer a dataclass or a named tuple", remedy=_AS_SAVED)
        if set(values) != set(names):
            raise UnsupportedError(
                f"{name} has the fields {', '.join(names)}, but was saved with {', '.join(values)}", remedy=_AS_SAVED
            )
        if is_namedtuple(cls):
            return cls._make(values[field] for field in names)
        instance = object.__new__(cls)
        for field, value in values.items():
            object.__setattr__(instance, field, value)  # Also of frozen dataclasses.
        return instance

    def _enum(self, body: object, depth: int) -> Any:
        name, member = _pair(body)
        check_text(name)
        key = check_text(member) if isinstance(member, str) else decode_int(member)
        if self._values is None:
            return None
        cls = registered_class(name)
        if not issubclass(cls, enum.Enum):
            raise UnsupportedError(f"{name} is no longer an enum", remedy=_AS_SAVED)
        try:
            return cls[key] if isinstance(key, str) else cls(key)
        except (KeyError, ValueError):
            raise UnsupportedError(f"{name} has no member {key!r}", remedy=_AS_SAVED) from None


@lru_cache(maxsize=256)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return a named tuple class; ValueError if a name is not an identifier.

    Cached, so that the named tuples of one kind have one class, in one state and in several loads.
    """
    return namedtuple(name, fields)


def _finish(value: Array, name: str, spec: LeafSpec) -> Any:
    """Return a leaf's data as the value that the state had: a scalar, a parameter, a tensor that tracks gradients."""
    kind, grad = spec
    if kind in ("ndarray", "npscalar"):
        if not isinstance(value, np.ndarray) or (kind == "npscalar" and value.shape):
            raise ValueError(f"the data of the leaf {name!r} is not that of a {kind}")
        return value if kind == "ndarray" else value[()]
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the data of the leaf {name!r} is not that of a {kind}")
    cls = torch.nn.Parameter if kind == "parameter" else torch.Tensor
    if type(value) is cls and value.requires_grad == grad:
        return value
    try:
        if kind == "parameter":
            return torch.nn.Parameter(value.detach(), requires_grad=grad)
        return value.detach().requires_grad_(grad)
    except RuntimeError as error:
        raise ValueError(f"the leaf {name!r} cannot track gradients: {error}") from None


def _expect(cls: type[T], body: object) -> T:
    if not isinstance(body, cls):
        raise ValueError(f"{brief(body)} is not a JSON {'array' if cls is list else 'object'}")
    return body


def _pair(body: object) -> tuple[Any, Any]:
    items = _expect(list, body)
    if len(items) != 2:
        raise ValueError(f"{brief(body)} is not a pair")
    return items[0], items[1]


def _range(body: object) -> range:
    numbers = [decode_int(node) for node in _expect(list, body)]
    if len(numbers) != 3:
        raise ValueError("a range needs three numbers")
    return range(*numbers)


def _set(body: object) -> set[Any]:
    keys = [decode_key(node) for node in _expect(list, body)]
    if len(set(keys)) != len(keys):
        raise ValueError("an element is in one set twice")
    return set(keys)


def _placeholder(body: object) -> Placeholder:
    texts = [check_text(text) for text in _expect(list, body)]
    if len(texts) != 3:
        raise ValueError("a placeholder needs three texts")
    return Placeholder(*texts)


def _size(body: object) -> Any:
    import torch

    lengths = _expect(list, body)
    if not all(type(length) is int and -(2**63) <= length < 2**63 for length in lengths):
        raise ValueError(f"{brief(body)} is not a size")
    return torch.Size(lengths)


def _dtype(body: object) -> Any:
    import torch

    found = getattr(torch, check_text(body), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{brief(body)} is not a torch dtype")
    return found


def _device(body: object) -> Any:
    import torch

    try:
        return torch.device(check_text(body))
    except RuntimeError:
        raise ValueError(f"{brief(body)} is not a torch device") from None


_DECODERS: dict[str, Callable[[SkeletonReader, Any, int], Any]] = {
    "int": lambda reader, body, depth: decode_long_int(body),
    "float": lambda reader, body, depth: decode_float(body),
    "complex": lambda reader, body, depth: complex(*map(decode_float, _pair(body))),
    "bytes": lambda reader, body, depth: decode_bytes(body),
    "bytearray": lambda reader, body, depth: bytearray(decode_bytes(body)),
    "range": lambda reader, body, depth: _range(body),
    "set": lambda reader, body, depth: _set(body),
    "frozenset": lambda reader, body, depth: frozenset(_set(body)),
    "size": lambda reader, body, depth: _size(body),
    "dtype": lambda reader, body, depth: _dtype(body),
    "device": lambda reader, body, depth: _device(body),
    "placeholder": lambda reader, body, depth: _placeholder(body),
    "enum": SkeletonReader._enum,
    "tuple": lambda reader, body, depth: tuple(reader.decode(_expect(list, body), depth)),
    "dict": SkeletonReader._dict,
    "items": SkeletonReader._items,
    "counter": lambda reader, body, depth: Counter(reader._items(body, depth)),
    "ordered": lambda reader, body, depth: OrderedDict(reader._dict(body, depth)),
    "ordered_items": lambda reader, body, depth: OrderedDict(reader._items(body, depth)),
    "namedtuple": SkeletonReader._namedtuple,
    "object": SkeletonReader._registered,
}
