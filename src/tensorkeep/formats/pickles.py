"""Generic decoder of pickles without execution: classes and calls are only recorded by name.

Python's own unpickler in Python reads the stream, without the opcodes that could run code: a class or a function
becomes a `Global`, a call of it a `Call`. It reads from memory and keeps its memo in a dict, so a length in the file
never causes an allocation. `decode` is for pickles that name a few classes only, and have the opcodes alone that torch
writes: the metadata and the tensors of a distributed checkpoint. `Recorder` is for those of ``torch.save``, of any
objects.
"""

import _compat_pickle
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tensorkeep.errors import TensorkeepError, UnsupportedError
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME

if TYPE_CHECKING:
    import torch

    Storages = Callable[[str, int], torch.UntypedStorage]
    """Returns the storage of a key, of some bytes; ValueError if it does not exist."""


# Generic decoder of pickles without execution: classes and calls are only recorded by name.
#
# Python's own unpickler in Python reads the stream, without the opcodes that could run code: a class or a function
# becomes a `Global`, a call of it a `Call`. It reads from memory and keeps its memo in a dict, so a length in the file
# never causes an allocation. `decode` is for pickles that name a few classes only, and have the opcodes alone that
# torch
# writes: the metadata and the tensors of a distributed checkpoint. `Recorder` is for those of ``torch.save``, of any
# objects.

_MAX_BYTES = 1024**3


class Global(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """Stand-in for a call (opcodes REDUCE and NEWOBJ); recorded, never executed.

    ``state`` is the argument of the opcode BUILD; None if absent. ``items`` are appended to it, and ``pairs`` set as
    keys and values, if it is an object of a subclass of list or dict.
    """

    __slots__ = ("args", "function", "items", "pairs", "state")

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []


def name_of(found: Any) -> str:
    """Return the full name of a recorded class or function; an empty text if it is something else.

    Not ``str(found)``: the text of 60 tuples, each of which has the next one twice, would never end.
    """
    return str(found) if type(found) is Global else ""


class Pairs(list[tuple[Any, Any]]):
    """Stand-in for a dict, made by a `Recorder`: its keys and values. A key may be a value of any kind."""


class PersistentId(NamedTuple):
    """A reference to data outside of the pickle."""

    key: Any


def decode(content: bytes, allowed: Container[tuple[str, str]], what: str) -> Any:
    """Return the value of a pickle: Python's plain values and containers, `Call`, `Global` and `PersistentId`.

    ``allowed`` are modules and names of the classes and functions that it may name; ``what`` is the subject of errors.

    Raises ValueError if it is not a well-formed pickle, or larger than 1 GiB; UnsupportedError if it names another
    class or function.
    """
    if len(content) > _MAX_BYTES:
        raise ValueError(f"a pickle of {len(content):,} bytes")
    try:
        return _Decoder(content, allowed, what).load()
    except (TensorkeepError, MemoryError):
        raise
    # Hostile bytes make `pickle` raise a dozen types.
    except Exception as error:
        raise ValueError(f"the pickle is malformed ({type(error).__name__}: {error})") from error


_OPCODES = """
PROTO FRAME MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET MARK STOP GLOBAL STACK_GLOBAL BINPERSID
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES
EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS
"""
"""Opcodes that make plain values, or call `find_class` and `persistent_load`."""


class _Decoder(pickle._Unpickler):
    """An unpickler that records calls instead of making them; it does not know any other opcode that runs code."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes, allowed: Container[tuple[str, str]], what: str) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed
        self._what = what

    def find_class(self, module: str, name: str) -> Global:
        if (module, name) not in self._allowed:
            raise UnsupportedError(
                f"{self._what} names {module}.{name}, which is not allowed: loading it could run code from the file",
                remedy="if you trust it, load it with torch.distributed.checkpoint and save tensors and plain values",
            )
        return Global(module, name)

    def persistent_load(self, pid: Any) -> PersistentId:
        return PersistentId(pid)

    def record_call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Global or type(args) is not tuple:
            raise TypeError("a call of a value that is not a function")
        self.stack.append(Call(function, args))

    def record_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Call:
            raise TypeError("attributes of a value that has none")
        target.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise TypeError("an item of a value that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Hashing a tuple of tuples of tuples would recurse without bound.
            if type(key) not in (str, int, Call):
                raise TypeError(f"a key of type {type(key).__name__}")
            target[key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES.split()},
        pickle.REDUCE[0]: record_call,
        pickle.NEWOBJ[0]: record_call,
        pickle.BUILD[0]: record_state,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


_MORE_OPCODES = """
BINSTRING SHORT_BINSTRING STRING UNICODE INT LONG FLOAT BINBYTES8 GET PUT POP POP_MARK DUP LIST
"""


class Recorder(pickle._Unpickler):
    """Reads pickles of any objects from a binary stream, one with each call of `load`, and executes nothing.

    A dict becomes `Pairs`, a set a `Call`; list and tuple, texts, bytes and numbers are themselves. ``globals`` has the
    full names of all classes and functions, under their names in Python 3, and ``references`` all persistent ids.

    The stream must refuse to read more than there is: the lengths in a pickle are not checked here.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(self, stream: Any) -> None:
        # Texts of Python 2 may be bytes.
        super().__init__(stream, encoding="utf-8", errors="surrogateescape")
        self.globals: dict[str, None] = {}
        self.references: list[Any] = []

    def load(self) -> Any:
        """Return the value of the next pickle; ValueError if it is malformed, or has an opcode that is not known."""
        self.memo: dict[int, Any] = {}  # each pickle counts from 0
        try:
            return super().load()
        except (TensorkeepError, MemoryError):
            raise
        # Hostile bytes make `pickle` raise a dozen types.
        except Exception as error:
            raise ValueError(f"the pickle is malformed ({type(error).__name__}: {error})") from error

    def find_class(self, module: str, name: str) -> Global:
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        found = Global(_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        self.globals[str(found)] = None
        return found

    def persistent_load(self, pid: Any) -> PersistentId:
        self.references.append(pid)
        return PersistentId(pid)

    def _call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, _tuple(args)))

    def _call_with_keywords(self) -> None:
        keywords, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, (*_tuple(args), keywords) if keywords else _tuple(args)))

    def _state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Call:
            raise TypeError("attributes of a value that has none")
        target.state = state

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        if type(target) not in (list, Call):
            raise TypeError("an item of a value that has none")
        (target if type(target) is list else target.items).extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, values: list[Any]) -> None:
        target: Any = self.stack[-1]
        if type(target) not in (Pairs, Call):
            raise TypeError("a key of a value that has none")
        (target if type(target) is Pairs else target.pairs).extend(zip(values[::2], values[1::2], strict=True))

    def _dict(self) -> None:
        values = self.pop_mark()
        self.stack.append(Pairs(zip(values[::2], values[1::2], strict=True)))

    def _empty_dict(self) -> None:
        self.stack.append(Pairs())

    def _empty_set(self) -> None:
        self.stack.append(Call(Global("builtins", "set"), ()))

    def _frozenset(self) -> None:
        items = self.pop_mark()  # exchanges the stack
        self.stack.append(Call(Global("builtins", "frozenset"), (items,)))

    def _bytearray(self) -> None:
        # Python's own allocates what the length says before it reads.
        count = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(count)))

    dispatch: ClassVar[dict[int, Any]] = {
        **{
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
            for name in f"{_OPCODES} {_MORE_OPCODES}".split()
        },
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_keywords,
        pickle.BUILD[0]: _state,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _appends,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _dict,
        pickle.EMPTY_DICT[0]: _empty_dict,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray,
    }


def _tuple(args: Any) -> tuple[Any, ...]:
    if type(args) is not tuple:
        raise TypeError("the arguments of a call are not a tuple")
    return args


class Bounded:
    """A binary stream for a `Recorder` that has at most some bytes; ValueError if a read asks for more."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream = stream
        self._left = min(size, _MAX_BYTES)

    def read(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("a length that is larger than the file")
        self._left -= count
        content: bytes = self._stream.read(count)
        return content

    def readline(self) -> bytes:
        line: bytes = self._stream.readline(self._left)
        self._left -= len(line)
        return line


# Arrays and scalars of numpy in pickles, rebuilt from recorded arguments; nothing that a pickle names is called.

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


# Tensors in recorded pickles: over the storages of a file, without a copy.

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""The dtype of each class of storages in a pickle."""
READ_WITH_TORCH = "load the file with torch, and save"


class Rebuilder(Protocol):
    """What rebuilds the values around the tensors of a pickle; see ``rebuild.py``."""

    attributes: dict[str, None]
    storages: "Storages"

    def value(self, found: Any, depth: int = 0) -> Any:
        """Return the value of what was recorded."""

    def call(self, call: Call, depth: int) -> Any:
        """Return the value of a call."""

    def object(self, name: str, call: Call, depth: int) -> Any:
        """Return an object of an allowed class as a dict."""

    def container(self, found: Any, made: Any) -> Any:
        """Note the value that what was recorded has, and return it."""

    def spend(self, *values: Any) -> None:
        """Count what is copied; UnsupportedError if it is much more than the file has."""

    def is_allowed(self, name: str) -> bool:
        """Return whether objects of a class are read."""

    def refused(self, name: str) -> Placeholder:
        """Return what takes the place of an object of a class that is not allowed."""


Rebuild = Callable[[Rebuilder, Call, int], Any]


def _storage(rebuilder: Rebuilder, found: Any) -> Any:
    import torch

    key = found.key if type(found) is PersistentId else None
    if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage" or type(key[1]) is not Global:
        raise ValueError("a tensor has no storage")
    kind = key[1].name.rpartition(".")[2]
    dtype = torch.uint8 if kind == "UntypedStorage" else getattr(torch, STORAGES[kind])
    size = torch.empty(0, dtype=dtype).element_size()
    nbytes, start = _count(key[4]) * size, 0
    if type(key[2]) is not str:
        raise ValueError("a storage has no key")
    whole = rebuilder.storages(key[2], nbytes)
    if len(key) == 6 and key[5] is not None:
        _, first, length = key[5]
        start, nbytes = _count(first) * size, _count(length) * size
        whole = whole[start : start + nbytes]
    return torch.TypedStorage(wrap_storage=whole, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _tensor(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    import torch

    first, offset, size, stride, *rest = call.args
    strides = rebuilder.value(stride, depth + 1)
    if type(strides) is not tuple or any(_count(step) < 0 for step in strides):
        raise ValueError("a tensor has no strides")
    size = torch.Size(rebuilder.value(size, depth + 1))
    storage, grad = _storage(rebuilder, first), rest[0] if rest else False
    rest = [rebuilder.value(each, depth + 1) for each in rest[2:]]  # without hooks
    utils: Any = torch._utils
    if call.function.name == "_rebuild_tensor":
        return utils._rebuild_tensor(storage, offset, size, strides)
    rebuild = utils._rebuild_tensor_v3 if call.function.name.endswith("v3") else utils._rebuild_tensor_v2
    return rebuild(storage, offset, size, strides, grad, OrderedDict(), *rest)


def _parameter(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    import torch

    data = rebuilder.value(call.args[0], depth + 1)
    leave_attributes(rebuilder, call.args[3:])
    return torch.nn.Parameter(data, call.args[1]) if isinstance(data, torch.Tensor) else data


def _of_type(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    """Return a tensor that has attributes, or a tensor of a subclass.

    A subclass that wraps other tensors is a dict of its attributes, any other subclass a plain tensor.
    """
    function, kind, arguments, state = call.args
    name = name_of(kind)
    if not name:
        raise ValueError("a tensor has no class")
    if name not in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
        if not rebuilder.is_allowed(name):
            return rebuilder.refused(name)
        if function.name == "_rebuild_wrapper_subclass":
            made = Call(kind, ())
            made.state = state
            return rebuilder.container(call, rebuilder.object(name, made, depth))
    leave_attributes(rebuilder, [state])
    return rebuilder.call(Call(function, arguments), depth + 1)


def leave_attributes(rebuilder: Rebuilder, states: Iterable[Any]) -> None:
    """Note the names of attributes that the state does not have."""
    for state in states:
        found = attributes_of(state) or []
        rebuilder.spend(found)
        rebuilder.attributes |= {key: None for key, _ in found if type(key) is str and not key.startswith("_")}


def _on_device(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    """Return a tensor that was saved by way of the CPU or numpy."""
    import torch

    data, dtype = rebuilder.value(call.args[0], depth + 1), rebuilder.value(call.args[1])
    if not isinstance(data, Placeholder) and not isinstance(data, torch.Tensor):
        data = torch.from_numpy(data)
    if isinstance(data, Placeholder) or data.dtype == dtype:
        return data
    return Placeholder("", f"a tensor of {dtype} that was saved as {data.dtype}", f"{READ_WITH_TORCH} x.cpu()")


def attributes_of(state: Any) -> list[tuple[Any, Any]] | None:
    """Return the attributes in the state of an object, also those of slots; None if it is something else."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if any(part is not None and type(part) is not Pairs for part in parts):
        return None
    return [pair for part in parts for pair in part or ()]


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**62:
        raise ValueError("an offset, length or stride is impossible")
    return found


def _unreadable(what: str, remedy: str) -> Rebuild:
    return lambda rebuilder, call, depth: Placeholder("", what, f"{READ_WITH_TORCH} {remedy}")


_UTILS = "torch._utils._rebuild"
TENSORS: dict[str, Rebuild] = {
    f"{_UTILS}_tensor": _tensor,
    f"{_UTILS}_tensor_v2": _tensor,
    f"{_UTILS}_tensor_v3": _tensor,
    f"{_UTILS}_parameter": _parameter,
    f"{_UTILS}_parameter_with_state": _parameter,
    f"{_UTILS}_device_tensor_from_cpu_tensor": _on_device,
    f"{_UTILS}_device_tensor_from_numpy": _on_device,
    f"{_UTILS}_sparse_tensor": _unreadable("a sparse tensor", "x.to_dense(), or its indices and values"),
    f"{_UTILS}_qtensor": _unreadable("a quantised tensor", "x.int_repr() with its scale and zero point"),
    f"{_UTILS}_nested_tensor": _unreadable("a nested tensor", "x.unbind() as a list"),
    f"{_UTILS}_meta_tensor_no_storage": _unreadable("a tensor on the meta device, without data", "one with data"),
    f"{_UTILS}_wrapper_subclass": _unreadable("a tensor that wraps others", "the tensors that it consists of"),
    "torch._tensor._rebuild_from_type": _of_type,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _unreadable("a torch.layout", "its name"),
    "torch.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch._tensor.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch.nn.parameter.Parameter": _unreadable("a parameter of torch before version 0.4", "it again"),
}
"""What rebuilds tensors, by its full name."""
