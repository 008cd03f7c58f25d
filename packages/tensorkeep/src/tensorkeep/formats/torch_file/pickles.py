"""Decodes pickles without executing them: naming a class gives a `Global`, calling it gives a `Call`."""

import _compat_pickle
import io
import pickle
from collections.abc import Callable, Container
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, NamedTuple

from tensorkeep.errors import TensorkeepError, UnsupportedError

_MAX_BYTES = 1024**3


class Global(NamedTuple):
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """Stand-in for a call (opcodes REDUCE and NEWOBJ); recorded, never executed."""

    __slots__ = ("args", "function", "items", "pairs", "state")

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        # The argument of the opcode BUILD.
        self.state: Any = None
        # Appended by the pickle if the call makes a subclass of list.
        self.items: list[Any] = []
        # Set by the pickle if the call makes a subclass of dict.
        self.pairs: list[tuple[Any, Any]] = []


# The keys are not hashed. Hashing a tuple of tuples of tuples recurses in C, and a hostile file could nest them until
# the stack overflows.
class Pairs(list[tuple[Any, Any]]):
    """Stand-in for a dict: its keys and values."""


class PersistentId(NamedTuple):
    """A reference to data outside the pickle, such as the storage of a tensor."""

    key: Any


def name_of(found: Any) -> str:
    """Return the full name of a recorded class or function; an empty text for any other value."""
    # Not `str` of any value: 60 nested tuples that each contain the next one twice have a text of 2**60 parts.
    return str(found) if type(found) is Global else ""


# Python 3.11.0 to 3.11.3, Debian 12 among them, pickle a member of an enum as ``getattr(enum, name)``.
_GETATTR = ("builtins", "getattr")


def decode(
    content: bytes, allowed: Container[tuple[str, str]], what: str, enums: AbstractSet[tuple[str, str]] = frozenset()
) -> Any:
    """Decode a pickle that may name only ``allowed`` pairs of module and name, and ``getattr`` only of ``enums``.

    ``what`` is the subject of errors.
    """
    # Nearly every byte can make an object, so a pickle takes many times its length in memory.
    if len(content) > _MAX_BYTES:
        raise ValueError(f"a pickle of {len(content):,} bytes")
    recorder = Recorder(io.BytesIO(content))
    found = recorder.load()
    # Every name counts, also a name that no call uses.
    for each in recorder.globals.values():
        if each not in allowed and not (each == _GETATTR and recorder.looked_into <= enums):
            raise UnsupportedError(
                f"{what} names {each}, which is not allowed: loading it could run code from the file",
                remedy="if you trust it, load it with torch.distributed.checkpoint and save tensors and plain values",
            )
    return found


# Opcodes of Python's unpickler that make plain values, or that call `find_class` or `persistent_load`.
_OPCODES = """
PROTO MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MARK POP POP_MARK DUP
GLOBAL STACK_GLOBAL BINPERSID NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
EMPTY_LIST LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""


class Recorder(pickle._Unpickler):
    """Reads pickles from a stream that refuses to read beyond its end, one with each `load`; executes nothing."""

    # The C unpickler would allocate a memo as long as the largest index in the file; this one keeps a dict.
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: Any) -> None:
        # Texts that Python 2 pickled may be arbitrary bytes.
        super().__init__(stream, encoding="utf-8", errors="surrogateescape")
        # Frames are a hint to read more at once. Without them, no layer of Python lies between opcodes and stream.
        self.read: Callable[[int], bytes] = stream.read
        self.readline: Callable[[], bytes] = stream.readline
        # All classes and functions by full name, with their names in Python 3; then all persistent ids.
        self.globals: dict[str, Global] = {}
        self.references: list[Any] = []
        # What `getattr` is called with first: a recorded class, or None for anything else.
        self.looked_into: set[Global | None] = set()

    def load(self) -> Any:
        """Return the value of the next pickle; ValueError if it is malformed or has an unknown opcode."""
        self.memo: dict[int, Any] = {}  # each pickle counts from 0
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        read, dispatch = self.read, self.dispatch
        try:
            while (opcode := read(1)) != pickle.STOP:
                dispatch[ord(opcode)](self)
            return self.stack.pop()
        except (TensorkeepError, MemoryError):
            raise
        # Hostile bytes make `pickle` raise a dozen types.
        except Exception as error:
            raise ValueError(f"the pickle is malformed ({type(error).__name__}: {error})") from error

    def find_class(self, module: str, name: str) -> Global:
        # Pickles of Python 2 name `__builtin__` and other old modules.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        found = Global(_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        # Recorded before the stack uses it: a name counts even if the pickle never calls it.
        self.globals[str(found)] = found
        return found

    def persistent_load(self, pid: Any) -> PersistentId:
        self.references.append(pid)
        return PersistentId(pid)

    def _call(self) -> None:
        call = Call(args=_tuple(self.stack.pop()), function=self.stack.pop())
        if call.function == _GETATTR:
            self.looked_into.add(call.args[0] if call.args and type(call.args[0]) is Global else None)
        self.stack.append(call)

    def _call_with_keywords(self) -> None:
        keywords, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, (*_tuple(args), keywords) if keywords else _tuple(args)))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        # Only objects have a state.
        if type(target) is not Call:
            raise TypeError("attributes of a value that cannot have any")
        target.state = state

    def _extend(self, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        if type(target) not in (list, Call):
            raise TypeError("an item of a value that cannot have any")
        (target if type(target) is list else target.items).extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, values: list[Any]) -> None:
        target: Any = self.stack[-1]
        if type(target) not in (Pairs, Call):
            raise TypeError("a key of a value that cannot have any")
        (target if type(target) is Pairs else target.pairs).extend(zip(values[::2], values[1::2], strict=True))

    def _dict(self) -> None:
        values = self.pop_mark()
        self.stack.append(Pairs(zip(values[::2], values[1::2], strict=True)))

    def _frozenset(self) -> None:
        items = self.pop_mark()  # replaces ``self.stack``, so it must come before ``self.stack.append``
        self.stack.append(Call(Global("builtins", "frozenset"), (items,)))

    def _bytearray(self) -> None:
        # Python's own method allocates the length that the pickle claims before it reads.
        count = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(count)))

    # INST, OBJ and EXT are missing on purpose: they import and call classes.
    dispatch: ClassVar[dict[int, Any]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES.split()},
        pickle.FRAME[0]: lambda self: self.read(8),
        # NEWOBJ calls `cls.__new__`, and is recorded like REDUCE.
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_keywords,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
        pickle.DICT[0]: _dict,
        pickle.EMPTY_DICT[0]: lambda self: self.append(Pairs()),
        pickle.EMPTY_SET[0]: lambda self: self.append(Call(Global("builtins", "set"), ())),
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray,
    }


def _tuple(args: Any) -> tuple[Any, ...]:
    if type(args) is not tuple:
        raise TypeError("the arguments of a call are not a tuple")
    return args


class Bounded:
    """A binary stream of at most ``size`` bytes for a `Recorder`; ValueError if a read asks for more."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream = stream
        self._left = min(size, _MAX_BYTES)

    def read(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("a length that is larger than the file")
        # The limit is for all pickles of the file together.
        self._left -= count
        content: bytes = self._stream.read(count)
        return content

    def readline(self) -> bytes:
        # Opcodes of protocol 0 read lines, which may be as long as the file.
        line: bytes = self._stream.readline(self._left)
        self._left -= len(line)
        return line
