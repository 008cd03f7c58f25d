"""Decoding of pickles without execution: classes and calls are only recorded by name.

The metadata of a distributed checkpoint is a pickle, and each of its tensors begins with one. Both name a few classes
only; any other name is refused. `pickletools` splits the bytes into opcodes and bounds every read by the bytes that
exist, so a length in the file never causes an allocation.
"""

import pickletools
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from tensorkeep.errors import UnsupportedError

_MARK = object()
_MAX_BYTES = 1024**3


class Global(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """Stand-in for a call (opcodes REDUCE and NEWOBJ); recorded, never executed.

    ``state`` is what the opcode BUILD would set the attributes of the result from; None without one.
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
    machine = _Machine(allowed, what)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise ValueError(f"the pickle has the opcode {opcode.name}, which torch does not write")
            action(machine, argument)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the pickle is malformed ({type(error).__name__}: {error})") from error
    raise ValueError("the pickle has no end")


class _Machine:
    """The stack and the memo of a pickle, and one method for each kind of opcode."""

    def __init__(self, allowed: Container[tuple[str, str]], what: str) -> None:
        self._allowed = allowed
        self._what = what
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self.top()
        del self._stack[-1]
        return value

    def top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise IndexError("the stack ends in a mark")
        return self._stack[-1]

    def pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise IndexError("the stack has no mark")

    def short_tuple(self, length: int) -> None:
        values = tuple(self._stack[-length:])
        if len(values) < length or any(value is _MARK for value in values):
            raise IndexError("the stack is too short")
        self._stack[-length:] = [values]

    def memoize(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.top()

    def recall(self, index: int) -> None:
        self.push(self._memo[index])

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise TypeError("an append to a value that is not a list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not dict or len(values) % 2:
            raise TypeError("an item of a value that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Hashing a tuple of tuples of tuples would recurse without bound.
            if type(key) not in (str, int, Call):
                raise TypeError(f"a key of type {type(key).__name__}")
            target[key] = value

    def find(self, module: str, name: str) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a class name that is not text")
        if (module, name) not in self._allowed:
            raise UnsupportedError(
                f"{self._what} names {module}.{name}, which is not allowed: loading it could run code from the file",
                remedy="if you trust it, load it with torch.distributed.checkpoint and save tensors and plain values",
            )
        self.push(Global(module, name))

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.find(module, name)

    def call(self, _: Any) -> None:
        args, function = self.pop(), self.pop()
        if type(function) is not Global or type(args) is not tuple:
            raise TypeError("a call of a value that is not a function")
        self.push(Call(function, args))

    def build(self, _: Any) -> None:
        state, target = self.pop(), self.top()
        if type(target) is not Call:
            raise TypeError("attributes of a value that has none")
        target.state = state


_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
)
"""Opcodes whose argument is the value."""

_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_LITERALS, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.push(_MARK),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.short_tuple(1),
    "TUPLE2": lambda machine, _: machine.short_tuple(2),
    "TUPLE3": lambda machine, _: machine.short_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    # The module and the name, which contain no space, are joined by one.
    "GLOBAL": lambda machine, argument: machine.find(*argument.split(" ", 1)),
    "STACK_GLOBAL": _Machine.stack_global,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.push(PersistentId(machine.pop())),
}
