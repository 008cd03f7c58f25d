"""Reading a pickle without running it: what it would call is written down, never called.

The metadata of a distributed checkpoint is a pickle, and so is what stands in front of each of its tensors. Both are
made of a few classes only. Here every class is a word and every instance a record of what it was to be made from; a
word that the caller does not expect is refused, by name. `pickletools` splits the bytes, so that no claim in them is
believed: its reads are bounded by the bytes that there are.
"""

from __future__ import annotations

import functools
import pickletools
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from tensorkeep.errors import UnsupportedError

_MARK = object()
_MOST_BYTES = 1024**3


class Global(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """An instance that was not made.

    Attributes
    ----------
    by : Global
        The class, or the function that would have been called.
    args : tuple
        What with.
    state : object
        What its attributes would have been set from, if anything.
    """

    __slots__ = ("args", "by", "state")

    def __init__(self, by: Global, args: tuple[Any, ...]) -> None:
        self.by = by
        self.args = args
        self.state: Any = None


class Persistent(NamedTuple):
    """Something outside of the pickle, by what it is called there."""

    key: Any


def load(content: bytes, expected: Container[tuple[str, str]], what: str) -> Any:
    """Return what a pickle holds: Python's plain values and containers, `Made` and `Global`.

    Parameters
    ----------
    content : bytes
    expected : container of (str, str)
        Modules and names of the classes and functions that it may name.
    what : str
        What errors call it.

    Raises
    ------
    ValueError
        If it is no sound pickle.
    UnsupportedError
        If it names anything else.
    """
    if len(content) > _MOST_BYTES:
        raise ValueError(f"a pickle of {len(content):,} bytes")
    machine = _Machine(expected, what)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise ValueError(f"the pickle has the opcode {opcode.name}, which is not expected here")
            action(machine, argument)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the pickle makes no sense ({type(error).__name__}: {error})") from error
    raise ValueError("the pickle has no end")


class _Machine:
    """The stack and the memo of a pickle; one method for each kind of opcode."""

    def __init__(self, expected: Container[tuple[str, str]], what: str) -> None:
        self._expected = expected
        self._what = what
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError("the stack ends in a mark")
        return value

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                found = self._stack[place + 1 :]
                del self._stack[place:]
                return found
        raise IndexError("there is no mark")

    def _nothing(self, _: Any) -> None:
        pass

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _short_tuple(self, length: int) -> None:
        values = tuple(self._stack[-length:])
        if len(values) < length or any(value is _MARK for value in values):
            raise IndexError("the stack ends too early")
        self._stack[-length:] = [values]

    def _put(self, place: Any) -> None:
        self._memo[len(self._memo) if place is None else place] = self._top()

    def _get(self, place: Any) -> None:
        self._stack.append(self._memo[place])

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise IndexError("the stack ends in a mark")
        return self._stack[-1]

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise TypeError("appends to what is no list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            raise TypeError("sets items of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A tuple of tuples of tuples would be hashed by recursion without an end.
            if type(key) not in (str, int, Made):
                raise TypeError("has a key that is neither text nor number")
            target[key] = value

    def _global(self, argument: Any) -> None:
        # The two words are joined by a space, and neither has one.
        self._find(*argument.split(" ", 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("names a class by what is no text")
        self._find(module, name)

    def _find(self, module: str, name: str) -> None:
        if (module, name) not in self._expected:
            raise UnsupportedError(
                f"{self._what} names {module}.{name}, which none needs: loading it could run code from the file",
                remedy="where you trust it, load it with torch.distributed.checkpoint and save tensors and values",
            )
        self._stack.append(Global(module, name))

    def _make(self, _: Any) -> None:
        args, by = self.pop(), self.pop()
        if type(by) is not Global or type(args) is not tuple:
            raise TypeError("calls what is no function")
        self._stack.append(Made(by, args))

    def _build(self, _: Any) -> None:
        state, made = self.pop(), self._top()
        if type(made) is not Made:
            raise TypeError("sets the state of what has none")
        made.state = state

    def _persistent(self, _: Any) -> None:
        self._stack.append(Persistent(self.pop()))


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}


def _push_new(make: Callable[[], Any], machine: _Machine, _: Any) -> None:
    machine._push(make())


_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
)
"""Opcodes whose argument is the value."""

_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_VALUES, _Machine._push),
    **{name: functools.partial(_push_new, make) for name, make in _CONSTANTS.items()},
    "PROTO": _Machine._nothing,
    "FRAME": _Machine._nothing,
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "TUPLE1": lambda machine, _: machine._short_tuple(1),
    "TUPLE2": lambda machine, _: machine._short_tuple(2),
    "TUPLE3": lambda machine, _: machine._short_tuple(3),
    "MEMOIZE": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "APPEND": lambda machine, _: machine._append([machine.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "SETITEM": lambda machine, _: machine._set([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._set(machine._since_mark()),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._make,
    "NEWOBJ": _Machine._make,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
