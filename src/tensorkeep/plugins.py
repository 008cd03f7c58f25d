"""One registry for formats, codecs and whatever else comes as a plug-in.

Built-ins are listed as entry points in this package's own ``pyproject.toml``, exactly as a third party lists
theirs, so that there is one way in::

    [project.entry-points."tensorkeep.formats"]
    mine = "my_package.my_format:FORMAT"
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tensorkeep.errors import UnsupportedError


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"tensorkeep.{kind}"):
        # A name that two distributions claim goes to the built-in, so that nothing can replace a format unseen.
        if entry.name not in found or entry.value.startswith("tensorkeep."):
            found[entry.name] = entry
    return found


def names(kind: str) -> list[str]:
    """Return the registered names of a kind (``"formats"``, ``"codecs"``, ``"techniques"``) in alphabetical order.

    Installers list them in orders of their own.
    """
    return sorted(_entries(kind))


@cache
def get(kind: str, name: str) -> Any:
    """Return the plug-in of that kind and name, importing it on first use.

    Raises
    ------
    UnsupportedError
        If there is none of that name; the remedy names the nearest one.
    """
    entries = _entries(kind)
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        known = ", ".join(sorted(entries)) or "none: reinstall tensorkeep"
        remedy = f"did you mean {near[0]!r}?" if near else f"known: {known}"
        raise UnsupportedError(f"there is no {kind[:-1]} named {name!r}", remedy=remedy)
    return entries[name].load()
