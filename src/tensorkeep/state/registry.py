"""The user's classes that a state may contain: dataclasses, enums and named tuples.

A file has only the name of a class. Only a class that this process has registered under that name is instantiated, so
no file can make the process import or run anything.
"""

import dataclasses
import enum
from typing import Any, TypeVar

from tensorkeep.errors import UnsupportedError, UsageError

Class = TypeVar("Class", bound=type)

_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}


def register(cls: Class) -> Class:
    """Allow states to contain instances of a dataclass, an enum or a named tuple; usable as a decorator.

    The class is saved as ``module:qualified name`` and must be registered under the same name in the process that
    loads. The fields of a dataclass are restored without calling ``__init__`` or ``__post_init__``.

    Parameters
    ----------
    cls : type
        A dataclass, an enum or a named tuple.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    UsageError
        If it is another kind of class, or an abstract dataclass.

    Examples
    --------
    >>> @register
    ... @dataclasses.dataclass
    ... class Schedule:
    ...     warmup: int
    ...     peak: float
    """
    if not isinstance(cls, type) or not (
        dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum) or is_namedtuple(cls)
    ):
        raise UsageError(
            f"{cls!r} cannot be registered",
            remedy="register a dataclass, an enum or a named tuple; save the state_dict() of other objects",
        )
    if dataclasses.is_dataclass(cls):
        try:
            object.__new__(cls)
        except TypeError as error:
            raise UsageError(
                f"{cls.__name__} cannot be registered: {error}", remedy="register a concrete dataclass"
            ) from None
    # A module that is reloaded, or a notebook cell that is run again, replaces its class.
    name = f"{cls.__module__}:{cls.__qualname__}"
    _CLASSES[name] = cls
    _NAMES[cls] = name
    return cls


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a named tuple."""
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def registered_name(cls: type) -> str | None:
    """Return the name under which a class is saved, or None if it is not registered."""
    return _NAMES.get(cls)


def registered_class(name: str) -> type[Any]:
    """Return the class of that name; UnsupportedError if this process has not registered one."""
    if name not in _CLASSES:
        module, _, qualified = name.partition(":")
        raise UnsupportedError(
            f"the state contains a {name}, which is not registered in this process",
            remedy=f"import {qualified} from {module} and call tensorkeep.register({qualified}) before loading",
        )
    return _CLASSES[name]
