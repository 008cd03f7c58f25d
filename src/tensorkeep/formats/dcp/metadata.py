"""The ``.metadata`` file of a distributed checkpoint: which tensors there are, and where their pieces lie.

It is a pickle of dataclasses, read without running it (see ``inert_pickle.py``), and nothing in it is believed: names,
dtypes, shapes, and that the pieces of a tensor cover it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.dcp import inert_pickle
from tensorkeep.formats.dcp.inert_pickle import Global, Made
from tensorkeep.formats.dcp.tiling import check_tiling
from tensorkeep.state.dtypes import BY_NAME, DType

FILE_NAME = ".metadata"

MARK = "tensorkeep"
"""Stands among ``storage_meta.modules`` of what Tensorkeep wrote: there must be a sidecar then."""

_MOST_DIMENSIONS = 64
_MOST_FIELDS = 64
_MOST = 2**63

_PIECE_BYTES, _KEY_BYTES = 16, 1
"""No fewer of the file describe a piece of a tensor, or a key of a path, unless it says the same again and again."""

_HERE = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"
EXPECTED = (
    {
        (_HERE, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {(_FILES, "_StorageInfo"), (_SHARDS, "TensorProperties"), (_SHARDS, "MEM_FORMAT_ENCODING")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
    | {("torch", name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16")}
    | {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
)
"""What the versions of torch since 2.0 put there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one piece, or one plain value, lies.

    Attributes
    ----------
    file : str
        Plain name of a file beside ``.metadata``.
    offset, length : int
        The bytes that are a ``torch.save`` file of their own.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its first corner and its size, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor; its chunks cover it once."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Contents:
    """What the metadata says.

    Attributes
    ----------
    tensors : dict of str to TensorEntry
    values : dict of str to Place
        What is no tensor, pickled.
    paths : dict of str to tuple
        The keys that led to each entry before its name was made of them; text for dicts, numbers for lists.
    version : str or None
        What DCP calls its format.
    marked : bool
        Whether Tensorkeep wrote it.
    """

    tensors: dict[str, TensorEntry]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]
    version: str | None
    marked: bool


def parse(content: bytes, path: Path) -> Contents:
    """Return what the file says.

    Raises
    ------
    CorruptCheckpointError
        If it is damaged, or what it says cannot be.
    UnsupportedError
        If it names classes besides DCP's, or tensors that are not known here.
    """
    try:
        return _contents(inert_pickle.load(content, EXPECTED, "its metadata"), len(content))
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=path, name=error.name, remedy=error.remedy) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.message, path=path, name=error.name, remedy=error.remedy) from error
    except ValueError as error:
        raise CorruptCheckpointError(f"is no metadata of a distributed checkpoint ({error})", path=path) from error


def _contents(root: Any, nbytes: int) -> Contents:
    pieces, keys = _Allowance(nbytes // _PIECE_BYTES, "pieces"), _Allowance(nbytes // _KEY_BYTES, "paths")
    fields = _fields(root, "Metadata")
    places = dict(_places(_typed(fields.get("storage_data"), dict, "storage_data")))
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, Place] = {}
    for name, entry in _typed(fields.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        if type(name) is not str:
            raise ValueError("a name is no text")
        if _is(entry, "BytesStorageMetadata"):
            values[name] = _place(places, name, None)
        else:
            tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), places, pieces)
    known = tensors.keys() | values.keys()
    meta = fields.get("storage_meta")
    modules = _fields(meta, "StorageMeta").get("modules") if meta is not None else None
    version = fields.get("version")
    return Contents(
        tensors,
        values,
        {name: path for name, path in _paths(fields.get("planner_data"), keys) if name in known},
        version if type(version) is str else None,
        type(modules) is list and MARK in [module for module in modules if type(module) is str],
    )


class _Allowance:
    """How much a file of its length can describe: a pickle can name one list any number of times, in two bytes each."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what

    def spend(self, count: int) -> None:
        self._most -= count
        if self._most < 0:
            raise ValueError(f"it names its {self._what} over and over")


def _is(value: Any, name: str) -> bool:
    return type(value) is Made and value.by.name == name


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of a dataclass."""
    if not _is(value, name):
        raise ValueError(f"there is no {name} where one is expected")
    state = _typed({} if value.state is None else value.state, dict, name)
    if len(state) > _MOST_FIELDS:
        raise ValueError(f"a {name} has {len(state):,} fields")
    return {key: item for key, item in state.items() if type(key) is str}


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is no {kind.__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Return a ``torch.Size``, or a plain tuple or list, of sensible lengths."""
    if _is(value, "Size") and len(value.args) == 1:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(value) > _MOST_DIMENSIONS:
        raise ValueError("a shape is none")
    if any(type(length) is not int or not 0 <= length < _MOST for length in value):
        raise ValueError("a shape has an impossible length")
    return tuple(value)


def _places(storage: dict[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Place]]:
    for key, value in storage.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name = _typed(index.get("fqn"), str, "the name of a stored piece")
        offset = index.get("offset")
        place = Place(
            _typed(info.get("relative_path"), str, "the file of a stored piece"),
            _number_of_bytes(info.get("offset"), name, "offset"),
            _number_of_bytes(info.get("length"), name, "length"),
        )
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                "its pieces went through a transform (such as compression) that is not known here",
                name=name,
                remedy="load it with torch.distributed.checkpoint, and save it again without extensions",
            )
        yield (name, None if offset is None else _size(offset)), place


def _number_of_bytes(value: Any, name: str, what: str) -> int:
    # Not shown: Python refuses to write a number of thousands of digits.
    if not 0 <= _typed(value, int, f"the {what} of a stored piece") < _MOST:
        raise CorruptCheckpointError(f"the {what} of a piece of it is impossible", name=name)
    return int(value)


def _place(
    places: Mapping[tuple[str, tuple[int, ...] | None], Place], name: str, offset: tuple[int, ...] | None
) -> Place:
    place = places.get((name, offset)) or places.get((name, None))
    if place is None:
        raise CorruptCheckpointError("the metadata does not say where a piece of it lies", name=name)
    return place


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[Any, Place], pieces: _Allowance) -> TensorEntry:
    dtype = _dtype(name, fields.get("properties"))
    shape = _size(fields.get("size"))
    extent = prod(length for length in shape if length) * dtype.itemsize
    if extent >= _MOST:
        raise CorruptCheckpointError(f"has the impossible shape {list(shape)}", name=name)
    boxes = []
    listed = _typed(fields.get("chunks"), list, "the list of a tensor's pieces")
    pieces.spend(len(listed))
    for chunk in listed:
        box = _fields(chunk, "ChunkStorageMetadata")
        boxes.append((_size(box.get("offsets")), _size(box.get("sizes"))))
    try:
        check_tiling(shape, boxes)
    except ValueError as error:
        raise CorruptCheckpointError(f"its pieces do not make it up: {error}", name=name) from error
    chunks = [
        Chunk(offsets, sizes, _place(places, name, offsets)) for offsets, sizes in boxes if 0 not in sizes or 0 in shape
    ]
    return TensorEntry(name, dtype, shape, tuple(chunks))


def _dtype(name: str, properties: Any) -> DType:
    if not _is(properties, "TensorProperties"):
        raise ValueError("a tensor has no properties")
    state = properties.state
    # A tuple since DCP has had a version of its own, a dict before.
    found = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    if type(found) is not Global:
        raise ValueError("a tensor has no dtype")
    dtype = BY_NAME.get(found.name)
    if dtype is None or not dtype.has_torch:
        raise UnsupportedError(f"has dtype {found}, which is not known here", name=name)
    return dtype


def _paths(planner_data: Any, keys: _Allowance) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    if planner_data is None:
        return
    for name, path in _typed(planner_data, dict, "planner_data").items():
        if type(path) is tuple:
            keys.spend(len(path))
        # Whatever another planner kept there is its own affair.
        if type(path) is tuple and path and all(type(key) in (str, int) for key in path) and type(path[0]) is str:
            yield name, path
