"""Classes outside torch's allow list that the caller allows: read as dicts, never executed.

A pickle names classes and functions, and calls them. For each name that is allowed, torch's restricted unpickler gets a
stand-in, which records what it is called with. The class itself is neither imported nor called, so that an allowed name
cannot run code, whatever the file does with it. The functions with which numpy rebuilds arrays and scalars are the
exception: they are called, because only they know the values.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

from tensorkeep.errors import UsageError

_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMPY = {
    "numpy.dtype",
    "numpy.ndarray",
    *(f"{module}.{name}" for module in _NUMPY_MODULES for name in ("scalar", "_reconstruct")),
}
"""What rebuilds arrays and scalars; allowed together as "numpy"."""

COMMANDS = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|runpy|importlib|ctypes|pty|code)(\..*)?"
    r"|builtins\.(eval|exec|compile|getattr|open|__import__)"
)
"""Names that run programs or code, which no checkpoint needs."""

TRUST = "if you trust it, load it with torch.load(weights_only=False) and save tensors and plain values"

Allow = str | type | Iterable[str | type]
"""Classes, or their full names."""

# The allow list of torch is one for the process.
_LOCK = threading.Lock()


def allowed_names(allow: Allow | None) -> frozenset[str]:
    """Return the full names of the classes that a caller allows; UsageError if one is not the name of a class.

    "numpy" stands for all that rebuild arrays and scalars.

    >>> sorted(allowed_names(["argparse.Namespace", dict]))
    ['argparse.Namespace', 'builtins.dict']
    """
    given = () if allow is None else (allow,) if isinstance(allow, str | type) else tuple(allow)
    names = [f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else one for one in given]
    for name in names:
        if name == "numpy":
            continue
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            raise UsageError(
                f"{name!r} is not the full name of a class", remedy="give it with its module: argparse.Namespace"
            )
        if COMMANDS.fullmatch(name):
            raise UsageError(
                f"{name} cannot be allowed: it runs code, and is not a class of values",
                remedy="do not load a checkpoint that calls it",
            )
    return frozenset(names).union(NUMPY if "numpy" in names else ()) - {"numpy"}


class _StandIn:
    """An object of an allowed class: its class's name, the arguments of its construction, and its state."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> Self:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Accept the arguments, which `__new__` has recorded."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


_MADE_HERE = "_stand_in"
"""An attribute of the OrderedDicts that stand for objects, whose other attributes are left out."""

Container = type[OrderedDict[Any, Any]] | type[list[Any]]

_NOT_A_CONTAINER = re.compile(r"Can only (SETITEMS?|append|extend) .* but got <class '([^']+)'>")


def container_of(message: str) -> tuple[str, Container] | None:
    """Return the class whose object the restricted unpickler did not fill with items, and what it can fill instead."""
    found = _NOT_A_CONTAINER.search(message)
    return found and (found[2], OrderedDict if found[1].startswith("SETITEM") else list)


def _stand_in(name: str, container: Container | None) -> type:
    """Return the stand-in for a class; instances are containers, without attributes, if it is a subclass of one."""
    module, _, own_name = name.rpartition(".")
    attributes: dict[str, Any] = {"name": name, "__module__": module}
    if container is not None:
        attributes["__new__"] = lambda cls, *arguments: _empty(container)
    return type(own_name, (_StandIn,), attributes)


def _empty(container: Container) -> Any:
    made = container()
    if isinstance(made, OrderedDict):
        vars(made)[_MADE_HERE] = True
    return made


@contextmanager
def allowing(names: Collection[str], containers: Mapping[str, Container] = MappingProxyType({})) -> Iterator[None]:
    """Make torch's restricted unpickler accept these names while the block runs; see `container_of`."""
    if not names:
        yield
        return
    import torch

    stand_ins: list[Any] = [(_stand_in(name, containers.get(name)), name) for name in set(names) - NUMPY]
    with _LOCK, torch.serialization.safe_globals(stand_ins + _numpy_globals(set(names) & NUMPY)):
        yield


def _numpy_globals(names: Collection[str]) -> list[Any]:
    if not names:
        return []
    import numpy as np
    from numpy.dtypes import __all__ as dtypes

    # Dtypes are instances of classes that the pickle does not name.
    found: list[Any] = [(getattr(np.dtypes, name), f"numpy.dtypes.{name}") for name in dtypes]
    real: dict[str, Any] = {"dtype": np.dtype, "ndarray": np.ndarray}
    real["_reconstruct"] = np.empty(0).__reduce__()[0]
    real["scalar"] = np.float64(0).__reduce__()[0]
    return found + [(real[name.rpartition(".")[2]], name) for name in names]


def with_plain_objects(state: Any) -> Any:
    """Return a state with dicts in place of allowed objects; containers are changed in place.

    An object becomes a dict of its attributes. One that is made from arguments, such as a path, becomes its class and
    arguments. Objects of subclasses of dict and list are containers already.
    """
    return _plain(state, {})


def _plain(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, type) and issubclass(value, _StandIn):
        return value.name
    made_here = isinstance(value, _StandIn) or (isinstance(value, OrderedDict) and _MADE_HERE in vars(value))
    if isinstance(value, dict) or made_here:
        contents = known[id(value)] = {} if made_here else value
        for key, item in (_contents(value) if isinstance(value, _StandIn) else value).items():
            contents[key] = _plain(item, known)
    elif isinstance(value, list):
        known[id(value)] = value
        value[:] = [_plain(item, known) for item in value]
    elif type(value) is tuple:
        known[id(value)] = tuple(_plain(item, known) for item in value)
    else:
        return value
    return known[id(value)]


def _contents(found: _StandIn) -> dict[str, Any]:
    state = found.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # the second has the slots
    if found.arguments or not all(part is None or isinstance(part, dict) for part in parts):
        made = {"class": found.name, "arguments": list(found.arguments)}
        return made if state is None else made | {"state": state}
    return {name: item for part in parts for name, item in (part or {}).items()}
