"""Environment variables ``TENSORKEEP_*``. Whoever reads a variable also reports one that is spelled nearly like it.

``TENSORKEEP_CODER``, ``TENSORKEEP_STORE_GRACE`` and ``TENSORKEEP_STORE_TIMEOUT`` are read here. The command line reads
one variable for each option, and the trainer one for each setting.
"""

import os
from collections.abc import Iterable

from tensorkeep.errors import warn_caller

PREFIX = "TENSORKEEP_"


def read_variable(name: str) -> str:
    """Return a variable by its full name, or an empty text; warns of a mistyped one."""
    if name not in os.environ:
        for message in mistyped([name]):
            warn_caller(message)
    return os.environ.get(name, "")


def mistyped(known: Iterable[str]) -> list[str]:
    """Return a message for each variable of the environment that is spelled nearly like one of these, and is none."""
    known = set(known)
    found = [name for name in os.environ if name.startswith(PREFIX) and name not in known]
    if not found:
        return []
    import difflib  # of no use to a program without such a variable

    # Without the prefix, which would make all of them similar.
    words = [name.removeprefix(PREFIX) for name in sorted(known)]
    near = {name: difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=0.8) for name in found}
    return [f"{name} has no effect; did you mean {PREFIX}{like[0]}?" for name, like in near.items() if like]
