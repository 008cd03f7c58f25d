"""State -> skeleton: the node of each type of value.

The skeleton is plain JSON (objects, arrays, strings, integers, booleans, null; no floats) and part of the on-disk
format, so these nodes must stay readable for ever:

===========================================================  =======================================================
node                                                         value
===========================================================  =======================================================
``null``, ``true``, ``false``, a string                      itself
an integer                                                   an int below 2**53 in magnitude
``{"int": "0x20000000000000"}``                              any other int, in hexadecimal
``{"float": "0.1"}``                                         a float: the shortest decimal that reads back the same;
                                                             ``inf``, ``-inf``; a NaN as ``nan:`` and its 64 bits
``{"complex": ["0.0", "-1.5"]}``                             a complex: real and imaginary part as such floats
``{"bytes": "aGk="}``, ``{"bytearray": "aGk="}``             bytes in base64
``{"range": [0, 10, 2]}``                                    a range: start, stop, step (integers as above)
``{"set": [KEY, ...]}``, ``{"frozenset": [KEY, ...]}``       a set of plain scalars, and of tuples of them
``[NODE, ...]``                                              a list
``{"tuple": [NODE, ...]}``                                   a tuple
``{"dict": {"key": NODE, ...}}``                             a dict whose keys are all strings, in order
``{"items": [[KEY, NODE], ...]}``                            a dict of other keys, too. KEY is null, a boolean, a
                                                             string, an integer, ``{"int": ...}``, ``{"float": ...}``
                                                             or, of these, ``{"tuple": [KEY, ...]}``
``{"ordered": {...}}``, ``{"ordered_items": [...]}``         an OrderedDict, likewise; with ``"_metadata": NODE``
                                                             beside it if it has torch's ``_metadata`` attribute
``{"counter": [[KEY, NODE], ...]}``                           a collections.Counter
``{"namedtuple": ["Point", {"x": NODE, ...}]}``              a named tuple that was not registered
``{"object": ["module:Class", {"field": NODE, ...}]}``       a registered dataclass or named tuple
``{"enum": ["module:Class", "MEMBER"]}``                     a registered enum; a combination of flags by its integer
``{"size": [2, 3]}``                                         a torch.Size
``{"dtype": "bfloat16"}``, ``{"device": "cuda:0"}``          a torch.dtype, a torch.device
``{"placeholder": [NAME, WHAT, REMEDY]}``                    a value of another format that cannot be read; never saved
``{"tensor": NAME}``                                         a leaf, by name: a torch tensor;
``{"parameter": NAME}``                                      a torch.nn.Parameter;
``{"ndarray": NAME}``, ``{"npscalar": NAME}``                a numpy array; a numpy scalar, stored as a 0-d array
===========================================================  =======================================================

A tensor that tracks gradients has ``"requires_grad": true`` beside its name, a parameter that does not ``false``. The
dtype, shape and place of a leaf are in the manifest's table of leaves.
"""

import dataclasses
import enum
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.leaf import MOST_DIMENSIONS, Leaf
from tensorkeep.state.names import Key, Path, display
from tensorkeep.state.registry import is_namedtuple, registered_name
from tensorkeep.state.scalars import encode_bytes, encode_float, encode_int, encode_key
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.state.skeleton_reader import MAX_DEPTH, namedtuple_class

_KEY_TYPES = (str, int, bool, float, type(None))
_OMIT = 'leave out what cannot be read with select="*"'


class StateLeaf(NamedTuple):
    """A leaf of a state in memory."""

    path: Path  # the keys that lead to it
    leaf: Leaf
    value: Any  # the tensor or array of the state, whose memory the leaf shares
    node: dict[str, object]


class SkeletonWriter:
    """Encodes one state; ``leaves`` has those encoded so far, in traversal order, whose names are assigned later.

    Containers are copied before they are encoded, because other threads may change them. DTensors are refused unless
    ``sharded``.

    ``attributes`` has the names of attributes of tensors by the tensor's name: a state does not have them.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self.leaves: list[StateLeaf] = []
        self.attributes: dict[str, list[str]] = {}
        self._sharded = sharded

    def _placeholder(self, value: Placeholder, path: Path) -> dict[str, Any]:
        text = f"a placeholder of a value that could not be read cannot be saved: {value.what}"
        raise UnsupportedLeafError(text, name=display(path), remedy="leave it out, or put the value in its place")

    def encode(self, value: Any, path: Path) -> Any:
        """Return a value's node; raises UnsupportedLeafError if it, or a value inside, cannot be saved."""
        encoder = _ENCODERS.get(type(value))
        if encoder is not None:
            return encoder(self, value, path)
        leaf = (ShardedLeaf.of(display(path), value) if self._sharded else None) or Leaf.of(display(path), value)
        if leaf is not None:
            return self._leaf(leaf, value, path)
        node = _torch_node(value)
        return self._registered(value, path) if node is None else node

    def _leaf(self, leaf: Leaf, value: Any, path: Path) -> dict[str, object]:
        if len(leaf.shape) > MOST_DIMENSIONS:
            raise UnsupportedLeafError(
                f"a tensor of {len(leaf.shape)} dimensions cannot be saved: {MOST_DIMENSIONS} is the most",
                name=display(path),
                remedy="save it in another shape, x.flatten() for example",
            )
        node: dict[str, object] = {leaf.kind: ""}
        if leaf.is_torch and leaf.requires_grad != (leaf.kind == "parameter"):
            node["requires_grad"] = leaf.requires_grad
        # torch.save stores attributes. Those with an underscore are set by libraries, torch among them.
        if leaf.is_torch and (own := [name for name in vars(value) if not name.startswith("_")]):
            self.attributes[display(path)] = own
        self.leaves.append(StateLeaf(path, leaf, value, node))
        return node

    def _text(self, value: str, path: Path) -> str:
        _check_text(value, path)
        return value

    def _list(self, value: Iterable[Any], path: Path) -> list[Any]:
        check_depth(path, len(path))
        return [self.encode(item, (*path, index)) for index, item in enumerate(list(value))]

    def _dict(self, value: dict[Any, Any], path: Path, prefix: str = "") -> dict[str, Any]:
        value = dict(value)
        if all(type(key) is str for key in value):
            for key in value:
                _check_text(key, (*path, key))
            return {prefix or "dict": self._fields(value.items(), path)}
        return {f"{prefix}_items" if prefix else "items": self._items(value, path)}

    def _items(self, value: dict[Any, Any], path: Path) -> list[list[Any]]:
        check_depth(path, len(path))
        value = dict(value)
        for key in value:
            _check_key(key, path)
        return [[encode_key(key), self.encode(item, (*path, key))] for key, item in value.items()]

    def _fields(self, items: Iterable[tuple[str, Any]], path: Path) -> dict[str, Any]:
        check_depth(path, len(path))
        return {field: self.encode(item, (*path, field)) for field, item in items}

    def _ordered(self, value: OrderedDict[Any, Any], path: Path) -> dict[str, Any]:
        node = self._dict(value, path, "ordered")
        attributes = dict(vars(value))
        if "_metadata" in attributes:
            node["_metadata"] = self.encode(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            raise UnsupportedLeafError(
                f"an OrderedDict with the attributes {', '.join(attributes)} cannot be saved",
                name=display(path),
                remedy="save dict(x), and the attributes as entries of the state",
            )
        return node

    def _set(self, value: set[Any] | frozenset[Any], path: Path) -> dict[str, Any]:
        elements = list(value)
        for element in elements:
            _check_key(element, path)
        return {type(value).__name__: [encode_key(element) for element in elements]}

    def _registered(self, value: Any, path: Path) -> dict[str, Any]:
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
        names = [field.name for field in dataclasses.fields(value)]
        for field in names:
            if not hasattr(value, field):
                raise UnsupportedLeafError(f"the field {field} is not set", name=display(path), remedy="set it")
        return {"object": [name, self._fields(((field, getattr(value, field)) for field in names), path)]}


def _torch_node(value: Any) -> dict[str, Any] | None:
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


class ReplacingWriter(SkeletonWriter):
    """Encodes a state that a reader made from a file.

    A value that cannot be saved becomes a placeholder instead of an error, and so does a container inside of itself.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        super().__init__(sharded=sharded)
        self._around: dict[int, Path] = {}

    def encode(self, value: Any, path: Path) -> Any:
        """Return a value's node, or a placeholder's."""
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
            del self.leaves[count:]
            what = error.message.removesuffix(" cannot be saved")
            remedy = f"read it with the tool that wrote the file, and {error.remedy}; or {_OMIT}"
            return self._placeholder(Placeholder("", what, remedy), path)
        finally:
            self._around.pop(id(value), None)

    def _placeholder(self, value: Placeholder, path: Path) -> dict[str, Any]:
        texts = (display(path), value.what, value.remedy)
        return {"placeholder": [text.encode("utf-8", "backslashreplace").decode() for text in texts]}


_ENCODERS: dict[type, Callable[[SkeletonWriter, Any, Path], Any]] = {
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
    Counter: lambda writer, value, path: {"counter": writer._items(value, path)},
    set: SkeletonWriter._set,
    frozenset: SkeletonWriter._set,
    Placeholder: lambda writer, value, path: writer._placeholder(value, path),
}


def check_depth(path: Path, depth: int) -> None:
    """Raise UnsupportedLeafError for a container that is nested too deeply, perhaps in itself."""
    if depth >= MAX_DEPTH:
        raise UnsupportedLeafError(
            f"the state is nested deeper than {MAX_DEPTH} levels",
            name=display(path[:4]),
            remedy="look for a container or an object that contains itself",
        )


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeafError(
            "a string with a lone surrogate is not valid Unicode",
            name=display(path),
            remedy="save x.encode('utf-8', 'surrogateescape'), which is bytes",
        ) from None


def _check_key(key: Key, path: Path) -> None:
    if isinstance(key, tuple) and type(key) is tuple and not any(isinstance(part, tuple) for part in key):
        for part in key:
            _check_key(part, path)
    elif type(key) not in _KEY_TYPES:
        raise UnsupportedLeafError(
            f"a key or set element of type {type(key).__name__} cannot be saved",
            name=display(path),
            remedy="use str, int, float, bool, None or a tuple of these, or save a list of pairs",
        )
    elif isinstance(key, str):
        _check_text(key, (*path, key))


def _check_rebuildable(cls: Any, path: Path) -> None:
    try:
        namedtuple_class(cls.__name__, cls._fields)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"the named tuple {cls.__name__} cannot be rebuilt: {error}",
            name=display(path),
            remedy=f"call tensorkeep.register({cls.__name__}) before saving and loading",
        ) from None


def _unsupported(value: Any, path: Path) -> UnsupportedLeafError:
    name = type(value).__name__
    builtin = next((base for base in (dict, list, tuple, str, int, float, bytes) if isinstance(value, base)), None)
    if isinstance(value, enum.Enum) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        remedy = f"call tensorkeep.register({name}) before saving and loading"
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        remedy = "pass its state_dict()"
    elif builtin is not None:
        remedy = f"save {builtin.__name__}(x)"
    elif callable(value):
        remedy = "code cannot be saved: leave it out, or save its name"
    else:
        remedy = "leave it out, or save its contents as plain values, tensors and arrays"
    return UnsupportedLeafError(f"a value of type {name} cannot be saved", name=display(path), remedy=remedy)
