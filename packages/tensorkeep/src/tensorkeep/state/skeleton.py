"""Skeletons: the structure and plain values of a state as JSON, written, checked and read back.

A malformed skeleton raises `ValueError` and nothing else; a class that is not registered raises `UnsupportedError`.
"""

import base64
import dataclasses
import datetime
import enum
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from tensorkeep.errors import TensorkeepError, UnsupportedError, UnsupportedLeafError, UsageError
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.leaf import LEAF_KINDS, MOST_DIMENSIONS, Array, Leaf, LeafKind
from tensorkeep.state.modules import parameter_names, without_wrappers
from tensorkeep.state.names import Key, KeyPath, display
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.state.stateful import stateful

# The user's classes. A file has only the name of a class. Only a class that this process has registered under that name
# is instantiated, so no file can make the process import or run anything.

Class = TypeVar("Class", bound=type)
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_CONVERTERS: dict[type, "tuple[Callable[[Any], Any], Callable[[Any], Any]]"] = {}
# The only field of an object that was saved by a converter.
_CONVERTED = "state"


def register(
    cls: Class, *, to_state: Callable[[Any], Any] | None = None, from_state: Callable[[Any], Any] | None = None
) -> Class:
    """Allow states to contain instances of a class; usable as a decorator.

    The class is saved as ``module:qualified name`` and must be registered under the same name in the process that
    loads. Its attributes are saved, the fields of a dataclass, and restored without calling ``__init__`` or any other
    method of the class.

    Parameters
    ----------
    cls : type
        A class, an enum or a named tuple.
    to_state, from_state : callable, optional
        For a class whose attributes do not hold its contents, such as a subclass of ``dict`` or a class in C: a
        function that returns an instance's contents as a nested state, and one that makes an instance from such a
        state, which may come from any file.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    UsageError
        If instances of the class cannot be made without its own code, as of an abstract class or of a subclass of
        ``dict``, and there are no functions; or if one function is given without the other.

    Examples
    --------
    >>> @register
    ... @dataclasses.dataclass
    ... class Schedule:
    ...     warmup: int
    ...     peak: float
    >>> from fractions import Fraction
    >>> register(Fraction, to_state=str, from_state=Fraction)
    <class 'fractions.Fraction'>
    """
    if not isinstance(cls, type):
        raise UsageError(f"{cls!r} cannot be registered: it is not a class", remedy="give the class: type(x)")
    if (to_state is None) != (from_state is None):
        raise UsageError("`to_state` and `from_state` belong together", remedy="give both, or neither")
    if to_state is not None and (issubclass(cls, enum.Enum) or is_namedtuple(cls)):
        text = f"{cls.__name__} is an enum or a named tuple, which functions have no effect on"
        raise UsageError(text, remedy="leave out `to_state` and `from_state`")
    if to_state is not None and from_state is not None:
        _CONVERTERS[cls] = to_state, from_state
    elif not (issubclass(cls, enum.Enum) or is_namedtuple(cls)):
        _CONVERTERS.pop(cls, None)
        if refusal := _attributes_refused(cls):
            remedy = "register a concrete class, or give the functions `to_state` and `from_state`"
            raise UsageError(f"{cls.__name__} cannot be registered: {refusal}", remedy=remedy)
    # A module that is reloaded, or a notebook cell that is run again, replaces its class.
    name = f"{cls.__module__}:{cls.__qualname__}"
    _CLASSES[name] = cls
    _NAMES[cls] = name
    return cls


def is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def registered_name(cls: type) -> str | None:
    return _NAMES.get(cls)


def _attributes_refused(cls: type) -> str | None:
    """Why the attributes of an instance do not hold all of its contents; None if they do."""
    # `object.__new__` refuses abstract classes, and subclasses of builtin types and of types in C.
    try:
        instance: Any = object.__new__(cls)
    except TypeError as error:
        return str(error)
    return None if hasattr(instance, "__dict__") or _slots(cls) else "it has no attributes"


@dataclasses.dataclass(frozen=True, slots=True)
class Unmade:
    """An object of a class with `from_state`, before that is called: the tensors of its state may not be read yet."""

    cls: type
    state: Any


def object_fields(value: Any) -> dict[str, Any] | None:
    """The contents of an instance of a registered class, by attribute; None for enums, named tuples, other values."""
    cls = type(value)
    if cls is Unmade:
        return {_CONVERTED: value.state}
    if cls not in _NAMES or is_namedtuple(cls) or issubclass(cls, enum.Enum):
        return None
    if cls in _CONVERTERS:
        return {_CONVERTED: _CONVERTERS[cls][0](value)}
    is_dataclass = dataclasses.is_dataclass(cls)
    names = [field.name for field in dataclasses.fields(cls)] if is_dataclass else _slots(cls)
    # An attribute may be deleted, or never set.
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found if is_dataclass else {**found, **getattr(value, "__dict__", {})}


def make_object(cls: type, fields: Mapping[str, Any]) -> Any:
    """An instance of a registered class with some contents; UnsupportedError if they do not fit the class."""
    if cls in _CONVERTERS:
        state = unmade(cls, fields).state
        try:
            return _CONVERTERS[cls][1](state)
        except (TensorkeepError, MemoryError):
            raise
        # The state may come from any file, and the function may raise anything.
        except Exception as error:
            text = f"`from_state` of {_NAMES[cls]} does not take what was saved: {error!r}"
            raise UnsupportedError(text, remedy=_AS_SAVED) from error
    instance: Any = object.__new__(cls)
    slots = _slots(cls)
    for field, value in fields.items():
        # Not by `setattr`: no file may make the process run a property of the class.
        if field in slots:
            object.__setattr__(instance, field, value)
        elif hasattr(instance, "__dict__"):
            vars(instance)[field] = value
        else:
            raise UnsupportedError(f"{_NAMES[cls]} has no attribute {field}", remedy=_AS_SAVED)
    return instance


def object_with(value: Any, fields: Mapping[str, Any]) -> Any:
    """The same object with other contents; `Unmade` if it has a `from_state`."""
    cls = value.cls if type(value) is Unmade else type(value)
    return unmade(cls, fields) if cls in _CONVERTERS else make_object(cls, fields)


def unmade(cls: type, fields: Mapping[str, Any]) -> Unmade:
    if [*fields] != [_CONVERTED]:
        raise UnsupportedError(f"{_NAMES[cls]} was saved without `to_state`", remedy=_AS_SAVED)
    return Unmade(cls, fields[_CONVERTED])


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__")]


def registered_class(name: str) -> type[Any]:
    """Raises UnsupportedError if this process has not registered the name."""
    if name not in _CLASSES:
        module, _, qualified = name.partition(":")
        remedy = f"import {qualified} from {module} and call tensorkeep.register({qualified}) before loading"
        raise UnsupportedError(f"the state contains a {name}, which is not registered in this process", remedy=remedy)
    return _CLASSES[name]


class PerRank:
    """A value of a state that each rank has its own of, such as random states; for saves and loads with ``group``.

    In the checkpoint it is a dict with the values of all ranks, under ``"0"``, ``"1"``, ... A load into a state with
    ``PerRank(value)`` gives each rank the value of its number. If fewer ranks have saved, the value of a rank that was
    not among them is left as it is, with a `StateMismatchWarning`.

    Examples
    --------
    >>> import tensorkeep
    >>> from tensorkeep.distributed import PerRank
    >>> state = {"random": PerRank(tensorkeep.RandomState())}
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def refuse_per_rank(path: KeyPath, *, nested: bool) -> NoReturn:
    """Raises UnsupportedLeafError in an object or a `PerRank`, UsageError without a group."""
    if nested:
        text = "PerRank in what the state_dict() of an object returns, or in a PerRank"
        raise UnsupportedLeafError(text, name=display(path), remedy="wrap the object itself: PerRank(object)")
    text = f"the state has PerRank at {display(path)!r}, and no group was given"
    raise UsageError(text, remedy="give group=torch.distributed.group.WORLD, on all ranks")


# Plain values as JSON without loss: every encoder beside its decoder. JSON numbers represent integers below 2**53 only,
# since programs in other languages read larger ones as floats. The decoders take untrusted input and raise only
# `ValueError`.

_SAFE_INTEGER = 2**53
_INTEGER = re.compile(r"-?0x(0|[1-9a-f][0-9a-f]*)")
_FLOAT = re.compile(r"-?(inf|\d+\.\d+|\d+(\.\d+)?e[+-]\d+)", re.ASCII)
_NAN = re.compile(r"nan:[0-9a-f]{16}")


def encode_int(value: int) -> object:
    """A JSON number, or ``{"int": "0x..."}`` for 2**53 and beyond."""
    return value if abs(value) < _SAFE_INTEGER else {"int": hex(value)}


def encode_float(value: float) -> str:
    """The shortest decimal that reads back as the same float; a NaN with its bits (``nan:7ff8...``)."""
    return f"nan:{struct.pack('>d', value).hex()}" if math.isnan(value) else repr(value)


def decode_float(text: object) -> float:
    if isinstance(text, str) and _NAN.fullmatch(text):
        # Big-endian, so that the text reads like the number.
        value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
        if math.isnan(value):
            return value
    # The length is limited first: a hostile file may have digits by the million.
    elif isinstance(text, str) and len(text) < 40 and _FLOAT.fullmatch(text):
        return float(text)
    raise ValueError(f"{brief(text)} is not a float")


def encode_bytes(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def decode_bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{brief(text)} is not base64 text")
    # `validate`: Python would otherwise skip foreign characters without notice.
    return base64.b64decode(text, validate=True)


def encode_key(key: Key) -> object:
    """None, bool, int, float, str or a tuple of such scalars."""
    if isinstance(key, tuple):
        return {"tuple": [encode_key(part) for part in key]}
    if isinstance(key, bool) or key is None or isinstance(key, str):
        return key
    return encode_int(key) if isinstance(key, int) else {"float": encode_float(key)}


def decode_key(node: object) -> Any:
    if node is None or isinstance(node, bool | int):
        return node
    if isinstance(node, str):
        return check_text(node)
    if isinstance(node, dict) and len(node) == 1:
        if "float" in node:
            return decode_float(node["float"])
        if "int" in node:
            return decode_long_int(node["int"])
        parts = node.get("tuple")
        # One level only, as the encoder writes: a hostile file cannot exhaust the stack.
        if isinstance(parts, list) and not any(isinstance(part, dict) and "tuple" in part for part in parts):
            return tuple(map(decode_key, parts))
    raise ValueError(f"{brief(node)} is not a key")


def decode_int(node: object) -> int:
    value = decode_key(node)
    if type(value) is not int:
        raise ValueError(f"{brief(node)} is not an integer")
    return value


def decode_long_int(text: object) -> int:
    if not isinstance(text, str) or not _INTEGER.fullmatch(text):
        raise ValueError(f"{brief(text)} is not a hexadecimal integer")
    # Hexadecimal: linear time, and no limit of digits as for decimal numbers.
    return int(text, 16)


def check_text(text: object) -> str:
    """Raises ValueError unless it is a string of valid Unicode."""
    if not isinstance(text, str):
        raise ValueError(f"{brief(text)} is not a string")
    text.encode()  # UnicodeEncodeError, a ValueError, on a lone surrogate.
    return text


def brief(node: object) -> str:
    """The start of a malformed node, for an error message."""
    text = ascii(node) if isinstance(node, str | int | float | None) else type(node).__name__
    return text if len(text) <= 50 else f"{text[:47]}..."


# Skeleton -> state.

T = TypeVar("T")
Moment = TypeVar("Moment", datetime.datetime, datetime.date, datetime.time)
# The deepest nesting of containers, both when saving and when loading.
MAX_DEPTH = 128
_AS_SAVED = "register the class as it was when the state was saved"


class LeafSpec(NamedTuple):
    kind: LeafKind
    requires_grad: bool


class SkeletonReader:
    """Decodes one skeleton; without ``values``, only checks it. Values of ``as_is`` are used unchanged.

    Without ``makes_objects``, objects of classes with `from_state` are `Unmade`.
    """

    def __init__(
        self, values: Mapping[str, Array] | None, *, as_is: Collection[str] = (), makes_objects: bool = True
    ) -> None:
        self.leaf_specs: dict[str, LeafSpec] = {}
        self._values = values
        self._as_is = as_is
        self._makes_objects = makes_objects
        self._finished: dict[tuple[int, LeafSpec], tuple[Array, Any]] = {}

    def decode(self, node: object, depth: int = 0) -> Any:
        """Raises ValueError or UnsupportedError."""
        if node is None or isinstance(node, int):  # A bool is an int.
            return node
        if isinstance(node, str):
            return check_text(node)
        # Before the recursion: a hostile file may be nested as deep as it likes.
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
        # Two leaves of one name would share memory after a load.
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
        # Two names of one tensor become one object again.
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
            # Keys that are equal although they differ in the file, such as ``1`` and ``True``, would lose a value.
            if key in result:
                raise ValueError(f"the key {brief(key_node)} is in one dict twice")
            result[key] = self.decode(child, depth + 1)
        return result

    def _deque(self, body: object, depth: int) -> deque[Any]:
        length, items = _pair(body)
        values = self.decode(_expect(list, items), depth)
        if length is not None and not len(values) <= decode_int(length) <= sys.maxsize:
            raise ValueError(f"a deque of the length {brief(length)} has {len(values)} items")
        return deque(values, length)

    def _namedtuple(self, body: object, depth: int) -> Any:
        name, fields = _pair(body)
        values = self._dict(fields, depth)
        return namedtuple_class(check_text(name), tuple(values))._make(values.values())

    def _registered(self, body: object, depth: int) -> Any:
        name, fields = _pair(body)
        check_text(name)
        values = self._dict(fields, depth)
        # A check needs no class: `info` and `verify` work without the user's code.
        if self._values is None:
            return None
        cls = registered_class(name)
        if issubclass(cls, enum.Enum):
            raise UnsupportedError(f"{name} is an enum here, and was not one", remedy=_AS_SAVED)
        names = cls._fields if is_namedtuple(cls) else None
        if dataclasses.is_dataclass(cls) and cls not in _CONVERTERS:
            names = tuple(field.name for field in dataclasses.fields(cls))
        if names is not None and set(values) != set(names):
            text = f"{name} has the fields {', '.join(names)}, but was saved with {', '.join(values)}"
            raise UnsupportedError(text, remedy=_AS_SAVED)
        if is_namedtuple(cls):
            return cls._make(values[field] for field in cls._fields)
        return unmade(cls, values) if cls in _CONVERTERS and not self._makes_objects else make_object(cls, values)

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
            found = cls[key] if isinstance(key, str) else cls(key)
            # Instead of raising, Python 3.11.2 drops unknown bits of a flag, and a flag that ejects them is an int.
            if isinstance(key, str) or (isinstance(found, cls) and found.value == key):
                return found
        except (KeyError, ValueError):
            pass
        raise UnsupportedError(f"{name} has no member {key!r}", remedy=_AS_SAVED)


@lru_cache(maxsize=256)
def namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """Raises ValueError if a name is not an identifier."""
    # Cached, so that the named tuples of one kind have one class, in one state and in several loads.
    return namedtuple(name, fields)


def _finish(value: Array, name: str, spec: LeafSpec) -> Any:
    """Return a leaf's data as the value that the state had: a scalar, a parameter, a tensor that tracks gradients."""
    kind, grad = spec
    if kind in ("ndarray", "npscalar"):
        if not isinstance(value, np.ndarray) or (kind == "npscalar" and value.shape):
            raise ValueError(f"the data of the leaf {name!r} does not fit a {kind}")
        return value if kind == "ndarray" else value[()]
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"the data of the leaf {name!r} does not fit a {kind}")
    cls = torch.nn.Parameter if kind == "parameter" else torch.Tensor
    # Already the right kind: a given parameter stays the same object.
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


def _exactly(count: int, body: object) -> list[Any]:
    items = _expect(list, body)
    if len(items) != count:
        raise ValueError(f"{brief(body)} does not have {count} items")
    return items


def _pair(body: object) -> tuple[Any, Any]:
    first, second = _exactly(2, body)
    return first, second


def _set(body: object) -> set[Any]:
    keys = [decode_key(node) for node in _expect(list, body)]
    if len(set(keys)) != len(keys):
        raise ValueError("an element is in one set twice")
    return set(keys)


def _size(body: object) -> Any:
    import torch

    lengths = _expect(list, body)
    # Other types and larger numbers raise other errors in torch.
    if not all(type(length) is int and -(2**63) <= length < 2**63 for length in lengths):
        raise ValueError(f"{brief(body)} is not a size")
    return torch.Size(lengths)


def _dtype(body: object) -> Any:
    import torch

    found = getattr(torch, check_text(body), None)
    # `getattr` with a name from a file: the type check keeps it from returning anything else.
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{brief(body)} is not a torch dtype")
    return found


def _device(body: object) -> Any:
    import torch

    try:
        return torch.device(check_text(body))
    except RuntimeError:
        raise ValueError(f"{brief(body)} is not a torch device") from None


def _moment(cls: type[Moment], body: object) -> Moment:
    text = check_text(body)
    found = cls.fromisoformat(text)
    # Python accepts other forms, too; a writer has one form of each value.
    if found.isoformat() != text:
        raise ValueError(f"{brief(body)} is not a {cls.__name__}")
    return found


def _timedelta(body: object) -> datetime.timedelta:
    days, seconds, microseconds = map(decode_int, _exactly(3, body))
    try:
        return datetime.timedelta(days, seconds, microseconds)
    except OverflowError:
        raise ValueError(f"{days} days are too long") from None


def _slice(body: object) -> slice:
    return slice(*(None if node is None else decode_int(node) for node in _exactly(3, body)))


_DECODERS: dict[str, Callable[[SkeletonReader, Any, int], Any]] = {
    "int": lambda reader, body, depth: decode_long_int(body),
    "float": lambda reader, body, depth: decode_float(body),
    "complex": lambda reader, body, depth: complex(*map(decode_float, _pair(body))),
    "bytes": lambda reader, body, depth: decode_bytes(body),
    "bytearray": lambda reader, body, depth: bytearray(decode_bytes(body)),
    "range": lambda reader, body, depth: range(*map(decode_int, _exactly(3, body))),
    "set": lambda reader, body, depth: _set(body),
    "frozenset": lambda reader, body, depth: frozenset(_set(body)),
    "size": lambda reader, body, depth: _size(body),
    "dtype": lambda reader, body, depth: _dtype(body),
    "device": lambda reader, body, depth: _device(body),
    "path": lambda reader, body, depth: Path(check_text(body)),
    "datetime": lambda reader, body, depth: _moment(datetime.datetime, body),
    "date": lambda reader, body, depth: _moment(datetime.date, body),
    "time": lambda reader, body, depth: _moment(datetime.time, body),
    "timedelta": lambda reader, body, depth: _timedelta(body),
    "slice": lambda reader, body, depth: _slice(body),
    "deque": SkeletonReader._deque,
    "placeholder": lambda reader, body, depth: Placeholder(*map(check_text, _exactly(3, body))),
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


# State -> skeleton. `docs/reference/native-format.md` has the table of nodes, which must stay readable for ever.

_KEY_TYPES = (str, int, bool, float, type(None))
_OMIT = 'leave out what cannot be read with select="*"'


class StateLeaf(NamedTuple):
    path: KeyPath  # the keys that lead to it
    leaf: Leaf
    value: Any  # the tensor or array of the state; the leaf shares its memory
    node: dict[str, object]


class SkeletonWriter:
    """Encodes one state. DTensors are refused unless ``sharded``; attributes of tensors are only noted."""

    def __init__(self, *, sharded: bool = False) -> None:
        self.leaves: list[StateLeaf] = []
        self.attributes: dict[str, list[str]] = {}
        self._sharded = sharded

    def named_paths(self) -> list[KeyPath]:
        """The keys that name each leaf, in the order of ``leaves``."""
        return [leaf.path for leaf in self.leaves]

    def _object(self, value: Any, path: KeyPath) -> Any:
        raise _unsupported(value, path)

    def _placeholder(self, value: Placeholder, path: KeyPath) -> dict[str, Any]:
        text = f"a placeholder of a value that could not be read cannot be saved: {value.what}"
        raise UnsupportedLeafError(text, name=display(path), remedy="leave it out, or put the value in its place")

    def encode(self, value: Any, path: KeyPath) -> Any:
        """Raises UnsupportedLeafError if the value, or a value inside, cannot be saved."""
        # By the exact type: a subclass would come back as its base class.
        encoder = _ENCODERS.get(type(value))
        if encoder is not None:
            return encoder(self, value, path)
        if isinstance(value, PerRank) or stateful(value) is not None:
            return self._object(value, path)
        leaf = (ShardedLeaf.of(display(path), value) if self._sharded else None) or Leaf.of(display(path), value)
        if leaf is not None:
            return self._leaf(leaf, value, path)
        node = _torch_node(value)
        return self._registered(value, path) if node is None else node

    def _leaf(self, leaf: Leaf, value: Any, path: KeyPath) -> dict[str, object]:
        if len(leaf.shape) > MOST_DIMENSIONS:
            text = f"a tensor of {len(leaf.shape)} dimensions cannot be saved: {MOST_DIMENSIONS} is the most"
            remedy = "save it in another shape, x.flatten() for example"
            raise UnsupportedLeafError(text, name=display(path), remedy=remedy)
        node: dict[str, object] = {leaf.kind: ""}
        if leaf.is_torch and leaf.requires_grad != (leaf.kind == "parameter"):
            node["requires_grad"] = leaf.requires_grad
        # torch.save stores attributes. Those with an underscore are set by libraries, torch among them.
        if leaf.is_torch and (own := [name for name in vars(value) if not name.startswith("_")]):
            self.attributes[display(path)] = own
        self.leaves.append(StateLeaf(path, leaf, value, node))
        return node

    def _unmade(self, value: Unmade, path: KeyPath) -> dict[str, Any]:
        return {"object": [_NAMES[value.cls], self._fields([(_CONVERTED, value.state)], path)]}

    def _path(self, value: Path, path: KeyPath) -> dict[str, str]:
        return {"path": self._text(value.as_posix(), path)}

    def _moment(self, value: Any, path: KeyPath) -> dict[str, str]:
        # The text has the offset only, and not which of two equal hours is meant.
        zone, kind = getattr(value, "tzinfo", None), type(value).__name__
        # A fixed offset may have a name, too, and the text has no names.
        is_plain = zone is None or (
            type(zone) is datetime.timezone
            and zone.tzname(None) == datetime.timezone(zone.utcoffset(None)).tzname(None)
        )
        if not is_plain or getattr(value, "fold", False):
            text = f"a {kind} with a time zone by its name, or with fold=1, cannot be saved"
            remedy = "save it with a fixed offset, such as datetime.timezone.utc"
            raise UnsupportedLeafError(text, name=display(path), remedy=remedy)
        return {kind: value.isoformat()}

    def _slice(self, value: slice, path: KeyPath) -> dict[str, Any]:
        ends = (value.start, value.stop, value.step)
        if not all(end is None or type(end) is int for end in ends):
            raise UnsupportedLeafError(f"{value} cannot be saved", name=display(path), remedy="use integers and None")
        return {"slice": [None if end is None else encode_int(end) for end in ends]}

    def _text(self, value: str, path: KeyPath) -> str:
        _check_text(value, path)
        return value

    def _list(self, value: Iterable[Any], path: KeyPath) -> list[Any]:
        check_depth(path, len(path))
        # Copied first, here and below: other threads may change the container while it is encoded.
        return [self.encode(item, (*path, index)) for index, item in enumerate(list(value))]

    def _dict(self, value: dict[Any, Any], path: KeyPath, prefix: str = "") -> dict[str, Any]:
        value = dict(value)
        if all(type(key) is str for key in value):
            for key in value:
                _check_text(key, (*path, key))
            return {prefix or "dict": self._fields(value.items(), path)}
        return {f"{prefix}_items" if prefix else "items": self._items(value, path)}

    def _items(self, value: dict[Any, Any], path: KeyPath) -> list[list[Any]]:
        check_depth(path, len(path))
        value = dict(value)
        for key in value:
            _check_key(key, path)
        return [[encode_key(key), self.encode(item, (*path, key))] for key, item in value.items()]

    def _fields(self, items: Iterable[tuple[str, Any]], path: KeyPath) -> dict[str, Any]:
        check_depth(path, len(path))
        return {field: self.encode(item, (*path, field)) for field, item in items}

    def _ordered(self, value: OrderedDict[Any, Any], path: KeyPath) -> dict[str, Any]:
        node = self._dict(value, path, "ordered")
        attributes = dict(vars(value))
        # What `torch.nn.Module.state_dict` returns has it, and `load_state_dict` reads it.
        if "_metadata" in attributes:
            node["_metadata"] = self.encode(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            text = f"an OrderedDict with the attributes {', '.join(attributes)} cannot be saved"
            remedy = "save dict(x), and the attributes as entries of the state"
            raise UnsupportedLeafError(text, name=display(path), remedy=remedy)
        return node

    def _set(self, value: set[Any] | frozenset[Any], path: KeyPath) -> dict[str, Any]:
        elements = list(value)
        for element in elements:
            _check_key(element, path)
        return {type(value).__name__: [encode_key(element) for element in elements]}

    def _registered(self, value: Any, path: KeyPath) -> dict[str, Any]:
        cls = type(value)
        name = registered_name(cls)
        if is_namedtuple(cls):
            if name is None:
                _check_rebuildable(cls, path)
            fields = self._fields(zip(cls._fields, value, strict=True), path)
            return {"object": [name, fields]} if name else {"namedtuple": [cls.__name__, fields]}
        if name is None:
            raise _unsupported(value, path)
        if isinstance(value, enum.Enum):
            # A combination of flags is not a member itself.
            member: object = value.name if value.name in cls.__members__ else encode_int(value.value)
            return {"enum": [name, member]}
        fields = object_fields(value) or {}
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(cls) and cls not in _CONVERTERS else ():
            if field.name not in fields:
                raise UnsupportedLeafError(f"the field {field.name} is not set", name=display(path), remedy="set it")
        for name_of_field in fields:
            _check_text(name_of_field, path)
        return {"object": [name, self._fields(fields.items(), path)]}


def _torch_node(value: Any) -> dict[str, Any] | None:
    # Not imported: no value is torch's if nobody has imported torch.
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if type(value) is torch.Size:
        return {"size": list(value)}
    if type(value) is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is torch.device:
        return {"device": str(value)}
    return None


class ObjectWriter(SkeletonWriter):
    """Encodes a state with objects, by what their ``state_dict()`` returns, and with values of this rank."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(sharded=rank is not None)
        self._rank = rank
        self._objects = 0  # around the value
        self._modules: dict[KeyPath, Any] = {}
        self._optimizers: dict[KeyPath, Any] = {}

    def named_paths(self) -> list[KeyPath]:
        """As the keys, with the names of parameters for the numbers that an optimizer gives them."""
        names = {path: parameter_names(each, self._modules) for path, each in self._optimizers.items()}
        return [self._named(leaf.path, names) for leaf in self.leaves]

    def _named(self, path: KeyPath, names: Mapping[KeyPath, Sequence[str]]) -> KeyPath:
        for length in range(len(path) - 2):
            # ``state.INDEX.KEY``: the form of torch's optimizers.
            found, key, index = names.get(path[:length], ()), path[length], path[length + 1]
            if key == "state" and type(index) is int and index < len(found):
                return (*path[: length + 1], found[index], *path[length + 2 :])
        return path

    def _object(self, value: Any, path: KeyPath) -> Any:
        is_per_rank = isinstance(value, PerRank)
        if is_per_rank and (self._objects or self._rank is None):
            refuse_per_rank(path, nested=self._objects > 0)
        # An object may return itself.
        check_depth(path, len(path) + self._objects)
        found = stateful(value)
        state = {str(self._rank): value.value} if found is None else found.state_dict()
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            self._modules[path] = value
            state = without_wrappers(value, state)
        elif torch is not None and isinstance(value, torch.optim.Optimizer):
            self._optimizers[path] = value
        self._objects += 1
        node = self.encode(state, path)
        self._objects -= 1
        return node


class ReplacingWriter(SkeletonWriter):
    """Encodes a state that a reader made from a file. A value that cannot be saved becomes a placeholder."""

    def __init__(self) -> None:
        super().__init__()
        self._around: dict[int, KeyPath] = {}

    def encode(self, value: Any, path: KeyPath) -> Any:
        # Only containers around this value: one that is in two places is not a cycle.
        around = self._around.get(id(value))
        if around is not None:
            what = f"a reference to {display(around)}, which contains it"
            return self._placeholder(Placeholder("", what, _OMIT), path)
        if isinstance(value, dict | list | tuple):
            self._around[id(value)] = path
        count = len(self.leaves)
        try:
            return super().encode(value, path)
        except UnsupportedLeafError as error:
            # Leaves inside of the refused value belong to no node.
            del self.leaves[count:]
            what = error.message.removesuffix(" cannot be saved")
            remedy = f"read it with the tool that wrote the file, and {error.remedy}; or {_OMIT}"
            return self._placeholder(Placeholder("", what, remedy), path)
        finally:
            self._around.pop(id(value), None)

    def _placeholder(self, value: Placeholder, path: KeyPath) -> dict[str, Any]:
        texts = (display(path), value.what, value.remedy)
        # Names from foreign files may have lone surrogates, which JSON cannot hold.
        return {"placeholder": [text.encode("utf-8", "backslashreplace").decode() for text in texts]}


_ENCODERS: dict[type, Callable[[SkeletonWriter, Any, KeyPath], Any]] = {
    type(None): lambda _, value, path: value,
    bool: lambda _, value, path: value,
    str: SkeletonWriter._text,
    int: lambda _, value, path: encode_int(value),
    float: lambda _, value, path: {"float": encode_float(value)},
    complex: lambda _, value, path: {"complex": [encode_float(value.real), encode_float(value.imag)]},
    bytes: lambda _, value, path: {"bytes": encode_bytes(value)},
    bytearray: lambda _, value, path: {"bytearray": encode_bytes(value)},
    range: lambda _, value, path: {"range": [encode_int(value.start), encode_int(value.stop), encode_int(value.step)]},
    list: SkeletonWriter._list,
    tuple: lambda writer, value, path: {"tuple": writer._list(value, path)},
    dict: SkeletonWriter._dict,
    OrderedDict: SkeletonWriter._ordered,
    deque: lambda writer, value, path: {"deque": [value.maxlen, writer._list(value, path)]},
    type(Path()): SkeletonWriter._path,
    Unmade: SkeletonWriter._unmade,
    datetime.datetime: SkeletonWriter._moment,
    datetime.date: SkeletonWriter._moment,
    datetime.time: SkeletonWriter._moment,
    datetime.timedelta: lambda _, value, path: {"timedelta": [value.days, value.seconds, value.microseconds]},
    slice: SkeletonWriter._slice,
    Counter: lambda writer, value, path: {"counter": writer._items(value, path)},
    set: SkeletonWriter._set,
    frozenset: SkeletonWriter._set,
    Placeholder: lambda writer, value, path: writer._placeholder(value, path),
}


def check_depth(path: KeyPath, depth: int) -> None:
    """Raises UnsupportedLeafError for a container that is nested too deeply, perhaps in itself."""
    if depth >= MAX_DEPTH:
        text = f"the state is nested deeper than {MAX_DEPTH} levels"
        remedy = "look for a container or an object that contains itself"
        raise UnsupportedLeafError(text, name=display(path[:4]), remedy=remedy)


def _check_text(text: str, path: KeyPath) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "a string with a lone surrogate is not valid Unicode"
        remedy = "save x.encode('utf-8', 'surrogateescape'), which is bytes"
        raise UnsupportedLeafError(message, name=display(path), remedy=remedy) from None


def _check_key(key: Key, path: KeyPath) -> None:
    if isinstance(key, tuple) and type(key) is tuple and not any(isinstance(part, tuple) for part in key):
        for part in key:
            _check_key(part, path)
    elif type(key) not in _KEY_TYPES:
        text = f"a key or set element of type {type(key).__name__} cannot be saved"
        remedy = "use str, int, float, bool, None or a tuple of such scalars, or save a list of pairs"
        raise UnsupportedLeafError(text, name=display(path), remedy=remedy)
    elif isinstance(key, str):
        _check_text(key, (*path, key))


def _check_rebuildable(cls: Any, path: KeyPath) -> None:
    try:
        namedtuple_class(cls.__name__, cls._fields)
    except ValueError as error:
        text = f"the named tuple {cls.__name__} cannot be rebuilt: {error}"
        remedy = f"call tensorkeep.register({cls.__name__}) before saving and loading"
        raise UnsupportedLeafError(text, name=display(path), remedy=remedy) from None


def _unsupported(value: Any, path: KeyPath) -> UnsupportedLeafError:
    name = type(value).__name__
    builtin = next((base for base in (dict, list, tuple, str, int, float, bytes) if isinstance(value, base)), None)
    if isinstance(value, enum.Enum) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        remedy = f"call tensorkeep.register({name}) before saving and loading"
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        remedy = "pass its state_dict()"
    elif (data := sys.modules.get("torch.utils.data")) is not None and isinstance(value, data.DataLoader):
        remedy = "save tensorkeep.ResumableLoader(loader), and use that in the loop"
    elif builtin is not None:
        remedy = f"save {builtin.__name__}(x)"
    # The question makes an instance without `__init__`, which a `__del__` does not expect.
    elif not callable(value) and not hasattr(value, "__del__") and _attributes_refused(type(value)) is None:
        remedy = f"leave it out, or call tensorkeep.register({name}) before saving and loading"
    elif callable(value):
        remedy = "code cannot be saved: leave it out, or save its name"
    else:
        remedy = "leave it out, or save its contents as plain values, tensors and arrays"
    return UnsupportedLeafError(f"a value of type {name} cannot be saved", name=display(path), remedy=remedy)
