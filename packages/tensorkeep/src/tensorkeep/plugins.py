"""Plug-ins: formats, codecs and techniques, found by their entry points, such as ``mine =
"my_package.my_format:FORMAT"`` in the group ``tensorkeep.formats``. A kind has one `Registry`, beside the base class
of its plug-ins.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, distributions, entry_points
from types import MappingProxyType
from typing import Generic, TypeVar

from tensorkeep.errors import MissingExtraError, UnsupportedError, did_you_mean, installation_of

P = TypeVar("P")


class Registry(Generic[P]):
    """The plug-ins of a kind, imported on first use: ``Registry("codec")`` reads the group ``tensorkeep.codecs``.

    Plug-ins of ``packages`` are built in. ``elsewhere`` names the package of a plug-in that may not be installed.
    """

    def __init__(self, kind: str, *packages: str, elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
        self._kind = kind
        self._packages = packages or ("tensorkeep",)
        self._elsewhere = elsewhere
        self._group = f"tensorkeep.{kind}s"
        self._loaded: dict[str, P] = {}

    @cached_property
    def _built_in(self) -> dict[str, EntryPoint]:
        # Built-in plug-ins are found without reading the metadata of all packages.
        own = [next(iter(distributions(name=each)), None) for each in self._packages]
        return {
            entry.name: entry
            for each in own
            if each is not None
            for entry in each.entry_points.select(group=self._group)
        }

    @cached_property
    def _entries(self) -> dict[str, EntryPoint]:
        # Takes 10 ms, because it reads the metadata of all installed packages. Built-in plug-ins come last, so that a
        # third party cannot replace one by using its name.
        return {entry.name: entry for entry in entry_points(group=self._group)} | self._built_in

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[P]:
        """Import and yield the plug-ins one by one, the built-in ones first."""
        yield from map(self.get, sorted(self._built_in))
        yield from (self.get(name) for name in self.names() if name not in self._built_in)

    def get(self, name: str) -> P:
        """Raises UnsupportedError if the name is unknown; MissingExtraError if its package is not installed."""
        if name in self._loaded:
            return self._loaded[name]
        # A built-in name needs no search of other packages.
        entry = self._built_in.get(name) or self._entries.get(name)
        if entry is None and name in self._elsewhere:
            package = self._elsewhere[name]
            message = f"the {self._kind} {name!r} is in the package {package}, which is not installed"
            raise MissingExtraError(message, remedy=installation_of(package))
        if entry is None:
            remedy = self.remedy(name) if self._entries else "reinstall tensorkeep"
            raise UnsupportedError(f"there is no {self._kind} named {name!r}", remedy=remedy)
        # The type of a loaded object is not known here: the conformance suite of the kind checks it.
        # `setdefault`: of two threads, both get the first one's object.
        return self._loaded.setdefault(name, entry.load())

    def remedy(self, name: str) -> str:
        """Return the remedy for a name that is unknown."""
        # A format of a package that is not installed counts: its name then leads to the package.
        return did_you_mean(name, sorted({*self.names(), *self._elsewhere}))
