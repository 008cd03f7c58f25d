"""Plug-ins: formats, codecs and techniques, found by their entry points.

The built-in ones are listed in this package's own ``pyproject.toml`` exactly as a third party lists its own::

    [project.entry-points."tensorkeep.formats"]
    mine = "my_package.my_format:FORMAT"

Each kind has one `Registry`, beside the contract that its plug-ins fulfil: ``codecs.base.CODECS``,
``formats.base.FORMATS`` and ``train.techniques.base.TECHNIQUE_CLASSES``.
"""

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from tensorkeep.errors import UnsupportedError, did_you_mean

P = TypeVar("P")


class Registry(Generic[P]):
    """The plug-ins of one kind, imported on first use: ``Registry("codec")`` has those of ``tensorkeep.codecs``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._loaded: dict[str, P] = {}

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=f"tensorkeep.{self._kind}s"):
            # A third party cannot replace a built-in plug-in by one of the same name.
            if entry.name not in found or entry.value.startswith("tensorkeep."):
                found[entry.name] = entry
        return found

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted(self._entries)

    def get(self, name: str) -> P:
        """Return a plug-in; the remedy of the UnsupportedError for an unknown name gives the nearest one."""
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._entries:
            remedy = did_you_mean(name, self.names()) if self._entries else "reinstall tensorkeep"
            raise UnsupportedError(f"there is no {self._kind} named {name!r}", remedy=remedy)
        # What an entry point names is not typed: the conformance suite of the kind checks it.
        return self._loaded.setdefault(name, self._entries[name].load())
