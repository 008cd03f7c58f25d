"""Reader of distributed checkpoints: untrusted, memory-mapped or fetched, without a process group."""

import re
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import (
    OpenSettings,
    Problem,
    Reader,
    StoredLeaf,
    box_shape,
    intersection,
    range_to_boxes,
    relative,
)
from tensorkeep.formats.dcp.metadata import FILE_NAME, Chunk, Contents, Location, TensorEntry, parse
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import FetchedParts, MappedFile, map_file
from tensorkeep.formats.model_folder import notes_on_folder, unused_files
from tensorkeep.formats.pickles import STORAGES, Call, Global, PersistentId, decode
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, Unpickled, count_values, load_untrusted, storage_of
from tensorkeep.formats.torch_file.zip_file import PICKLE, TorchZip
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import Flat, flatten, state_leaves
from tensorkeep.storage import names_in, read_directory
from tensorkeep.storage.base import Directory
from tensorkeep.storage.direct_io import Bytes

# Pieces of a distributed checkpoint: ``torch.save`` files inside a file that is memory.
#
# A piece that is a tensor is never unpickled: its small pickle is decoded without executing it, and the tensor
# becomes a
# numpy array over the mapped memory, in the layout that was saved. Torch writes the CRC-32 of that memory and does not
# check it; here it is checked before the first byte is returned.

_DAMAGED = "the stored bytes have changed since the save: take another checkpoint or copy"
_LOCAL_HEADER_BYTES = 30


class PieceZip:
    """The zip container of a piece; all records but the storages of tensors are checked on opening.

    Raises the errors of `TorchZip`.
    """

    def __init__(self, file: MappedFile, location: Location) -> None:
        self._file = file
        stop = location.offset + location.length
        self.content = file.content[location.offset : stop]
        with file.stream(location.offset, stop) as stream:
            self.archive = TorchZip(stream, location.length, file.path)

    def record(self, name: str) -> Bytes:
        """Return the bytes of a record, not copied; they are used as `MappedFile` says.

        Raises ValueError if it is missing, or reaches beyond the piece.
        """
        info = self.archive.records.get(name)
        if info is None:
            raise ValueError(f"it has no record {name!r}")
        header = self.content[max(0, info.header_offset) : info.header_offset + _LOCAL_HEADER_BYTES]
        if len(header) < _LOCAL_HEADER_BYTES:
            raise ValueError(f"the record {name!r} reaches beyond its end")
        with self._file.needed_by(header):
            name_length, extra_length = header[26:30].view("<u2")
        start = info.header_offset + _LOCAL_HEADER_BYTES + int(name_length) + int(extra_length)
        content = self.content[start : start + info.file_size]
        if content.size != info.file_size:
            raise ValueError(f"the record {name!r} reaches beyond its end")
        return content

    def crc(self, name: str) -> int | None:
        """Return the stored CRC-32 of a record; None if torch was configured not to write one."""
        return int(self.archive.records[name].CRC) if self.archive.checksummed else None

    def check(self) -> None:
        """Check every record; raises CorruptCheckpointError if one is damaged."""
        for name in self.archive.records:
            with decoding(self._file.path, what="a piece is malformed"):
                content = self.record(name)
            with self._file.needed_by(content):
                found = zlib.crc32(content)
            if self.crc(name) not in (None, found):
                raise CorruptCheckpointError(
                    f"the CRC-32 of the record {name!r} is wrong", path=self._file.path, remedy=_DAMAGED
                )


def load_value(name: str, location: Location, file: MappedFile, allow: Collection[str]) -> tuple[Unpickled, int]:
    """Return a plain value, and the length of its pickle.

    Raises CorruptCheckpointError if it is damaged; UnsupportedError if it names what runs programs or code.
    """
    piece = PieceZip(file, location)
    with decoding(file.path, name):
        piece.check()
        with file.needed_by(piece.content):
            content = storage_of(piece.content)
        value = load_untrusted(content, piece.archive, file.path, allow)
    return value, piece.archive.pickle_bytes


class TensorPiece:
    """One chunk of a tensor; opened and checked once, by the thread that asks first.

    Once it was opened, ``array`` has the bits of its elements as unsigned integers (complex128 for 16 bytes), and
    ``crc`` the stored CRC-32 of its storage if there is one.
    """

    array: npt.NDArray[Any]
    crc: int | None

    def __init__(self, tensor: TensorEntry, chunk: Chunk, file: MappedFile) -> None:
        self.chunk = chunk
        self._tensor = tensor
        self._file = file
        self._lock = threading.Lock()
        self._storage: Bytes | None = None
        self._is_intact: bool | None = None

    def open(self, *, verify: bool) -> npt.NDArray[Any]:
        """Return the elements of the tensor, after its CRC-32 was checked if ``verify``.

        Raises CorruptCheckpointError, UnsupportedError if it is damaged or not what the metadata describes.
        """
        with self._lock:
            if self._storage is None:
                what = "a piece of it is not a tensor as torch saves it"
                with decoding(self._file.path, self._tensor.name, what=what):
                    self._storage = self._open()
            storage = self._storage
        if verify and self._is_intact is None:
            # Outside the lock: threads that wait for it share the requests of a piece in a store.
            with self._file.needed_by(storage):
                self._check(storage)
        if verify and not self._is_intact:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong", path=self._file.path, name=self._tensor.name, remedy=_DAMAGED
            )
        return self.array

    def needed(self, elements: npt.NDArray[Any]) -> AbstractContextManager[None]:
        """Use a view of the array in a block."""
        return self._file.needed_by(elements)

    def _check(self, storage: Bytes) -> None:
        with self._lock:
            if self._is_intact is None:
                self._is_intact = self.crc in (None, zlib.crc32(storage))

    def _open(self) -> Bytes:
        """Set ``array`` and ``crc``; return all memory of the storage."""
        archive = PieceZip(self._file, self.chunk.location)
        content = archive.record(PICKLE)
        with self._file.needed_by(content):
            found = _decode_tensor(decode(content.tobytes(), _ALLOWED, "one of its pieces"))
        dtype, shape = self._tensor.dtype, box_shape(self.chunk.box)
        if found.dtype != dtype.name or found.shape != shape:
            raise ValueError(
                f"it is {found.dtype} of {list(found.shape)}, the metadata declares {dtype} of {list(shape)}"
            )
        record = f"data/{found.key}"
        storage = archive.record(record)
        if storage.size != found.storage_bytes:
            raise ValueError(f"its storage has {storage.size:,} bytes, not {found.storage_bytes:,}")
        steps = zip(shape, found.strides, strict=True)
        end = found.offset + sum((length - 1) * stride for length, stride in steps) + 1
        if 0 not in shape and end * dtype.itemsize > storage.size:
            raise ValueError("it reaches beyond its storage")
        if prod(shape) * dtype.itemsize > storage.size:
            raise ValueError("its strides overlap, which DCP never saves")
        bits = np.dtype(f"u{dtype.itemsize}" if dtype.itemsize <= 8 else "c16")
        if 0 in shape:
            self.array = np.empty(shape, bits)
        else:
            strides = tuple(stride * dtype.itemsize for stride in found.strides)
            self.array = np.ndarray(shape, bits, storage, found.offset * dtype.itemsize, strides)
        self.crc = archive.crc(record)
        return storage


_UNTYPED = "UntypedStorage"
_REBUILD, _REBUILD_WITH_DTYPE, _REBUILD_PARAMETER = "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"
_ALLOWED = (
    {("torch._utils", name) for name in (_REBUILD, _REBUILD_WITH_DTYPE, _REBUILD_PARAMETER)}
    | {("torch", name) for name in (*STORAGES, _UNTYPED)}
    | {("torch.storage", _UNTYPED), ("collections", "OrderedDict")}
    | {("torch", name) for name, dtype in BY_NAME.items() if dtype.has_torch}
)


@dataclass(frozen=True, slots=True)
class _PickledTensor:
    """The fields of a tensor's pickle; offset and strides in elements."""

    dtype: str
    key: str
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _decode_tensor(value: Any) -> _PickledTensor:
    if type(value) is Call and value.function.name == _REBUILD_PARAMETER and value.args:
        value = value.args[0]
    if type(value) is not Call or value.function.name not in (_REBUILD, _REBUILD_WITH_DTYPE) or value.state is not None:
        raise ValueError("it is not a plain tensor")
    args = value.args
    # A true argument after these means that the values are lazily negated or conjugated.
    count = 6 if value.function.name == _REBUILD else 7
    if len(args) < count or (len(args) > count and args[count]):
        raise ValueError("it is not a plain tensor")
    kind, key, numel = _decode_storage(args[0])
    dtype = STORAGES.get(kind) if count == 6 else args[6].name if type(args[6]) is Global else None
    if dtype is None or dtype not in BY_NAME:
        raise ValueError(f"its storage is a {kind}")
    nbytes = numel * (1 if kind == _UNTYPED else BY_NAME[dtype].itemsize)
    (offset,), shape, strides = _integers((args[1],)), _integers(args[2]), _integers(args[3])
    if len(shape) != len(strides):
        raise ValueError("its shape and its strides differ in length")
    return _PickledTensor(dtype, key, nbytes, offset, shape, strides)


def _decode_storage(value: Any) -> tuple[str, str, int]:
    """Return the class name, the record and the length in elements of a storage."""
    fields = value.key if type(value) is PersistentId else ()
    if type(fields) is not tuple or len(fields) != 5 or fields[0] != "storage":
        raise ValueError("it has no storage")
    _, kind, key, _, numel = fields
    if type(kind) is not Global or type(key) is not str:
        raise ValueError("it has no storage")
    return kind.name, key, _integers((numel,))[0]


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64 or any(type(n) is not int or not 0 <= n < 2**62 for n in value):
        raise ValueError("an offset, length or stride is impossible")
    return value


# Rebuilding the nested state of a distributed checkpoint without a sidecar.

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


_MAX_METADATA_BYTES = 1024**3


class DcpReader(Reader):
    """An open distributed checkpoint: its files are mapped, and the chunks of a tensor are assembled as it is read."""

    format = "dcp"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._verify = settings.verify
        self._allow = settings.allow
        self._budget = settings.pool.budget
        read_directory(path, self._open)

    def _open(self, directory: Directory) -> None:
        notes = sidecar.read(directory, "dcp", Sidecar) if sidecar.FILE_NAME in names_in(directory.path) else None
        contents = parse(_metadata_bytes(directory), directory.path / FILE_NAME)
        if contents.has_mark and notes is None:
            raise CorruptCheckpointError(
                f"tensorkeep.json, which describes the state, is missing from {directory.path}",
                path=directory.path,
                remedy="restore the missing file, or take another copy",
            )
        self._files = _map_files(directory, contents, FetchedParts(self._budget))
        self._contents = contents
        self._pieces = {
            name: [TensorPiece(tensor, chunk, self._files[chunk.location.file]) for chunk in tensor.chunks]
            for name, tensor in contents.tensors.items()
        }
        # Tensors that were pickled among plain values, and for each other one its name in the metadata.
        self._unpickled: dict[str, Leaf] = {}
        self._keys: dict[str, str] = {}
        attributes: list[str] = []
        if notes is not None:
            flat = self._flat_of_sidecar(notes, directory.path)
            self._set_state(flat, directory.path / sidecar.FILE_NAME, notes.leaf_specs)
        else:
            nested = rebuild(contents, self._files, self.path, self._allow)
            self.refusal, attributes = nested.refusal, nested.attributes
            flat = self._flat_of_nested(nested)
            self._set_state(flat, directory.path / FILE_NAME)
        self.metadata = notes.metadata if notes is not None else {}
        first = next(contents.locations(), None)
        checksummed = first is None or PieceZip(self._files[first[1].file], first[1]).archive.checksummed
        self.verifiable = "CRC-32 of every record" if checksummed else None
        self.details = {
            "dcp_version": contents.version,
            "crc32": "written" if checksummed else "not written: torch was configured not to",
            "values": len(contents.values),
            "files": {name: file.size for name, file in self._files.items()},
        }
        if attributes:
            self.details["attributes_left_out"] = attributes
        unused = unused_files(directory.path, {*self._files, FILE_NAME, sidecar.FILE_NAME})
        if unused:
            self.details["unused_files"] = unused
        self.notes = [*notes_on_folder(directory.path, unused)]
        directory.close()

    def _flat_of_sidecar(self, notes: Sidecar, path: Path) -> Flat[StoredLeaf]:
        leaves: dict[str, StoredLeaf] = {}
        for name, note in notes.tensors.items():
            entry = self._contents.tensors.get(name)
            if entry is None or (entry.dtype, entry.shape) != stored_form(note.state_dtype, note.shape):
                raise CorruptCheckpointError("differs between the metadata and tensorkeep.json", path=path, name=name)
            self._keys[name] = name
            leaves[name] = self._leaf(name, note.state_dtype, note.shape)
        return notes.flat(leaves)

    def _flat_of_nested(self, nested: NestedState) -> Flat[StoredLeaf]:
        flat = nested.flat
        self._keys = nested.keys
        leaves: dict[str, StoredLeaf] = {}
        for name, leaf in flat.leaves.items():
            if name in self._keys:
                tensor = self._contents.tensors[self._keys[name]]
                leaves[name] = self._leaf(name, tensor.dtype, tensor.shape)
            else:
                self._unpickled[name] = leaf
                leaves[name] = self._leaf(name, leaf.dtype, leaf.shape)
        return Flat(flat.skeleton, leaves, flat.aliases, flat.parts)

    def _leaf(self, name: str, dtype: DType, shape: tuple[int, ...]) -> StoredLeaf:
        key = self._keys.get(name)
        locations = [] if key is None else [chunk.location for chunk in self._contents.tensors[key].chunks]
        files = sorted({location.file for location in locations})
        file = files[0] if len(files) == 1 else f"{len(files)} files"
        stored_bytes = sum(location.length for location in locations)
        return StoredLeaf(self, name, dtype, shape, stored_bytes=stored_bytes, file=file)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._unpickled:
            self._unpickled[name].read(start, stop, out)
            return
        key = self._keys[name]
        tensor = self._contents.tensors[key]
        size, at = tensor.dtype.itemsize, 0
        for box in range_to_boxes(tensor.shape, start // size, stop // size):
            shape = box_shape(box)
            for piece in self._pieces[key]:
                common = intersection(box, piece.chunk.box)
                if common is not None:
                    # The dots make it a view, not a number, if there are no dimensions.
                    place: tuple[Any, ...] = (*relative(common, piece.chunk.box), ...)
                    source = piece.open(verify=self._verify)[place]
                    target = out[at : at + prod(shape) * size].view(source.dtype).reshape(shape)
                    with piece.needed(source):
                        target[relative(common, box)] = source
            at += prod(shape) * size

    def audit(self) -> Iterator[Problem]:
        """Check the chunks that no tensor of the state uses: plain values, and tensors stored twice."""
        used = set(self._keys.values())
        for name, places in _ends(self._contents).items():
            self._files[name].prefetch(places)
        locations = list(self._contents.values.items())
        for key, pieces in self._pieces.items():
            locations += [(key, piece.chunk.location) for piece in pieces if key not in used or _lacks_checksum(piece)]
        for key, location in locations:
            try:
                piece = PieceZip(self._files[location.file], location)
                piece.check()
            except TensorkeepError as error:
                yield Problem(error.message, file=location.file, name=key)
            else:
                if self.verifiable and not piece.archive.checksummed:
                    message = "has no CRC-32, unlike the rest of the checkpoint"
                    yield Problem(message, file=location.file, name=key)

    def close(self) -> None:
        self._unpickled = {}
        self._pieces = {}
        self._files = {}


def stored_form(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and the shape that a tensor is stored as: its bytes, if torch lacks its dtype."""
    return (dtype, tuple(shape)) if dtype.has_torch else (BY_NAME["uint8"], (prod(shape) * dtype.itemsize,))


def _ends(contents: Contents) -> dict[str, list[tuple[int, int]]]:
    """Return where in each file the first and the last byte of each piece are, beside its headers."""
    places: dict[str, list[tuple[int, int]]] = {}
    for _, location, _ in contents.locations():
        stop = location.offset + location.length
        places.setdefault(location.file, []).extend([(location.offset, location.offset + 1), (stop - 1, stop)])
    return places


def _lacks_checksum(piece: TensorPiece) -> bool:
    try:
        piece.open(verify=False)
    except TensorkeepError:
        return True
    return piece.crc is None


def _metadata_bytes(directory: Directory) -> bytes:
    try:
        file = directory.open(FILE_NAME)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            "is not a distributed checkpoint: it holds no .metadata",
            path=directory.path,
            remedy="a save that was killed leaves none; give the directory that dcp.save was given",
        ) from error
    with file:
        if file.size > _MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"{file.size:,} bytes of metadata are too many", path=file.path)
        return file.read(0, file.size)


def _map_files(directory: Directory, contents: Contents, parts: FetchedParts) -> dict[str, MappedFile]:
    """Map all files, and check their sizes against the metadata before memory is allocated."""
    files: dict[str, MappedFile] = {}
    claimed = 0
    for name, location, nbytes in contents.locations():
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
    try:
        with directory.open(file) as opened:
            return map_file(opened, parts)
    except NotACheckpointError as error:
        raise CorruptCheckpointError(
            "a chunk of it is in this file, which is missing",
            path=directory.path / file,
            name=name,
            remedy="restore the missing file: those of all ranks are needed",
        ) from error
