"""Classes outside torch's allow list that the caller allows: read as dicts, never executed.

A pickle names classes and functions, and calls them. All calls are only recorded (``inert_pickle.py``). An object of a
class that is allowed becomes a dict (``rebuild.py``). The class itself is neither imported nor called, so that an
allowed name cannot run code, whatever the file does with it.
"""

import re
from collections.abc import Iterable

from tensorkeep.errors import UsageError
from tensorkeep.formats.pickles.numpy_arrays import NUMPY

COMMANDS = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|runpy|importlib|ctypes|pty|code)(\..*)?"
    r"|builtins\.(eval|exec|compile|getattr|open|__import__)"
)
"""Names that run programs or code, which no checkpoint needs."""

Allow = str | type | Iterable[str | type]
"""Classes, or their full names."""


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
