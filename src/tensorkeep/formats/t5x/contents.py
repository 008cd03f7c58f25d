"""What a T5X checkpoint holds, ours or others': a state of arrays to open and of values that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError, UnsupportedLeafError
from tensorkeep.formats import sidecar
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.structure import SourceT
from tensorkeep.formats.t5x import flax_msgpack
from tensorkeep.formats.t5x.tree import FILE_NAME, MARK, is_spec, key_of, leaves, read
from tensorkeep.formats.tensorstore.opened import Wanted
from tensorkeep.formats.tensorstore.stored_types import StoredType, is_possible
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.state.aliases import Alias
from tensorkeep.state.dtypes import BY_NAME, DType, of_numpy
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import Flat, flatten, state_leaves

_ZARR = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the state, with the bytes it has there or None if they lie in an array."""

    dtype: DType
    shape: tuple[int, ...]
    content: Bytes | None


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's state, before its arrays are opened.

    Attributes
    ----------
    notes : Sidecar or None
        What Tensorkeep wrote beside it.
    wanted : dict of str to Wanted
        The arrays, by the tensor's name.
    inline : dict of str to Stored
        The tensors that lie in the msgpack file.
    foreign : Flat or None
        The state's structure where there is no sidecar; tensors that lie in arrays are stand-ins of no elements.
    version : int
    """

    notes: Sidecar | None
    wanted: dict[str, Wanted]
    inline: dict[str, Stored]
    foreign: Flat[Leaf] | None
    version: int

    @property
    def aliases(self) -> dict[str, Alias]:
        """The tensors that are views of others."""
        return self.notes.aliases if self.notes is not None else self._structure.aliases

    def flat(self, leaves: Mapping[str, SourceT]) -> Flat[SourceT]:
        """Return the state, with these leaves in its order."""
        if self.notes is not None:
            return self.notes.flat(leaves)
        found = self._structure
        return Flat(found.skeleton, {name: leaves[name] for name in found.leaves}, found.aliases, found.parts)

    @property
    def _structure(self) -> Flat[Leaf]:
        if self.foreign is None:
            raise AssertionError("a checkpoint without a sidecar has a structure of its own")
        return self.foreign


def look(directory: Directory) -> Contents:
    """Return what the msgpack file, and our own beside it, say.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError
    """
    notes = sidecar.read(directory, "t5x", Sidecar) if sidecar.FILE_NAME in names_in(directory.path) else None
    tree = read(directory)
    path = directory.path / FILE_NAME
    if notes is not None:
        return _own(notes, tree, path)
    if MARK in tree:
        raise CorruptCheckpointError(
            "tensorkeep.json, which says what the state looks like, is missing",
            path=directory.path,
            remedy="fetch the missing file, or take another copy",
        )
    return _foreign(tree, path)


def _own(notes: Sidecar, tree: dict[str, Any], path: Path) -> Contents:
    wanted: dict[str, Wanted] = {}
    inline: dict[str, Stored] = {}
    for name, note in notes.tensors.items():
        value: Any = tree["optimizer"]
        for key in note.place:
            value = value.get(key) if isinstance(value, dict) else None
        try:
            if is_spec(value):
                stored = BY_NAME.get(str(value.get("dtype")))
                types = StoredType(note.state_dtype, stored) if stored is not None else None
                if types is None or not is_possible(types):
                    raise ValueError(f"a {note.dtype} is not stored as {value.get('dtype')!r}")
                wanted[name] = Wanted(key_of(value), _ZARR, types, note.shape)
            else:
                inline[name] = _inline(note.state_dtype, note.shape, value)
        except ValueError as error:
            raise CorruptCheckpointError(str(error), path=path, name=name) from error
    return Contents(notes, wanted, inline, None, int(tree["version"]))


def _inline(dtype: DType, shape: tuple[int, ...], value: Any) -> Stored:
    if not isinstance(value, np.ndarray) or value.shape != shape or value.nbytes != prod(shape) * dtype.itemsize:
        raise ValueError("what stands in its place is no such tensor")
    return Stored(dtype, shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _foreign(tree: dict[str, Any], path: Path) -> Contents:
    state: dict[str, Any] = {}
    arrays: dict[int, tuple[Any, str]] = {}
    for keys, value in leaves(tree["optimizer"], path):
        name = ".".join(keys)
        try:
            found = _value(value)
            if is_spec(value):
                arrays[id(found)] = found, key_of(value)
        except ValueError as error:
            raise CorruptCheckpointError(str(error), path=path, name=name) from error
        except UnsupportedError as error:
            raise UnsupportedError(error.message, path=path, name=name, remedy=error.remedy) from error
        container = state
        for key in keys[:-1]:
            container = container.setdefault(key, {})
        container[keys[-1]] = found
    try:
        flat = flatten(state)
    except UnsupportedLeafError as error:
        raise UnsupportedError(error.message, path=path, name=error.name, remedy=error.remedy) from error
    wanted = {
        name: Wanted(arrays[id(given.value)][1], _ZARR)
        for name, given in state_leaves(state).items()
        if id(given.value) in arrays
    }
    inline = {
        name: Stored(leaf.dtype, leaf.shape, leaf.host_bytes())
        for name, leaf in flat.leaves.items()
        if name not in wanted
    }
    return Contents(None, wanted, inline, flat, int(tree["version"]))


def _value(value: Any) -> Any:
    """Return what stands in the state: arrays as tensors, where torch has the dtype."""
    if is_spec(value):
        return allocate("tensor", BY_NAME["uint8"], (0,))
    if flax_msgpack.is_chunked(value):
        value = flax_msgpack.join(value)
    if not isinstance(value, np.ndarray):
        return value
    dtype = of_numpy(value.dtype)
    return _as_tensor(value, dtype) if dtype is not None and dtype.has_torch else value


def _as_tensor(array: np.ndarray[Any, Any], dtype: DType) -> Any:
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(dtype.torch).reshape(array.shape)
