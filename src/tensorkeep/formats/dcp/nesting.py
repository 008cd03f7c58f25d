"""Rebuilding the nested state of a distributed checkpoint without a sidecar."""

from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.dcp.metadata import Contents
from tensorkeep.formats.dcp.pieces import load_value
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import MappedFile
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import Flat, flatten, state_leaves

_MAX_GAPS = 10_000
"""Limit on missing list items beyond three per stored item, over all lists."""


class NestedState(NamedTuple):
    """A rebuilt state. Its tensors are stand-ins without elements, but for those pickled among plain values.

    ``keys`` has the name of the tensor in the metadata for the name of each stand-in. ``refusal`` is that of a
    `Reader`, ``attributes`` are those that the state does not have.
    """

    flat: Flat[Leaf]
    keys: dict[str, str]
    refusal: UnsupportedError | None
    attributes: list[str]


def rebuild(
    contents: Contents, files: Mapping[str, MappedFile], path: Path, allow: Collection[str] = ()
) -> NestedState:
    """Return the state as the metadata nests it; keys that were not text come back as text.

    Objects of the classes in ``allow`` become dicts.

    Raises CorruptCheckpointError if a value is damaged, or the state is nested too deeply; UnsupportedError if a value
    names what runs programs or code, or repeats its containers too often.
    """
    stand_ins = {name: allocate("tensor", tensor.dtype, (0,)) for name, tensor in contents.tensors.items()}
    values: dict[str, Any] = stand_ins | contents.unread
    attributes: dict[str, None] = {}
    limit = SHARED_VALUES
    refusal: UnsupportedError | None = None
    for file, places in _places(contents).items():
        files[file].prefetch(places)
    for name, location in contents.values.items():
        found, pickle_bytes = load_value(name, location, files[location.file], allow)
        values[name] = found.state
        attributes |= dict.fromkeys(found.attributes)
        if refusal is None and found.refusal is not None:
            refusal = found.refusal
            refusal.name = name
        limit += 4 * pickle_bytes
        with decoding(path, name):
            limit -= count_values(values[name], limit)
    state = _nest(contents, values, path)
    with decoding(path):
        flat = flatten(state, placeholders=True)
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    given = state_leaves(state, placeholders=True)
    keys = {name: names[id(leaf.value)] for name, leaf in given.items() if id(leaf.value) in names}
    return NestedState(flat, keys, refusal, [*attributes])


def _places(contents: Contents) -> dict[str, list[tuple[int, int]]]:
    """Return where in each file the plain values are."""
    places: dict[str, list[tuple[int, int]]] = {}
    for location in contents.values.values():
        places.setdefault(location.file, []).append((location.offset, location.offset + location.length))
    return places


class _Conflict(Exception):
    """Two paths that exclude each other."""


class _Node(dict[str | int, Any]):
    """A dict or a list under construction; a dict stored as one plain value is a leaf."""

    def __init__(self, *, is_list: bool) -> None:
        self.is_list = is_list

    def child(self, key: str | int, default: Any) -> Any:
        """Return the child at a key; put the default there if it has none."""
        if self.is_list != (type(key) is int) or (type(key) is int and key < 0):
            raise _Conflict
        return self.setdefault(key, default)

    def gaps(self) -> int:
        """Return the missing list items beyond three per stored item, over all lists."""
        own = max(0, max(map(int, self)) + 1 - 4 * len(self)) if self.is_list else 0
        return own + sum(child.gaps() for child in self.values() if isinstance(child, _Node))

    def build(self) -> Any:
        built = {key: child.build() if isinstance(child, _Node) else child for key, child in self.items()}
        # As torch does: an item that no entry fills is None.
        return [built.get(index) for index in range(max(map(int, built)) + 1)] if self.is_list else built


def _nest(contents: Contents, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Put each value at the end of its path; if paths exclude each other, all stay under their dotted names."""
    paths = {name: contents.paths.get(name, (name,)) for name in [*contents.paths, *values] if name in values}
    root = _Node(is_list=False)
    try:
        for name, keys in paths.items():
            node: Any = root
            for key, following in pairwise(keys):
                node = node.child(key, _Node(is_list=type(following) is int))
                if not isinstance(node, _Node):
                    raise _Conflict
            if keys[-1] in node:
                raise _Conflict
            node.child(keys[-1], values[name])
        if root.gaps() > _MAX_GAPS:
            raise _Conflict
        return dict(root.build())
    except _Conflict:
        return {name: values[name] for name in paths}
    except RecursionError as error:
        raise CorruptCheckpointError("is nested too deeply", path=path) from error
