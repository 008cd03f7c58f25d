"""The nested state of a distributed checkpoint that Tensorkeep did not write."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError, UnsupportedLeafError
from tensorkeep.formats.dcp.metadata import Contents
from tensorkeep.formats.dcp.slice_zip import MappedFile, load_value
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import Flat, flatten, state_leaves

_MOST_GAPS = 10_000
"""Places of all lists together that nothing was saved for, besides three for each that something was."""

_SHARED_VALUES = 1_000_000


class Rebuilt(NamedTuple):
    """A state whose tensors are stand-ins without elements, but for those that were pickled among plain values.

    Attributes
    ----------
    flat : Flat
    keys : dict of str to str
        For the name of each stand-in, the name of the tensor in the checkpoint.
    """

    flat: Flat[Leaf]
    keys: dict[str, str]


def rebuild(contents: Contents, files: Mapping[str, MappedFile], path: Path) -> Rebuilt:
    """Return the state that was saved, nested as the metadata says; keys that were no text come back as text.

    Raises
    ------
    CorruptCheckpointError, UnsupportedError
    """
    stand_ins = {name: _stand_in(tensor.dtype) for name, tensor in contents.tensors.items()}
    values: dict[str, Any] = dict(stand_ins)
    budget = _SHARED_VALUES
    for name, place in contents.values.items():
        values[name], pickle_bytes = load_value(name, place, files[place.file])
        budget = _spend(values[name], budget + 4 * pickle_bytes, name, path)
    state = _nest(contents, values, path)
    try:
        flat = flatten(state)
    except UnsupportedLeafError as error:
        raise UnsupportedError(error.message, path=path, name=error.name, remedy=error.remedy) from error
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    keys = {name: names[id(given.value)] for name, given in state_leaves(state).items() if id(given.value) in names}
    return Rebuilt(flat, keys)


def _stand_in(dtype: DType) -> Any:
    return allocate("tensor", dtype, (0,))


def _spend(value: Any, budget: int, name: str, path: Path) -> int:
    """Refuse a small pickle of containers that hold one another so often that walking them would never end."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict | list | tuple | set):
            budget -= 1 + len(found)
            if budget < 0:
                raise UnsupportedError(
                    "its containers hold one another over and over", path=path, name=name, remedy="save each once"
                )
            waiting.extend(found.values() if isinstance(found, dict) else found)
    return budget


def _nest(contents: Contents, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Put values at the ends of their paths; where these contradict each other, all stay under their dotted names."""
    root = _Mapping()
    order = {name: contents.paths.get(name, (name,)) for name in [*contents.paths, *values] if name in values}
    try:
        for name, keys in order.items():
            _put(root, keys, values[name])
        return dict(_Lists().made(root))
    except _Contradiction:
        return {name: values[name] for name in order}
    except RecursionError as error:
        raise CorruptCheckpointError("is nested too deeply", path=path) from error


class _Contradiction(Exception):
    """Two paths that cannot both be."""


class _Sequence(dict[int, Any]):
    """A list whose items come in any order."""


def _put(root: dict[Any, Any], keys: tuple[str | int, ...], value: Any) -> None:
    container: Any = root
    for key, following in pairwise(keys):
        _check_key(container, key)
        child = container.get(key)
        if child is None:
            child = container[key] = _Sequence() if type(following) is int else _Mapping()
        if not isinstance(child, _Sequence | _Mapping):
            raise _Contradiction
        container = child
    _check_key(container, keys[-1])
    if keys[-1] in container:
        raise _Contradiction
    container[keys[-1]] = value


class _Mapping(dict[str, Any]):
    """A dict on the way to a value; plain values that are dicts are not put into."""


def _check_key(container: Any, key: str | int) -> None:
    if isinstance(container, _Sequence) != (type(key) is int) or (type(key) is int and key < 0):
        raise _Contradiction


class _Lists:
    """Makes lists of sequences; what they may be longer than what was saved is one allowance for all of them."""

    def __init__(self) -> None:
        self._gaps = _MOST_GAPS

    def made(self, value: Any) -> Any:
        """Return containers as they were saved."""
        if isinstance(value, _Sequence):
            length = max(value) + 1
            self._gaps -= max(0, length - 4 * len(value))
            if self._gaps < 0:
                raise _Contradiction
            # As torch does: what nothing was saved for is None.
            return [self.made(value.get(index)) for index in range(length)]
        return {key: self.made(child) for key, child in value.items()} if isinstance(value, _Mapping) else value
