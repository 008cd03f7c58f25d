"""Reads distributed checkpoints, mapped or fetched, without DCP's own reader and without a process group."""

import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.boxes import Box, box_of, box_shape, find_flaw, intersection, range_to_boxes, relative
from tensorkeep.formats.decoding import decoding, missing_as
from tensorkeep.formats.mapped_file import FetchedParts, MappedFile, map_file
from tensorkeep.formats.model_folder import add_unused
from tensorkeep.formats.path_items import nest
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.torch_file.archive import DAMAGED, StorageCheck, TorchZip
from tensorkeep.formats.torch_file.pickles import Call, Global, Pairs, decode, name_of
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, Unpickled, count_values, load_untrusted
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import MOST_DIMENSIONS, Bytes, Leaf, allocate
from tensorkeep.state.skeleton import ReplacingWriter
from tensorkeep.state.tree import Flat, flatten, state_leaves
from tensorkeep.storage import names_in, read_directory
from tensorkeep.storage.base import Directory

if TYPE_CHECKING:
    import torch

# The metadata: a pickle of dataclasses, which is not executed. Every field is checked.

FILE_NAME = ".metadata"

# In ``storage_meta.modules``. A checkpoint with this mark must have a sidecar.
MARK = "tensorkeep"

_MAX_FIELDS = 64
_MAX = 2**63

_OMIT = 'leave it out with select="*", or load it with torch.distributed.checkpoint and save it dequantised'
# The least bytes of a chunk and of a key of a path in the pickle. A pickle can refer to one object many times, and so
# describe more than a file of its length should.
_CHUNK_BYTES, _KEY_BYTES = 16, 1

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_CLASSES = """
Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties StorageMeta
"""
_ENUMS = {(_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING")}
# The classes and functions that torch 2.0 and later name in ``.metadata``. Megatron-Core adds the plans of its ranks,
# which nothing here reads.
ALLOWED = (
    {(_METADATA, name) for name in _CLASSES.split()}
    | {(_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")}
    | {(_FILESYSTEM, "_StorageInfo"), (_SHARDED, "TensorProperties")}
    | _ENUMS
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
    | {("torch", name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16")}
    | {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
)

KeyPath = tuple[str | int, ...]


class Location(NamedTuple):
    """The bytes of a ``torch.save`` file inside a file beside ``.metadata``."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    box: Box
    location: Location


class TensorEntry(NamedTuple):
    """A tensor; its chunks cover each element once."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class DcpMetadata(NamedTuple):
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
        return _metadata(decode(content, ALLOWED, "its metadata", _ENUMS), len(content))


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
    """Raise ValueError unless chunks tile a tensor, or if `find_flaw` cannot check them."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError("a chunk has another number of dimensions")
        if any(side.stop > length for side, length in zip(box, shape, strict=True)):
            start = [side.start for side in box]
            raise ValueError(f"a chunk of shape {list(box_shape(box))} at {start} reaches beyond {list(shape)}")
    # Empty chunks cover nothing and overlap nothing.
    full = [box for box in boxes if 0 not in box_shape(box)]
    # Most tensors have one chunk.
    if len(full) == 1 and box_shape(full[0]) == tuple(shape):
        return
    # Sharded in the first dimension, as FSDP does: each chunk begins where the one before it ends.
    if shape and all(box_shape(box)[1:] == tuple(shape[1:]) for box in full):
        rows = sorted((box[0].start, box[0].stop) for box in full)
        if [0, *(stop for _, stop in rows)] == [*(start for start, _ in rows), shape[0]]:
            return
    flaw = find_flaw(shape, ((tuple(side.start for side in box), box_shape(box)) for box in full))
    if flaw is not None:
        raise ValueError(f"{'no chunk has' if flaw.is_gap else 'chunks overlap at'} the element {list(flaw.offsets)}")


# The data files.

_MAX_METADATA_BYTES = 1024**3


class TensorLayout(NamedTuple):
    """Where a tensor has its elements: offset and strides, in elements, in the storage ``key`` of ``nbytes`` bytes."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str
    nbytes: int


# A data file is a row of ``torch.save`` files, one for each chunk of a tensor and each plain value: the *pieces*.
# Chunks stay in the mapped memory, in the layout that was saved, and a read assembles them.
class TorchPiece:
    """A ``torch.save`` file inside a mapped file; opening it checks all records except storages, like `TorchZip`."""

    def __init__(self, file: MappedFile, location: Location) -> None:
        self._file = file
        self._start = location.offset
        stop = location.offset + location.length
        self._content = file.content[location.offset : stop]
        with file.stream(location.offset, stop) as stream:
            self.archive = TorchZip(stream, location.length, file.path)

    def load_value(self, allow: Collection[str]) -> Unpickled:
        self.check()
        with self._file.needed_by(self._content):
            # A copy: a plain value is used after this block, when fetched pieces may be freed.
            content = np.array(self._content)
        return load_untrusted(content, self.archive, self._file.path, allow)

    def load_tensor(self, layouts: dict[bytes, TensorLayout]) -> tuple[TensorLayout, Bytes]:
        """Return layout and storage of a tensor; ValueError if it is not a tensor that DCP saves."""
        headers = [(self._start + start, self._start + stop) for start, stop in self.archive.local_headers()]
        # Rebuilding a tensor reads local headers only. Its storage is fetched when it is read.
        with self._file.all_needed(headers):
            # Chunks of the same shape have equal pickles. Decoding each would double the time of small chunks.
            layout = layouts.get(self.archive.pickle)
            if layout is None:
                layout = layouts[self.archive.pickle] = self._layout()
            start = self.archive.storage_start(layout.key, self._content)
        storage = self._content[start : start + layout.nbytes]
        if storage.size != layout.nbytes:
            raise ValueError("its storage reaches beyond the end")
        return layout, storage

    def _layout(self) -> TensorLayout:
        import torch

        found = load_untrusted(self._content, self.archive, self._file.path)
        if found.refusal is not None:
            raise found.refusal
        tensor = found.state
        if not isinstance(tensor, torch.Tensor) or tensor.is_conj() or tensor.is_neg() or len(found.storages) != 1:
            # Torch negates and conjugates lazily, with a flag: the memory then has other values than the tensor.
            raise ValueError("it is not a plain tensor")
        storage = tensor.untyped_storage()
        if tensor.nbytes > storage.nbytes():
            # An expanded tensor would claim more elements than the file has bytes.
            raise ValueError("its strides overlap, which DCP never saves")
        (key,) = found.storages
        shape, strides = tuple(tensor.shape), tensor.stride()
        return TensorLayout(tensor.dtype, shape, strides, int(tensor.storage_offset()), key, storage.nbytes())

    def check(self) -> None:
        """Check every record; raises CorruptCheckpointError if one is damaged."""
        for name, info in self.archive.records.items():
            # The lengths in the local header give the start of the data.
            header = self._start + info.header_offset
            with decoding(self._file.path, what="a piece is malformed"), self._file.needed(header, header + 30):
                start = self.archive.record_start(name, self._content)
            data = self._content[start : start + info.file_size]
            with self._file.needed_by(data):
                differs = self.archive.crc_differs(name, data)
            if differs:
                text = f"the CRC-32 of the record {name!r} is wrong"
                raise CorruptCheckpointError(text, path=self._file.path, remedy=DAMAGED)


class TensorChunk:
    """One chunk of a tensor; opened and checked once, by the first thread that asks."""

    # The bits of the elements as unsigned integers, or as complex128 for 16 bytes.
    array: npt.NDArray[Any]
    checksummed: bool

    def __init__(self, tensor: TensorEntry, chunk: Chunk, file: MappedFile, layouts: dict[bytes, TensorLayout]) -> None:
        self.chunk = chunk
        self._layouts = layouts
        self._tensor = tensor
        self._file = file
        self._lock = threading.Lock()
        self._check: StorageCheck | None = None

    def open(self, *, verify: bool) -> npt.NDArray[Any]:
        """Return the elements of the chunk, after a check of their CRC-32 if ``verify``."""
        path, name = self._file.path, self._tensor.name
        with self._lock:
            if self._check is None:
                with decoding(path, name, what="a chunk is not a tensor as torch saves it"):
                    self._check = self._open()
        if verify and self.checksummed:
            self._check.run(self._file)
        return self.array

    def needed(self, elements: npt.NDArray[Any]) -> AbstractContextManager[None]:
        return self._file.needed_by(elements)

    def _open(self) -> StorageCheck:
        piece = TorchPiece(self._file, self.chunk.location)
        found, storage = piece.load_tensor(self._layouts)
        dtype, shape = self._tensor.dtype, box_shape(self.chunk.box)
        if found.dtype != dtype.torch or found.shape != shape:
            raise ValueError(
                f"it is {found.dtype} of {list(found.shape)}, the metadata declares {dtype} of {list(shape)}"
            )
        # Unsigned integers keep NaN payloads and work for dtypes that numpy lacks, such as bfloat16.
        bits = np.dtype(f"u{dtype.itemsize}" if dtype.itemsize <= 8 else "c16")
        if 0 in shape:
            self.array = np.empty(shape, bits)
        else:
            strides = tuple(stride * dtype.itemsize for stride in found.strides)
            self.array = np.ndarray(shape, bits, storage, found.offset * dtype.itemsize, strides)
        self.checksummed = piece.archive.checksummed
        # The CRC-32 covers the full storage, even if the chunk uses only a part.
        return StorageCheck(self._tensor.name, storage, piece.archive.storages)


class DcpFormatReader(Reader):
    format = "dcp"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._verify = settings.verify
        self._allow = settings.allow
        self._budget = settings.pool.budget
        read_directory(path, self._open)

    def _open(self, directory: Directory) -> None:
        notes = sidecar.read(directory, "dcp", Sidecar) if sidecar.FILE_NAME in names_in(directory.path) else None
        metadata = parse(_metadata_bytes(directory), directory.path / FILE_NAME)
        # Without the sidecar, container types and shared storage would be lost without an error.
        if metadata.has_mark and notes is None:
            raise CorruptCheckpointError(
                f"tensorkeep.json, which describes the state, is missing from {directory.path}",
                path=directory.path,
                remedy="restore the missing file, or take another copy",
            )
        self._files = _map_files(directory, metadata, FetchedParts(self._budget))
        self._metadata = metadata
        layouts: dict[bytes, TensorLayout] = {}  # by pickle
        self._chunks = {
            name: [TensorChunk(tensor, chunk, self._files[chunk.location.file], layouts) for chunk in tensor.chunks]
            for name, tensor in metadata.tensors.items()
        }
        self._unpickled: dict[str, Leaf] = {}  # tensors inside plain values
        self._keys: dict[str, str] = {}  # the key in the metadata, for all other tensors
        attributes: list[str] = []
        if notes is not None:
            flat = self._flat_of_sidecar(notes, directory.path)
            self._set_state(flat, directory.path / sidecar.FILE_NAME, notes.leaf_specs)
        else:
            flat, attributes = self._flat_of_metadata()
            self._set_state(flat, directory.path / FILE_NAME)
        self.metadata = notes.metadata if notes is not None else {}
        first = next(metadata.locations(), None)
        # The first piece has the setting of the whole save; `audit` checks the others.
        checksummed = first is None or TorchPiece(self._files[first[1].file], first[1]).archive.checksummed
        self.verifiable = "CRC-32 of every record" if checksummed else None
        self.details = {
            "dcp_version": metadata.version,
            "crc32": "written" if checksummed else "not written: torch was configured not to",
            "values": len(metadata.values),
            "files": {name: file.size for name, file in self._files.items()},
        }
        if attributes:
            self.details["attributes_left_out"] = attributes
        add_unused(self, directory.path, {*self._files, FILE_NAME, sidecar.FILE_NAME})
        # The mapped files outlive the directory.
        directory.close()

    def _flat_of_sidecar(self, notes: Sidecar, path: Path) -> Flat[StoredLeaf]:
        leaves: dict[str, StoredLeaf] = {}
        for name, note in notes.tensors.items():
            entry = self._metadata.tensors.get(name)
            if entry is None or (entry.dtype, entry.shape) != stored_form(note.state_dtype, note.shape):
                raise CorruptCheckpointError("differs between the metadata and tensorkeep.json", path=path, name=name)
            self._keys[name] = name
            leaves[name] = self._leaf(name, note.state_dtype, note.shape)
        return notes.flat(leaves)

    def _flat_of_metadata(self) -> tuple[Flat[StoredLeaf], list[str]]:
        """Return the state as the metadata nests it, and the names of attributes that it leaves out."""
        metadata = self._metadata
        # Empty tensors stand for the stored tensors, so that the state can be nested without reading any.
        stand_ins = {name: allocate("tensor", tensor.dtype, (0,)) for name, tensor in metadata.tensors.items()}
        plain, attributes = self._load_values()
        values = {**stand_ins, **metadata.unread, **plain}
        paths = {name: metadata.paths.get(name, (name,)) for name in [*metadata.paths, *values] if name in values}
        try:
            state = nest(paths, values)
        except ValueError:
            # Paths that exclude each other: all values stay under their dotted names.
            state = {name: values[name] for name in paths}
        except RecursionError as error:
            raise CorruptCheckpointError("is nested too deeply", path=self.path) from error
        with decoding(self.path):
            flat = flatten(state, ReplacingWriter())
        # Flattening assigns new names; the identity of a stand-in connects them with the keys of the metadata.
        names = {id(tensor): name for name, tensor in stand_ins.items()}
        given = state_leaves(state, ReplacingWriter())
        self._keys = {name: names[id(leaf.value)] for name, leaf in given.items() if id(leaf.value) in names}
        self._unpickled = {name: leaf for name, leaf in flat.leaves.items() if name not in self._keys}
        entries = {name: metadata.tensors[key] for name, key in self._keys.items()}
        stored = {name: entries.get(name, leaf) for name, leaf in flat.leaves.items()}
        leaves = {name: self._leaf(name, found.dtype, found.shape) for name, found in stored.items()}
        return Flat(flat.skeleton, leaves, flat.aliases, flat.parts), attributes

    def _load_values(self) -> tuple[dict[str, Any], list[str]]:
        """Return the plain values, and the names of attributes that they leave out; set ``refusal``."""
        values: dict[str, Any] = {}
        attributes: dict[str, None] = {}
        limit = SHARED_VALUES
        locations = self._metadata.values
        # In an object store, a request for each value would take long.
        _prefetch(self._files, ((at.file, at.offset, at.offset + at.length) for at in locations.values()))
        for name, location in locations.items():
            with decoding(self.path, name):
                piece = TorchPiece(self._files[location.file], location)
                found = piece.load_value(self._allow)
                # The limit is for all values together.
                limit += 4 * piece.archive.pickle_bytes
                limit -= count_values(found.state, limit)
            values[name] = found.state
            attributes |= dict.fromkeys(found.attributes)
            # The first refusal is enough: a load raises it if it keeps the refused objects.
            if self.refusal is None and found.refusal is not None:
                self.refusal = found.refusal
                self.refusal.name = name
        return values, [*attributes]

    def _leaf(self, name: str, dtype: DType, shape: tuple[int, ...]) -> StoredLeaf:
        key = self._keys.get(name)
        locations = [] if key is None else [chunk.location for chunk in self._metadata.tensors[key].chunks]
        files = sorted({location.file for location in locations})
        file = files[0] if len(files) == 1 else f"{len(files)} files"
        stored_bytes = sum(location.length for location in locations)
        return StoredLeaf(self, name, dtype, shape, stored_bytes=stored_bytes, file=file)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._unpickled:
            self._unpickled[name].read(start, stop, out)
            return
        key = self._keys[name]
        tensor = self._metadata.tensors[key]
        size, at = tensor.dtype.itemsize, 0
        # A range of C order is up to two boxes per dimension; each takes its parts from several chunks.
        for box in range_to_boxes(tensor.shape, start // size, stop // size):
            shape = box_shape(box)
            for chunk in self._chunks[key]:
                common = intersection(box, chunk.chunk.box)
                if common is not None:
                    # The dots keep it a view: without dimensions, an empty index would give a number.
                    place: tuple[Any, ...] = (*relative(common, chunk.chunk.box), ...)
                    source = chunk.open(verify=self._verify)[place]
                    target = out[at : at + prod(shape) * size].view(source.dtype).reshape(shape)
                    with chunk.needed(source):
                        target[relative(common, box)] = source
            at += prod(shape) * size

    def audit(self) -> Iterator[Problem]:
        # Reads check the chunks that the state uses. Plain values and unused chunks remain.
        used = set(self._keys.values())
        # A piece begins with a header and ends with the zip directory.
        places = [location for _, location, _ in self._metadata.locations()]
        starts = ((at.file, at.offset, at.offset + 1) for at in places)
        ends = ((at.file, at.offset + at.length - 1, at.offset + at.length) for at in places)
        _prefetch(self._files, [*starts, *ends])
        locations = list(self._metadata.values.items())
        for key, chunks in self._chunks.items():
            locations += [(key, each.chunk.location) for each in chunks if key not in used or _lacks_checksum(each)]
        for key, location in locations:
            try:
                piece = TorchPiece(self._files[location.file], location)
                piece.check()
            except TensorkeepError as error:
                yield Problem(error.message, file=location.file, name=key)
            else:
                if self.verifiable and not piece.archive.checksummed:
                    message = "has no CRC-32, unlike the rest of the checkpoint"
                    yield Problem(message, file=location.file, name=key)

    def close(self) -> None:
        self._unpickled = {}
        self._chunks = {}
        self._files = {}


def stored_form(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return the stored dtype and shape: bytes as uint8 if torch lacks the dtype."""
    return (dtype, tuple(shape)) if dtype.has_torch else (BY_NAME["uint8"], (prod(shape) * dtype.itemsize,))


def _prefetch(files: dict[str, MappedFile], ranges: Iterable[tuple[str, int, int]]) -> None:
    by_file: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in ranges:
        by_file.setdefault(name, []).append((start, stop))
    for name, places in by_file.items():
        files[name].prefetch(places)


def _lacks_checksum(chunk: TensorChunk) -> bool:
    try:
        chunk.open(verify=False)
    except TensorkeepError:
        return True
    return not chunk.checksummed


def _metadata_bytes(directory: Directory) -> bytes:
    missing = NotACheckpointError(
        "is not a distributed checkpoint: it holds no .metadata",
        path=directory.path,
        remedy="a save that was killed leaves none; give the directory that dcp.save was given",
    )
    with missing_as(missing), directory.open(FILE_NAME) as file:
        if file.size > _MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"{file.size:,} bytes of metadata are too many", path=file.path)
        return file.read(0, file.size)


def _map_files(directory: Directory, metadata: DcpMetadata, parts: FetchedParts) -> dict[str, MappedFile]:
    # Sizes are compared with the metadata before anything of a claimed size is allocated.
    files: dict[str, MappedFile] = {}
    claimed = 0
    for name, location, nbytes in metadata.locations():
        if location.file not in files:
            files[location.file] = _map(directory, name, location.file, parts)
        file = files[location.file]
        if location.length <= 0 or location.offset + location.length > file.size:
            raise CorruptCheckpointError(
                f"a chunk of {location.length:,} bytes at {location.offset:,} exceeds the file of {file.size:,}",
                path=file.path,
                name=name,
                remedy="the file was truncated or replaced: take another copy",
            )
        if nbytes > location.length:
            message = f"a chunk of {location.length:,} bytes cannot hold the {nbytes:,} of its shape"
            raise CorruptCheckpointError(message, path=file.path, name=name)
        claimed += location.length
    # Entries that share bytes would let a small file take any amount of memory.
    total = sum(file.size for file in files.values())
    if claimed > total:
        message = f"its chunks claim {claimed:,} bytes, its files have {total:,}"
        raise CorruptCheckpointError(message, path=directory.path)
    return files


def _map(directory: Directory, name: str, file: str, parts: FetchedParts) -> MappedFile:
    # One plain name beside the metadata: no separator, no parent, no drive.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0:]{1,255}", file):
        raise CorruptCheckpointError(
            f"the metadata names the file {file!r}, which is not in the checkpoint's directory",
            path=directory.path,
            name=name,
        )
    missing = CorruptCheckpointError(
        "one of its chunks is in this file, which is missing",
        path=directory.path / file,
        name=name,
        remedy="restore the missing file: the files of all ranks are needed",
    )
    with missing_as(missing), directory.open(file) as opened:
        return map_file(opened, parts)
