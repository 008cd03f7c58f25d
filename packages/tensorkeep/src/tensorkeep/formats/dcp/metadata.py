"""Parses DCP's ``.metadata``, a pickle of dataclasses, without executing it; every field is checked."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.boxes import Box, box_of, box_shape
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.torch_file.pickles import Call, Global, Pairs, decode, name_of
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import MOST_DIMENSIONS

FILE_NAME = ".metadata"

# In ``storage_meta.modules``. A checkpoint with this mark must have a sidecar.
MARK = "tensorkeep"

_MAX_FIELDS = 64
_MAX = 2**63
# For a tensor that is sharded in several dimensions, every pair of chunks is compared.
_MAX_CHUNKS = 8192

_OMIT = 'leave it out with select="*", or load it with torch.distributed.checkpoint and save it dequantised'
# The least bytes of a chunk and of a key of a path in the pickle. A pickle can refer to one object many times, and so
# describe more than a file of its length should.
_CHUNK_BYTES, _KEY_BYTES = 16, 1

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = """
Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties StorageMeta
_MEM_FORMAT_ENCODING
"""
# The classes and functions that torch 2.0 and later name in ``.metadata``.
ALLOWED = (
    {(_METADATA, name) for name in _CLASSES.split()}
    | {(_FILESYSTEM, "_StorageInfo"), (_SHARDED, "TensorProperties"), (_SHARDED, "MEM_FORMAT_ENCODING")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
    | {("torch", name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16")}
    | {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
)

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """The bytes of a ``torch.save`` file inside a file beside ``.metadata``."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    box: Box
    location: Location


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor; its chunks cover each element once."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The content of ``.metadata``; ``unread`` has the tensors of unsupported dtypes."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Location]
    unread: dict[str, Placeholder]
    # The keys that lead to each entry in the nested state: text for dicts, numbers for lists.
    paths: dict[str, KeyPath]
    version: str | None
    has_mark: bool

    def locations(self) -> Iterator[tuple[str, Location, int]]:
        """Yield name, location and least number of bytes: first of all chunks, then of all plain values."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield name, chunk.location, prod(box_shape(chunk.box)) * tensor.dtype.itemsize
        # A plain value has at least one byte; its size is not known before it is decoded.
        yield from ((name, location, 1) for name, location in self.values.items())


def parse(content: bytes, path: Path) -> DcpMetadata:
    """Parse ``.metadata``; CorruptCheckpointError if damaged, UnsupportedError for a foreign class or a transform."""
    with decoding(path, what="is not the metadata of a distributed checkpoint"):
        return _metadata(decode(content, ALLOWED, "its metadata"), len(content))


def _metadata(root: Any, nbytes: int) -> DcpMetadata:
    fields = _fields(root, "Metadata")
    # A key is the name and the offsets of a chunk; plain values have no offsets.
    locations = dict(_locations(_typed(fields.get("storage_data"), Pairs, "storage_data")))
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, Location] = {}
    unread: dict[str, Placeholder] = {}
    chunk_count = 0
    entries = _typed(fields.get("state_dict_metadata"), Pairs, "state_dict_metadata")
    for name, entry in {_typed(name, str, "the name of an entry"): entry for name, entry in entries}.items():
        if _is(entry, "BytesStorageMetadata"):
            values[name] = _find(locations, name, None)
        else:
            tensor = _fields(entry, "TensorStorageMetadata")
            chunks = _typed(tensor.get("chunks"), list, "the list of a tensor's chunks")
            # The pickle may refer to one list of chunks from a million entries, so every reference counts.
            chunk_count += len(chunks)
            _check_count(chunk_count, nbytes // _CHUNK_BYTES, "chunks")
            dtype = _dtype(tensor.get("properties"))
            # A tensor of an unsupported dtype must not prevent the load of the others.
            if type(dtype) is DType:
                tensors[name] = _tensor(name, dtype, tensor, chunks, locations)
            else:
                unread[name] = Placeholder("", f"a tensor of {dtype}, which is not supported", _OMIT)
    known = tensors.keys() | values.keys() | unread.keys()
    meta = fields.get("storage_meta")
    modules = _fields(meta, "StorageMeta").get("modules") if meta is not None else None
    version = fields.get("version")
    return DcpMetadata(
        tensors,
        values,
        unread,
        {name: path for name, path in _paths(fields.get("planner_data"), nbytes // _KEY_BYTES) if name in known},
        version if type(version) is str else None,
        type(modules) is list and any(type(module) is str and module == MARK for module in modules),
    )


def _check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"it refers to the same {what} many times")


def _is(value: Any, name: str) -> bool:
    return type(value) is Call and name_of(value.function).rpartition(".")[2] == name


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not _is(value, name):
        raise ValueError(f"a {name} is expected")
    state = _typed(Pairs() if value.state is None else value.state, Pairs, name)
    # One object can be referenced a million times, so its size matters.
    if len(state) > _MAX_FIELDS:
        raise ValueError(f"a {name} has {len(state):,} fields")
    return {key: item for key, item in state if type(key) is str}


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is not a {'dict' if kind is Pairs else kind.__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if _is(value, "Size") and len(value.args) == 1:
        value = value.args[0]
    if type(value) not in (tuple, list) or len(value) > MOST_DIMENSIONS:
        raise ValueError("a shape is not a tuple of lengths")
    # `type`, not `isinstance`: True is an int, and 2**5000 is refused here.
    if any(type(length) is not int or not 0 <= length < _MAX for length in value):
        raise ValueError("a shape has an impossible length")
    return tuple(value)


# The name of an entry, and the offsets of the chunk.
_Key = tuple[str, tuple[int, ...] | None]


def _locations(storage: Iterable[tuple[Any, Any]]) -> Iterator[tuple[_Key, Location]]:
    for key, value in storage:
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name = _typed(index.get("fqn"), str, "the name of a chunk")
        offsets = index.get("offset")
        location = Location(
            _typed(info.get("relative_path"), str, "the file of a chunk"),
            _byte_count(info.get("offset"), name, "offset"),
            _byte_count(info.get("length"), name, "length"),
        )
        if info.get("transform_descriptors"):
            raise UnsupportedError(
                "its chunks were written through a transform (such as compression), which is not supported",
                name=name,
                remedy="load it with torch.distributed.checkpoint, and save it again without extensions",
            )
        yield (name, None if offsets is None else _size(offsets)), location


def _byte_count(value: Any, name: str, what: str) -> int:
    # The message omits the value: Python refuses to format a number of thousands of digits.
    if not 0 <= _typed(value, int, f"the {what} of a chunk") < _MAX:
        raise CorruptCheckpointError(f"the {what} of a chunk is impossible", name=name)
    return int(value)


def _find(locations: Mapping[_Key, Location], name: str, offsets: tuple[int, ...] | None) -> Location:
    location = locations.get((name, offsets)) or locations.get((name, None))
    if location is None:
        raise CorruptCheckpointError("the metadata lacks the location of a chunk", name=name)
    return location


def _tensor(
    name: str, dtype: DType, fields: Mapping[str, Any], listed: list[Any], locations: Mapping[_Key, Location]
) -> TensorEntry:
    shape = _size(fields.get("size"))
    # Zeros are left out, so that an empty tensor with huge dimensions is refused as well.
    if prod(length for length in shape if length) * dtype.itemsize >= _MAX:
        raise CorruptCheckpointError(f"has the impossible shape {list(shape)}", name=name)
    boxes: list[Box] = []
    for item in listed:
        chunk = _fields(item, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(offsets) != len(sizes):
            raise ValueError("the offsets and the sizes of a chunk differ in length")
        boxes.append(box_of(offsets, sizes))
    with decoding(name=name, what="its chunks do not make up the tensor"):
        check_tiling(shape, boxes)
    # DCP writes empty chunks for ranks without elements. A tensor without elements keeps its chunks.
    stored = [box for box in boxes if 0 not in box_shape(box) or 0 in shape]
    chunks = [Chunk(box, _find(locations, name, tuple(side.start for side in box))) for box in stored]
    return TensorEntry(name, dtype, shape, tuple(chunks))


def _dtype(properties: Any) -> DType | Global:
    """Return the dtype of a tensor; the recorded name if it is not supported."""
    if not _is(properties, "TensorProperties"):
        raise ValueError("a tensor has no properties")
    state = properties.state
    # The state is a tuple since DCP's metadata has a version, and a dict before.
    found = state[0] if type(state) is tuple and state else _fields(properties, "TensorProperties").get("dtype")
    if type(found) is not Global:
        raise ValueError("a tensor has no dtype")
    dtype = BY_NAME.get(found.name)
    return found if dtype is None or not dtype.has_torch else dtype


def _paths(planner_data: Any, limit: int) -> Iterator[tuple[str, KeyPath]]:
    if planner_data is None:
        return
    count = 0
    for name, path in _typed(planner_data, Pairs, "planner_data"):
        if type(path) is tuple:
            count += len(path)
            _check_count(count, limit, "paths")
        # Planners other than torch's default may keep anything here.
        if (
            type(name) is str
            and type(path) is tuple
            and path
            and all(type(key) in (str, int) for key in path)
            and type(path[0]) is str
        ):
            yield name, path


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless chunks cover a tensor once, or for over 8192 chunks cut in several dimensions."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError("a chunk has another number of dimensions")
        if any(side.stop > length for side, length in zip(box, shape, strict=True)):
            start = [side.start for side in box]
            raise ValueError(f"a chunk of shape {list(box_shape(box))} at {start} reaches beyond {list(shape)}")
    # Empty chunks cover nothing and overlap nothing.
    full = [box for box in boxes if 0 not in box_shape(box)]
    count = sum(prod(box_shape(box)) for box in full)
    if count < prod(shape):
        raise ValueError(f"the chunks hold {count:,} of {prod(shape):,} elements")
    # Chunks inside the array that hold as many elements as it has cover it if and only if no two overlap.
    if count > prod(shape) or _overlap(full):
        raise ValueError("the chunks overlap")


def _overlap(boxes: Sequence[Box]) -> bool:
    if len(boxes) < 2:
        return False
    starts = np.array([[side.start for side in box] for box in boxes], np.int64)
    stops = np.array([[side.stop for side in box] for box in boxes], np.int64)
    cut = [axis for axis in range(starts.shape[1]) if (starts[:, axis] != starts[0, axis]).any()]
    # Sharded in one dimension, as FSDP does: neighbours in sorted order decide.
    if len(cut) == 1:
        order = np.argsort(starts[:, cut[0]])
        return bool((stops[order[:-1], cut[0]] > starts[order[1:], cut[0]]).any())
    if len(boxes) > _MAX_CHUNKS:
        raise ValueError(f"{len(boxes):,} chunks in several dimensions are too many to check")
    return any(
        # Two boxes overlap if their ranges overlap in every dimension. One row at a time keeps memory linear.
        bool(((starts[i + 1 :] < stops[i]) & (starts[i] < stops[i + 1 :])).all(axis=1).any())
        for i in range(len(boxes) - 1)
    )
