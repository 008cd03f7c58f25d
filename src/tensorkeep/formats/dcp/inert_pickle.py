"""Generic decoder of pickles without execution: classes and calls are only recorded by name.

The metadata of a distributed checkpoint is a pickle, and each of its tensors begins with one. Both name a few classes
only; any other name is refused. Python's own unpickler in Python reads the stream, with the opcodes alone that torch
writes. It reads from memory and keeps its memo in a dict, so a length in the file never causes an allocation.
"""

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

    ``state`` is the argument of the opcode BUILD; None if absent.
    """

    __slots__ = ("args", "function", "state")

    def __init__(self, function: Global, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.state: Any = None


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
