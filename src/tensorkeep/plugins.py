"""Plug-ins: formats, codecs and techniques, found by their entry points.

The built-in ones are listed in this package's own ``pyproject.toml`` exactly as a third party lists its own::

    [project.entry-points."tensorkeep.formats"]
    mine = "my_package.my_format:FORMAT"

Each kind has one `Registry`, beside the contract that its plug-ins fulfil: ``codecs.base.CODECS``,
``formats.base.FORMATS`` and ``train.techniques.base.TECHNIQUE_CLASSES``.
"""

from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Generic, TypeVar

from tensorkeep.errors import UnsupportedError, did_you_mean

P = TypeVar("P")


class Registry(Generic[P]):
    """The plug-ins of one kind, imported on first use: ``Registry("codec")`` has those of ``tensorkeep.codecs``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._group = f"tensorkeep.{kind}s"
        self._loaded: dict[str, P] = {}

    @cached_property
    def _built_in(self) -> dict[str, EntryPoint]:
        own = next(iter(distributions(name="tensorkeep")), None)
        return {} if own is None else {entry.name: entry for entry in own.entry_points.select(group=self._group)}

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        # Takes 10 ms: the metadata of everything that is installed is read. A third party cannot replace a built-in
        # plug-in by one of the same name.
        return {entry.name: entry for entry in entry_points(group=self._group)} | self._built_in

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted(self._entries)

    def __iter__(self) -> Iterator[P]:
        """Yield the plug-ins, each imported when it is reached: built-in ones, then third parties'."""
        yield from map(self.get, sorted(self._built_in))
        yield from (self.get(name) for name in self.names() if name not in self._built_in)

    def get(self, name: str) -> P:
        """Return a plug-in; the remedy of the UnsupportedError for an unknown name gives the nearest one."""
        if name in self._loaded:
            return self._loaded[name]
        entry = self._built_in.get(name) or self._entries.get(name)
        if entry is None:
            remedy = did_you_mean(name, self.names()) if self._entries else "reinstall tensorkeep"
            raise UnsupportedError(f"there is no {self._kind} named {name!r}", remedy=remedy)
        # What an entry point names is not typed: the conformance suite of the kind checks it.
        return self._loaded.setdefault(name, entry.load())
