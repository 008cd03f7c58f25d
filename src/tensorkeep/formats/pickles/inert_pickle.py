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
from collections.abc import Callable, Container
from typing import Any, ClassVar, NamedTuple

from tensorkeep.errors import TensorkeepError, UnsupportedError

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
