"""Reader of T5X checkpoints, written by Tensorkeep or T5X; untrusted."""

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, StoredLeaf
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import Sidecar, TensorNote
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.t5x import flax_msgpack
from tensorkeep.formats.t5x.tree import FILE_NAME, MARK, is_spec, key_of, leaves_of, read_tree
from tensorkeep.formats.tensorstore.arrays import ArraysReader, KnownArray
from tensorkeep.formats.tensorstore.library import ArrayDirectory
from tensorkeep.formats.tensorstore.listing import list_array
from tensorkeep.formats.tensorstore.specs import StoredType
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME, DType, of_numpy
from tensorkeep.state.leaf import allocate
from tensorkeep.state.tree import flatten, state_leaves

_ZARR = 2


class T5XReader(ArraysReader):
    """An open T5X checkpoint.

    What Tensorkeep wrote is the state that was saved, and a missing chunk is an error. Checkpoints of T5X are the dicts
    under ``optimizer`` (``target``, ``state``); zarr defines a missing chunk in them as full of zeros.
    """

    format = "t5x"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        if re.search(r"\.tmp-\d+$", path.name):
            raise NotACheckpointError(
                "is unfinished: T5X writes under such a name and renames complete checkpoints",
                path=path,
                remedy="take an earlier step",
            )
        super().__init__(path, settings)

    def _open(self, directory: Directory) -> None:
        contents = read_contents(directory)
        notes = contents.notes
        leaves = self._open_arrays(directory, contents.directory, contents.arrays, fill_missing=notes is None)
        for name, leaf in leaves.items():
            if notes is None and not leaf.dtype.has_torch:
                raise UnsupportedError(f"torch has no dtype {leaf.dtype}", path=self.path, name=name)
        self._inline = contents.inline
        for name, tensor in self._inline.items():
            size = len(tensor.content)
            leaves[name] = StoredLeaf(self, name, tensor.dtype, tensor.shape, stored_bytes=size, file=FILE_NAME)
        source = self.path / (FILE_NAME if notes is None else sidecar.FILE_NAME)
        self._set_state(contents.structure.flat(leaves), source, None if notes is None else notes.leaf_specs)
        self.metadata = {} if notes is None else notes.metadata
        self.details = {
            "t5x_version": int(contents.tree["version"]),
            "arrays": len(contents.arrays),
            "missing_chunks": "are read as zeros" if notes is None else "are errors",
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._inline:
            out[:] = self._inline[name].content[start:stop]
        else:
            super().read(name, start, stop, out)

    def block_bytes(self, name: str) -> int:
        return BLOCK_BYTES if name in self._inline else super().block_bytes(name)


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A tensor whose bytes are in the msgpack file."""

    dtype: DType
    shape: tuple[int, ...]
    content: Bytes


@dataclass(slots=True)
class Contents:
    """A checkpoint before its arrays are opened; without notes if Tensorkeep did not write it."""

    directory: ArrayDirectory
    tree: dict[str, Any]
    notes: Sidecar | None
    structure: Structure = field(init=False)
    arrays: dict[str, KnownArray] = field(default_factory=dict)
    inline: dict[str, InlineTensor] = field(default_factory=dict)


def read_contents(directory: Directory) -> Contents:
    """Parse the msgpack file and the sidecar, after checking the files of the arrays.

    Raises the errors of `read_tree` and `sidecar.read`; CorruptCheckpointError if the two contradict each other;
    UnsupportedError if an array holds a link to a folder.
    """
    has_sidecar = sidecar.FILE_NAME in names_in(directory.path)
    notes = sidecar.read(directory, "t5x", Sidecar) if has_sidecar else None
    tree = read_tree(directory)
    if notes is None and MARK in tree:
        raise CorruptCheckpointError(
            "tensorkeep.json, which describes the state, is missing",
            path=directory.path,
            remedy="restore the missing file, or take another copy",
        )
    contents = Contents(ArrayDirectory.of(directory), tree, notes)
    if notes is None:
        _read_foreign(contents)
    else:
        contents.structure = notes.structure
        for name, note in notes.tensors.items():
            with decoding(directory.path / FILE_NAME, name, what="contradicts tensorkeep.json"):
                _read_own(contents, name, note)
    return contents


def _read_own(contents: Contents, name: str, note: TensorNote) -> None:
    value: Any = contents.tree["optimizer"]
    for key in note.place:
        value = value.get(key) if isinstance(value, dict) else None
    if not is_spec(value):
        nbytes = prod(note.shape) * note.state_dtype.itemsize
        if not isinstance(value, np.ndarray) or value.shape != note.shape or value.nbytes != nbytes:
            raise ValueError("the value in its place is not the tensor")
        contents.inline[name] = InlineTensor(note.state_dtype, note.shape, _bytes_of(value))
        return
    stored = BY_NAME.get(str(value.get("dtype")))
    types = None if stored is None else StoredType(note.state_dtype, stored)
    if types is None or not types.is_valid:
        raise ValueError(f"a {note.dtype} is not stored as {value.get('dtype')!r}")
    contents.arrays[name] = _known_array(contents.directory, value, types, note.shape)


def _read_foreign(contents: Contents) -> None:
    path = contents.directory.path / FILE_NAME
    state: dict[str, Any] = {}
    stand_ins: dict[int, tuple[Any, KnownArray]] = {}
    for keys, value in leaves_of(contents.tree["optimizer"], path):
        with decoding(path, ".".join(keys)):
            if is_spec(value):
                leaf = allocate("tensor", BY_NAME["uint8"], (0,))
                stand_ins[id(leaf)] = leaf, _known_array(contents.directory, value)
            else:
                leaf = _decode_value(value)
        container = state
        for key in keys[:-1]:
            container = container.setdefault(key, {})
        container[keys[-1]] = leaf
    with decoding(path):
        flat = flatten(state)
    for name, given in state_leaves(state).items():
        if id(given.value) in stand_ins:
            contents.arrays[name] = stand_ins[id(given.value)][1]
    for name, stored in flat.leaves.items():
        if name not in contents.arrays:
            content = np.empty(stored.nbytes, np.uint8)
            stored.read(0, stored.nbytes, content)
            contents.inline[name] = InlineTensor(stored.dtype, stored.shape, content)
    contents.structure = Structure.of_state(flat)


def _known_array(
    arrays: ArrayDirectory, spec: dict[str, Any], types: StoredType | None = None, shape: tuple[int, ...] | None = None
) -> KnownArray:
    key = key_of(spec)
    return KnownArray(key, _ZARR, sum(list_array(arrays, key).values()), types, shape)


def _decode_value(value: Any) -> Any:
    """Return a value as it is in the state: arrays as tensors, if torch has the dtype."""
    if flax_msgpack.is_split(value):
        value = flax_msgpack.join(value)
    dtype = of_numpy(value.dtype) if isinstance(value, np.ndarray) else None
    if dtype is None or not dtype.has_torch:
        return value
    import torch

    return torch.from_numpy(_bytes_of(value)).view(dtype.torch).reshape(value.shape)


def _bytes_of(array: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
