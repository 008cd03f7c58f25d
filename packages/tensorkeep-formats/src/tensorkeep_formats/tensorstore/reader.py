"""Finds and reads the TensorStore arrays of a directory, a database or an object store, whoever wrote them."""

import json
import re
import stat
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError
from tensorkeep.ext import machine
from tensorkeep.ext.formats import (
    BLOCK_BYTES,
    Box,
    OpenSettings,
    Reader,
    StoredLeaf,
    box_shape,
    checksummed_json,
    range_to_boxes,
    sidecar,
)
from tensorkeep.ext.state import BY_NAME, DEFAULT_PART, Flat
from tensorkeep.ext.storage import Bytes, Directory, file_mode, first_bytes, folders_in, names_in, read_directory
from tensorkeep_formats.tensorstore import library, specs
from tensorkeep_formats.tensorstore.library import ArrayDirectory, KvStore, tensorstore

# Files of Orbax's items and steps, and of T5X: these directories belong to other formats.
_OTHER_FORMATS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_ZARR3 = library.METADATA_FILE[3]
_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
_BATCH = 256


@dataclass(frozen=True, slots=True)
class KnownArray:
    """What is known of an array before it is opened; with a sidecar, it must have ``types`` and ``shape``."""

    key: str
    zarr: int
    stored_bytes: int
    types: specs.StoredType | None = None
    shape: specs.Shape | None = None


def recognises(path: Path) -> bool:
    if not stat.S_ISDIR(file_mode(path)):
        return False
    if sidecar.lies_in(path, "tensorstore"):
        return True
    if not _OTHER_FORMATS.isdisjoint(names_in(path)):
        return False
    if is_database(path) or _is_node(path):
        return True
    folders = [path / name for name in folders_in(path) if not name.startswith(".")]
    return bool(folders) and all(not sidecar.lies_in(folder, "tensorstore") and _is_node(folder) for folder in folders)


def is_database(path: Path) -> bool:
    return first_bytes(path / _MANIFEST, 4) == _MANIFEST_START


def _is_node(path: Path) -> bool:
    if any(first_bytes(path / name, 1) == b"{" for name in (library.METADATA_FILE[2], ".zgroup")):
        return True
    content = _zarr3_content(path)
    # Opening the array reports metadata that is too large.
    return content is not None and (
        len(content) > library.MAX_METADATA_BYTES or _node_type(content) in ("array", "group")
    )


def _zarr3_content(path: Path) -> bytes | None:
    start = first_bytes(path / _ZARR3, 65536)
    # Most metadata is small: one short read, and a second only for a long file.
    return start if start is None or len(start) < 65536 else first_bytes(path / _ZARR3, library.MAX_METADATA_BYTES + 1)


def _node_type(content: bytes) -> str | None:
    """Return ``"array"`` or ``"group"`` from zarr v3 metadata; None if it is malformed."""
    try:
        # msgspec would refuse NaN, which zarr-python writes into attributes.
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kind = found.get("node_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def has_mark(directory: ArrayDirectory) -> bool:
    names, mark = (".zattrs", _ZARR3), specs.MARK.encode()
    if directory.kvstore == "file":
        root = directory.path if directory.in_store else Path(directory.root)
        return any(mark in (first_bytes(root / name, 4096) or b"") for name in names)
    with directory.reading():
        store = directory.open_store()
        return any(mark in directory.wait(store.read(name)).value for name in names)


def find_arrays(directory: ArrayDirectory) -> list[KnownArray]:
    """Return all arrays, at least one; the key of the directory itself is empty."""
    _check_is_whole(directory.path)
    in_folders = directory.kvstore == "file" and not directory.in_store
    arrays = [*_find_in_folders(directory)] if in_folders else _find_by_keys(directory)
    if not arrays:
        raise NotACheckpointError("holds no array of TensorStore", path=directory.path)
    return arrays


def _check_is_whole(path: Path) -> None:
    # The part of one process is a database as well. Its arrays look full: chunks that other processes wrote read as the
    # fill value.
    if re.fullmatch(r"ocdbt\.process_\d+", path.name):
        whole = path.parent if path.parent.name else path.absolute().parent
        raise UnsupportedError(
            "is one process's part of a database", path=path, remedy=f"give the path of the whole: {whole}"
        )
    if ".orbax-checkpoint-tmp" in path.name:
        raise UnsupportedError(
            "is a save of Orbax that was not finished", path=path, remedy="take another step, or save it again"
        )


def _find_in_folders(directory: ArrayDirectory) -> Iterator[KnownArray]:
    count = 0
    waiting = [""]
    while waiting:
        key = waiting.pop()
        folder, shown = Path(directory.root, key), directory.path / key
        if len(Path(key).parts) > _MAX_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MAX_DEPTH} deep", path=directory.path)
        entries = library.scan_folder(str(folder), shown)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        version = _version_at(folder, {entry.name for entry in entries}.difference(folders), shown)
        if version is not None:
            count += 1
            _check_count(count, directory)
            yield KnownArray(key, version, directory.stored_bytes(key))
            continue
        # The target of a link is not searched, so its arrays would be missing.
        linked = next((entry.name for entry in entries if stat.S_ISDIR(library.linked_mode(entry))), None)
        if linked is not None:
            raise library.link_error(shown / linked)
        waiting += [f"{key}/{name}" if key else name for name in reversed(folders)]


def _version_at(folder: Path, files: set[str], shown: Path) -> int | None:
    if library.METADATA_FILE[2] in files:
        return 2
    if _ZARR3 not in files:
        return None
    content = _zarr3_content(folder) or b""
    library.check_metadata_size(len(content), shown / _ZARR3)
    # Malformed metadata counts as an array, so that opening the array reports it.
    return None if _node_type(content) == "group" else 3


def _find_by_keys(directory: ArrayDirectory) -> list[KnownArray]:
    # Also for a database: refuses links to folders and metadata that is too large.
    listed = [name for name, _ in directory.files_of("")]
    with directory.reading():
        store = directory.open_store()
        if directory.kvstore == "ocdbt":
            listed = [key.decode(errors="surrogateescape") for key in sorted(directory.wait(store.list()))]
        elif not listed:
            listed = _listed_by_web_server(directory)
    found: dict[str, int] = {}
    for text in listed:
        folder, _, name = text.rpartition("/")
        version = next((version for version, file in library.METADATA_FILE.items() if file == name), None)
        if version is not None:
            # An array with both metadata files counts as zarr v2, as in a directory.
            found[folder] = min(version, found.get(folder, version))
            _check_count(len(found), directory)
            if folder.count("/") >= _MAX_DEPTH:
                raise UnsupportedError(f"its keys are nested more than {_MAX_DEPTH} deep", path=directory.path)
    groups = _groups(directory, store, [key for key, version in found.items() if version == 3])
    # A database mixes all arrays in its files.
    return [
        KnownArray(key, version, directory.stored_bytes(key) if directory.kvstore == "file" else 0)
        for key, version in found.items()
        if key not in groups
    ]


def _check_count(count: int, directory: ArrayDirectory) -> None:
    if count > _MAX_ARRAYS:
        raise UnsupportedError(f"holds more than {_MAX_ARRAYS:,} arrays", path=directory.path)


def _listed_by_web_server(directory: ArrayDirectory) -> list[str]:
    # A web server does not list the arrays of a group: only an array at the URL itself can be read.
    names = [name for name in library.METADATA_FILE.values() if first_bytes(directory.path / name, 1) is not None]
    if names == [_ZARR3] and _node_type(_zarr3_content(directory.path) or b"") == "group":
        raise UnsupportedError(
            "is a group of arrays, which a web server does not list", path=directory.path, remedy="give one array's URL"
        )
    return names


def _groups(directory: ArrayDirectory, store: Any, keys: list[str]) -> set[str]:
    # The metadata of a zarr v3 group may contain the metadata of its arrays.
    groups = set()
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        with directory.reading():
            # In batches: requests of many keys run at the same time, with bounded memory.
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in batch}
            contents = {key: directory.wait(future).value for key, future in futures.items()}
        for key, content in contents.items():
            library.check_metadata_size(len(content), directory.path / key / _ZARR3)
            if _node_type(content) == "group":
                groups.add(key)
    return groups


_THREADS = 4
_LARGE_CHUNK = 256 * 1024**2
_OMIT = 'leave out what cannot be read with select="*", or read it with zarr'


@dataclass(frozen=True, slots=True)
class OpenArray:
    store: Any
    types: specs.StoredType
    shape: specs.Shape
    chunk: specs.Shape
    metadata: dict[str, Any]
    directory: ArrayDirectory

    def read_box(self, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order and in the state's dtype."""
        lengths = box_shape(box)
        view = None if self.types.converts else out.view(self.types.stored.numpy).reshape(lengths)
        # TensorStore fills the caller's memory in place if it is aligned and has the stored dtype.
        target = view if view is not None and view.flags.aligned else np.empty(lengths, self.types.stored.numpy)
        ts = tensorstore()
        store = self.store
        if lengths != self.shape:
            # A box keeps the indices of its array; the indices of the target start at zero.
            store = store[box][ts.d[:].translate_to[0]]
        self.directory.wait(ts.array(target).write(store))
        if target is not view:
            out[:] = self.types.from_stored(target)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of chunks: the C-order stream splits at their multiples without splitting a chunk."""
        shape, chunk = self.shape, self.chunk
        axis = next((axis for axis, length in enumerate(chunk) if length > 1 and shape[axis] > 1), len(shape))
        if axis == len(shape):
            return self.types.dtype.itemsize
        # A chunk that is cut off at the end of an inner dimension shifts all later rows: only full slices are aligned.
        full = axis > 0 and prod(shape[:axis]) > 1 and shape[axis] % chunk[axis] != 0
        elements = prod(shape[axis:]) if full else min(chunk[axis], shape[axis]) * prod(shape[axis + 1 :])
        return max(1, elements) * self.types.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """The cache size that lets a few threads read sequentially and decode each chunk once."""
        dtype, stored = self.types.dtype, self.types.stored
        row = self.row_bytes // dtype.itemsize * stored.itemsize
        blocks = _THREADS * BLOCK_BYTES // dtype.itemsize * stored.itemsize
        return row * (blocks // row + 2)


class ArraysReader(Reader):
    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        self.path = path
        # Reading is cheapest in rows of chunks. Smaller ranges of a larger row are read through a cache that holds the
        # row, so that a sequential load still decodes each chunk once.
        self._max_row = max(BLOCK_BYTES, settings.pool.budget // 8)
        # A descriptor holds the directory open: if the checkpoint is replaced while it is read, its old content is
        # read, or a StoreError is raised.
        read_directory(path, self._open)

    @abstractmethod
    def _open(self, directory: Directory) -> None:
        """Read the metadata of the directory, and call `_open_arrays` and `_set_state`."""

    def _open_arrays(
        self,
        open_directory: Directory,
        directory: ArrayDirectory,
        known: Mapping[str, KnownArray],
        *,
        fill_missing: bool,
        unread: dict[str, UnsupportedError] | None = None,
    ) -> dict[str, StoredLeaf]:
        """Open arrays and return their tensors; ``unread`` receives the errors of unsupported arrays."""
        self._open_directory = open_directory
        self._directory = directory
        in_store = directory.in_store
        # Zarr may leave out chunks of zeros, so a missing chunk of another program is the fill value. Tensorkeep stores
        # all chunks, so there it is an error.
        self._arrays = _open_all(
            directory, known, library.context(in_store=in_store), unread, fill_missing=fill_missing
        )
        large = {name: known[name] for name, array in self._arrays.items() if array.row_bytes > self._max_row}
        if large:
            cache = min(max(self._arrays[name].cache_bytes for name in large), machine.memory_limit() // 4)
            cached = library.context(cache_bytes=cache, in_store=in_store)
            self._arrays |= _open_all(directory, large, cached, None, fill_missing=fill_missing)
        checksums = {specs.checksum_of(array.metadata) for array in self._arrays.values()}
        self.verifiable = checksums.pop() if len(checksums) == 1 else None
        return {name: self._leaf(name, known[name], array) for name, array in self._arrays.items()}

    def _leaf(self, name: str, known: KnownArray, array: OpenArray) -> StoredLeaf:
        codec, file = specs.codec_of(array.metadata), known.key or "."
        return StoredLeaf(self, name, array.types.dtype, array.shape, known.stored_bytes, file, codec)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        array = self._arrays[name]
        size, at = array.types.dtype.itemsize, 0
        try:
            with self._directory.reading(name):
                for box in range_to_boxes(array.shape, start // size, stop // size):
                    nbytes = prod(box_shape(box)) * size
                    array.read_box(box, out[at : at + nbytes])
                    at += nbytes
        except CorruptCheckpointError as error:
            # The files of a removed directory are gone, which looks like damage.
            if self._open_directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        row = self._arrays[name].row_bytes
        return BLOCK_BYTES if row > self._max_row else row * max(1, BLOCK_BYTES // row)

    def close(self) -> None:
        self._open_directory.close()


def _open_all(
    directory: ArrayDirectory,
    known: Mapping[str, KnownArray],
    context: Any,
    unread: dict[str, UnsupportedError] | None,
    *,
    fill_missing: bool,
) -> dict[str, OpenArray]:
    futures, arrays = {}, {}
    # All arrays are opened at once: one after another, each would wait for the disk or the store.
    for name, array in known.items():
        with directory.reading(name):
            futures[name] = start_open(directory, array, context, fill_missing=fill_missing)
    for name, future in futures.items():
        try:
            with directory.reading(name):
                arrays[name] = check_array(name, known[name], directory.wait(future), directory)
        except UnsupportedError as error:
            if unread is None:
                raise
            unread[name] = error
    return arrays


def start_open(directory: ArrayDirectory, known: KnownArray, context: Any, *, fill_missing: bool) -> Any:
    spec = {
        "driver": specs.DRIVER[known.zarr],
        "kvstore": directory.spec(known.key),
        # False makes a missing chunk an error; True reads it as the fill value.
        "fill_missing_data_reads": fill_missing,
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    return tensorstore().open(spec, open=True, read=True, write=False, context=context)


def check_array(name: str, known: KnownArray, store: Any, directory: ArrayDirectory) -> OpenArray:
    path = directory.path / known.key
    dtype = BY_NAME.get(store.dtype.name)
    if dtype is None:
        raise UnsupportedError(f"holds elements of {store.dtype.name}, which are not numbers", path=path, name=name)
    shape = tuple(int(length) for length in store.shape)
    types = known.types or specs.stored_type(dtype)
    if types.stored is not dtype or shape != (known.shape if known.shape is not None else shape):
        raise CorruptCheckpointError(
            f"the array is {dtype} of shape {list(shape)}, which differs from what was saved", path=path, name=name
        )
    if any(store.domain.origin):
        raise UnsupportedError("the array does not start at index 0", path=path, name=name)
    chunk = tuple(map(int, store.chunk_layout.read_chunk.shape or (1,) * len(shape)))
    size, total = prod(chunk) * dtype.itemsize, prod(shape) * dtype.itemsize
    # A small file may declare a chunk that takes all memory when it is decoded.
    if size > BLOCK_BYTES and (size > machine.memory_limit() // 4 or (size > _LARGE_CHUNK and size > 4 * total)):
        raise UnsupportedError(
            f"its chunks of shape {list(chunk)} take {size:,} bytes each, too many to decode",
            path=path,
            name=name,
            remedy="store it in smaller chunks",
        )
    return OpenArray(store, types, shape, chunk, store.spec().to_json()["metadata"], directory)


class TensorStoreSidecar(sidecar.Sidecar, frozen=True, kw_only=True):
    """``tensorkeep.json`` beside TensorStore arrays; the place of a tensor is the key of its array."""

    zarr: Literal[2, 3]
    kvstore: KvStore
    # Options of the save that were not the default.
    options: dict[str, Any]


class TensorStoreReader(ArraysReader):
    format = "tensorstore"

    def _open(self, directory: Directory) -> None:
        if not sidecar.lies_in(directory.stable_path, self.format):
            self._open_foreign(directory)
            return
        notes, arrays, known = read_own(directory)
        leaves = self._open_arrays(directory, arrays, known, fill_missing=False)
        self._set_state(notes.flat(leaves), self.path / sidecar.FILE_NAME, notes.leaf_specs)
        self.metadata = notes.metadata
        self.details = {name: getattr(notes, name) for name in ("version", "writer", "zarr", "kvstore", "options")}

    def _open_foreign(self, directory: Directory) -> None:
        arrays = ArrayDirectory.of(directory, "ocdbt" if is_database(directory.stable_path) else "file")
        known = _foreign_arrays(arrays)
        if "_METADATA" in names_in(directory.stable_path):
            self.notes = ["Orbax wrote it: its texts, empty containers and nesting are not read, only its arrays"]
        unread: dict[str, UnsupportedError] = {}
        leaves = self._open_arrays(directory, arrays, known, fill_missing=True, unread=unread)
        if unread and not leaves:
            raise next(iter(unread.values()))
        kinds = {name: "tensor" if leaf.dtype.has_torch else "ndarray" for name, leaf in leaves.items()}
        nodes: dict[str, Any] = {name: {kind: name} for name, kind in kinds.items()}
        for name, error in unread.items():
            reason = re.sub(r".*(opening|reading|parsing) [^:]*: ", "", error.message)
            nodes[name] = {"placeholder": [name, f"an array that is not supported ({reason[:100]})", _OMIT]}
        skeleton = {"dict": {name: nodes[name] for name in known}}
        self._set_state(Flat(skeleton, leaves, {}, {name: (DEFAULT_PART, name) for name in leaves}), self.path)
        self.metadata = {}
        self.details = {"kvstore": arrays.kvstore, "missing_chunks": "are read as the fill value"}


def read_own(directory: Directory) -> tuple[TensorStoreSidecar, ArrayDirectory, dict[str, KnownArray]]:
    """Return the sidecar of a directory and its arrays, after a check of the files of the arrays."""
    notes = sidecar.read(directory, "tensorstore", TensorStoreSidecar)
    arrays = ArrayDirectory.of(directory, notes.kvstore)
    source = arrays.path / sidecar.FILE_NAME
    keys = {name: "".join(note.place) for name, note in notes.tensors.items()}
    # Two keys that differ only in case are one directory on some file systems.
    if len({key.casefold() for key in keys.values()}) != len(keys):
        raise CorruptCheckpointError("two tensors have the same array", path=source)
    if notes.kvstore == "ocdbt":
        arrays.files_of("")  # refuses links to folders and metadata that is too large
    known = {}
    for name, note in notes.tensors.items():
        types, key, rank = specs.StoredType(note.state_dtype, note.file_dtype), keys[name], len(note.shape)
        if not types.is_valid or not specs.is_key(key) or rank > specs.MAX_DIMENSIONS:
            text = f"an array {key!r} of {note.stored_dtype or note.dtype} and {rank} dimensions is impossible"
            raise CorruptCheckpointError(text, path=source, name=name)
        size = arrays.stored_bytes(key) if notes.kvstore == "file" else note.stored_bytes
        known[name] = KnownArray(key, notes.zarr, size, types, note.shape)
    if keys:
        _check_metadata(notes, arrays, keys)
    return notes, arrays, known


def _check_metadata(notes: TensorStoreSidecar, directory: ArrayDirectory, keys: Mapping[str, str]) -> None:
    # Before TensorStore uses the metadata: damage there could change shapes or dtypes without an error.
    file = library.METADATA_FILE[notes.zarr]
    with directory.reading():
        store = directory.open_store()
        futures = {name: store.read(f"{key}/{file}") for name, key in keys.items()}
    for name, future in futures.items():
        with directory.reading(name):
            result = directory.wait(future)
        path = directory.path / keys[name] / file
        if result.state == "missing":
            raise CorruptCheckpointError("the array's metadata is missing", path=path, name=name)
        if checksummed_json.digest(result.value) != notes.tensors[name].xxh3_64:
            raise CorruptCheckpointError("the array's metadata has changed since the save", path=path, name=name)


def _foreign_arrays(arrays: ArrayDirectory) -> dict[str, KnownArray]:
    # Without its sidecar, a checkpoint of Tensorkeep would load as a flat dict, without an error.
    if has_mark(arrays):
        raise CorruptCheckpointError(
            "is missing or damaged; without it the state of the arrays is unknown",
            path=arrays.path / sidecar.FILE_NAME,
            remedy="take another checkpoint or copy; the arrays themselves can be read with TensorStore or zarr",
        )
    known: dict[str, KnownArray] = {}
    for found in find_arrays(arrays):
        # A directory that is itself one array gives the array its name.
        name = found.key.replace("/", ".") or arrays.path.absolute().name or "array"
        if name in known:
            raise UnsupportedError(f"holds two arrays with the name {name!r}", path=arrays.path, name=name)
        known[name] = found
    return known
