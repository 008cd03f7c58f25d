"""Which coder is in use: the compiled one, or the one in Python where there is no extension.

The environment variable ``TENSORKEEP_CODER``, read when this module is imported, requires one of them: ``compiled`` or
``python``. Both read what the other wrote.
"""

import os

from tensorkeep.errors import UnsupportedError, UsageError

try:
    from tensorkeep.codecs import _coder as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

_VARIABLE = "TENSORKEEP_CODER"
_required = os.environ.get(_VARIABLE, "")
if _required not in ("", "compiled", "python"):
    raise UsageError(f"{_VARIABLE}={_required!r} is not a coder", remedy="set it to compiled or python, or unset it")
if _required == "compiled" and compiled is None:
    raise UnsupportedError(
        f"{_VARIABLE}=compiled, but this installation has no compiled coder",
        remedy="install tensorkeep where a C compiler is, or unset the variable",
    )
if _required == "python":
    compiled = None  # type: ignore[assignment]


def describe() -> str:
    """Return which coder is in use, for people.

    Examples
    --------
    >>> describe().partition(" ")[0] in ("compiled", "Python")
    True
    """
    if compiled:
        return f"compiled ({compiled.simd})"
    reason = f"{_VARIABLE}=python" if _required == "python" else "no compiled coder"
    return f"Python ({reason}: numpy + zstandard)"
