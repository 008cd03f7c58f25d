"""Reader of directories of TensorStore arrays, written by Tensorkeep or not; untrusted."""

import json
import os
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
from tensorkeep.formats import checksummed_json, sidecar
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.boxes import Box, box_shape, range_to_boxes
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.tensorstore.library import ArrayDirectory, KvStore, context, tensorstore
from tensorkeep.formats.tensorstore.specs import (
    MARK,
    MAX_DIMENSIONS,
    METADATA_FILE,
    Shape,
    StoredType,
    checksum_of,
    codec_of,
    is_key,
    open_spec,
    stored_type,
)
from tensorkeep.machine import memory_limit
from tensorkeep.paths import absolute
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat
from tensorkeep.storage import file_mode, first_bytes, folders_in, names_in, read_directory
from tensorkeep.storage.base import Directory
from tensorkeep.storage.direct_io import Bytes, store_errors, sync_directory

# Opening arrays, refusing chunks too large to decode, and reading byte ranges.
#
# Reading is cheapest in full rows of chunks. If such a row is too large to be read at once, smaller ranges are read
# through a cache that holds it, so that a sequential load still decodes each chunk once.

_THREADS = 4
_LARGE_CHUNK = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class KnownArray:
    """The expected properties of an array, known before it is opened.

    They are its path in the directory, the version of zarr, and the bytes of its files, 0 in a database. If there is a
    sidecar, the array must have the dtypes and the shape in it.
    """

    key: str
    zarr: int
    stored_bytes: int
    types: StoredType | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class OpenArray:
    """An open array, with its zarr metadata as TensorStore decoded it."""

    store: Any
    types: StoredType
    shape: Shape
    chunk: Shape
    metadata: dict[str, Any]
    directory: ArrayDirectory

    def read_box(self, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order and in the state's dtype."""
        lengths = box_shape(box)
        view = None if self.types.converts else out.view(self.types.stored.numpy).reshape(lengths)
        target = view if view is not None and view.flags.aligned else np.empty(lengths, self.types.stored.numpy)
        ts = tensorstore()
        store = self.store
        if lengths != self.shape:
            # The indices of a box start at those of the array, the indices of the target at zero.
            store = store[box][ts.d[:].translate_to[0]]
        self.directory.wait(ts.array(target).write(store))
        if target is not view:
            out[:] = self.types.from_stored(target)

    @property
    def row_bytes(self) -> int:
        """The smallest number of bytes at whose multiples the C-order stream can be split without splitting a chunk."""
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
        """Cache size at which sequential reads by a few threads decode each chunk once."""
        dtype, stored = self.types.dtype, self.types.stored
        row = self.row_bytes // dtype.itemsize * stored.itemsize
        blocks = _THREADS * BLOCK_BYTES // dtype.itemsize * stored.itemsize
        return row * (blocks // row + 2)


class ArraysReader(Reader):
    """Base of readers whose tensors are arrays of TensorStore.

    The directory is held open by a descriptor: if the checkpoint is replaced while it is read, its old content is
    read, or a StoreError is raised.
    """

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        self.path = path
        # What reading may use besides the tensors; one row of chunks may need more.
        self._max_row = max(BLOCK_BYTES, settings.pool.budget // 8)
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
        """Open arrays and return their tensors.

        A missing chunk is an error, or with ``fill_missing`` read as the fill value, which is how zarr stores chunks of
        zeros. The errors of arrays that are not supported, such as those of strings, are put into ``unread`` if it is
        given. Raises the errors of `check_array`, and those of TensorStore if an array cannot be opened.
        """
        self._open_directory = open_directory
        self._directory = directory
        in_store = directory.in_store
        self._arrays = _open_all(directory, known, context(in_store=in_store), unread, fill_missing=fill_missing)
        large = {name: known[name] for name, array in self._arrays.items() if array.row_bytes > self._max_row}
        if large:
            cache = min(max(self._arrays[name].cache_bytes for name in large), memory_limit() // 4)
            cached = context(cache_bytes=cache, in_store=in_store)
            self._arrays |= _open_all(directory, large, cached, None, fill_missing=fill_missing)
        checksums = {checksum_of(array.metadata) for array in self._arrays.values()}
        self.verifiable = checksums.pop() if len(checksums) == 1 else None
        return {
            name: StoredLeaf(
                self,
                name,
                array.types.dtype,
                array.shape,
                stored_bytes=known[name].stored_bytes,
                codec=codec_of(array.metadata),
                file=known[name].key or ".",
            )
            for name, array in self._arrays.items()
        }

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
            if self._open_directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        # Rows of chunks, if they are not too large.
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
    """Open all arrays; the errors of those that are not supported are put into ``unread``, or raised without it."""
    futures, arrays = {}, {}
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
    """Return the future of an array that TensorStore opens for reading."""
    spec = open_spec(directory, known.key, known.zarr, fill_missing=fill_missing)
    return tensorstore().open(spec, open=True, read=True, write=False, context=context)


def check_array(name: str, known: KnownArray, store: Any, directory: ArrayDirectory) -> OpenArray:
    """Return an array that TensorStore has opened, after comparing it with its expected properties.

    Raises CorruptCheckpointError if its dtype or shape differs; UnsupportedError if it holds no numbers, does not start
    at index 0, or its chunks are too large to decode.
    """
    path = directory.path / known.key
    dtype = BY_NAME.get(store.dtype.name)
    if dtype is None:
        raise UnsupportedError(f"holds elements of {store.dtype.name}, which are not numbers", path=path, name=name)
    shape = tuple(int(length) for length in store.shape)
    types = known.types or stored_type(dtype)
    if types.stored is not dtype or shape != (known.shape if known.shape is not None else shape):
        raise CorruptCheckpointError(
            f"the array is {dtype} of shape {list(shape)}, which differs from what was saved", path=path, name=name
        )
    if any(store.domain.origin):
        raise UnsupportedError("the array does not start at index 0", path=path, name=name)
    chunk = tuple(map(int, store.chunk_layout.read_chunk.shape or (1,) * len(shape)))
    size, total = prod(chunk) * dtype.itemsize, prod(shape) * dtype.itemsize
    # A small file may declare a chunk that takes all memory when it is decoded.
    if size > BLOCK_BYTES and (size > memory_limit() // 4 or (size > _LARGE_CHUNK and size > 4 * total)):
        raise UnsupportedError(
            f"its chunks of shape {list(chunk)} take {size:,} bytes each, too many to decode",
            path=path,
            name=name,
            remedy="store it in smaller chunks",
        )
    return OpenArray(store, types, shape, chunk, store.spec().to_json()["metadata"], directory)


# Listing the files of a checkpoint; links to folders and unreadable folders are refused.
#
# Links to files are followed: the Hugging Face cache consists of them.

MAX_METADATA_BYTES = 16 * 1024**2
"""Of the largest metadata file that is read."""
_METADATA_FILES = frozenset(METADATA_FILE.values())


def scan_folder(folder: str, shown: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their names; StoreError if it cannot be listed."""
    with store_errors(shown, "list the directory"), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def linked_mode(entry: os.DirEntry[str]) -> int:
    """Return the mode of what a link leads to; 0 if it is another entry, or leads to nothing, such as to itself."""
    return file_mode(Path(entry.path)) if entry.is_symlink() else 0


def list_tree(top: str, shown: Path) -> tuple[dict[str, int], list[str]]:
    """Return the size in bytes of each file below a directory, and all folders, by their relative paths.

    Each folder has a slash at its end; parents come first, at the front the directory itself (empty). ``shown`` is the
    directory's path in errors.

    Raises UnsupportedError if there is a link to a folder or to nothing, a pipe or a device, or if an array's metadata
    file has more than 16 MiB; StoreError if the operating system refuses access.
    """
    files: dict[str, int] = {}
    folders = [""]
    for inside in folders:  # grows while it is read
        path = shown / inside
        for entry in scan_folder(f"{top}/{inside}", path):
            # Chunks of 64 elements make tens of thousands of files: their paths are made for errors only.
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{inside}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) or stat.S_ISREG(linked_mode(entry)):
                with store_errors(path, f"read the size of {entry.name}"):
                    size = entry.stat().st_size
                if entry.name in _METADATA_FILES:
                    check_metadata_size(size, path / entry.name)
                files[inside + entry.name] = size
            elif entry.is_symlink():
                raise link_error(path / entry.name)
            else:
                raise UnsupportedError("is neither a file nor a folder", path=path / entry.name, remedy="remove it")
    return files, folders


def list_array(directory: ArrayDirectory, key: str) -> dict[str, int]:
    """Return the size of each file of an array; see `list_tree`. Nothing if the array is missing.

    The directory itself (an empty key) may be reached through a link, the array may not.
    """
    if directory.listing is not None:
        found = directory.listing.below(key)
        for name, size in found.items():
            if name.rpartition("/")[2] in _METADATA_FILES:
                check_metadata_size(size, directory.path / name)
        return found
    top = directory.root + key
    if key and os.path.islink(top):
        raise link_error(directory.path / key)
    return list_tree(top, directory.path / key)[0] if os.path.isdir(top) else {}


def sync_directories(path: Path) -> None:
    """Make the names in a directory, and in all those below it, durable; StoreError if that fails."""
    for folder in reversed(list_tree(str(path), path)[1]):
        with store_errors(path / folder, "make the directories durable"):
            sync_directory(path / folder)


def check_metadata_size(size: int, shown: Path) -> None:
    """Raise UnsupportedError if a metadata file of so many bytes is larger than 16 MiB."""
    if size > MAX_METADATA_BYTES:
        limit = f"more than the {MAX_METADATA_BYTES:,} that are read"
        raise UnsupportedError(f"has {size:,} bytes of metadata, {limit}", path=shown)


def link_error(shown: Path) -> UnsupportedError:
    """Return the error for a symbolic link to a folder, or to nothing."""
    return UnsupportedError(
        "is a symbolic link to a folder or to nothing, which is not followed",
        path=shown,
        remedy="copy the checkpoint with what its links point to: cp -rL FOLDER COPY",
    )


# Detecting directories of TensorStore arrays, and listing the arrays without opening any.
#
# Directories of arrays that belong to another format (Orbax, T5X) are left to that format.

_OTHER_FORMATS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
"""Files of Orbax's items and steps, and of T5X."""
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_ZARR3 = METADATA_FILE[3]
_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
_BATCH = 256


def recognises(path: Path) -> bool:
    """Return whether a directory holds TensorStore arrays, from names and first bytes only."""
    if not stat.S_ISDIR(file_mode(path)):
        return False
    if sidecar.lies_in(path, "tensorstore"):
        return True
    names = names_in(path)
    if not _OTHER_FORMATS.isdisjoint(names):
        return False
    return is_database(path) or _is_node(path) or _holds_only_nodes(path)


def is_database(path: Path) -> bool:
    """Return whether a directory is an OCDBT database."""
    return first_bytes(path / _MANIFEST, 4) == _MANIFEST_START


def check_is_no_part(path: Path) -> None:
    """Raise UnsupportedError if a directory's name is that of one process's part, or of an unfinished save, of Orbax.

    The part is a database, too, and its arrays look full: what other processes wrote is read as the fill value.
    """
    if re.fullmatch(r"ocdbt\.process_\d+", path.name):
        whole = absolute(path).parent
        raise UnsupportedError(
            "is one process's part of a database", path=path, remedy=f"give the path of the whole: {whole}"
        )
    if ".orbax-checkpoint-tmp" in path.name:
        raise UnsupportedError(
            "is a save of Orbax that was not finished", path=path, remedy="take another step, or save it again"
        )


def has_mark(directory: ArrayDirectory) -> bool:
    """Return whether the attributes of the group mention a sidecar of Tensorkeep."""
    names, mark = (".zattrs", _ZARR3), MARK.encode()
    if directory.kvstore == "file":
        root = directory.path if directory.in_store else Path(directory.root)
        return any(mark in (first_bytes(root / name, 4096) or b"") for name in names)
    with directory.reading():
        store = directory.open_store()
        return any(mark in directory.wait(store.read(name)).value for name in names)


def find_arrays(directory: ArrayDirectory) -> list[KnownArray]:
    """Return all arrays; the key of the directory itself is empty.

    Raises NotACheckpointError if no array is found; UnsupportedError if there are more than 200,000 arrays, they are
    nested more than 64 deep, have too much metadata, are one process's part, or hold a link to a folder; StoreError
    if a folder cannot be listed.
    """
    check_is_no_part(directory.path)
    if directory.kvstore == "file" and not directory.in_store:
        arrays = list(_find_in_folders(directory))
    else:
        arrays = _find_by_keys(directory)
    if not arrays:
        raise NotACheckpointError("holds no array of TensorStore", path=directory.path)
    return arrays


def _is_node(path: Path) -> bool:
    """Return whether a directory is a zarr array or group."""
    if any(first_bytes(path / name, 1) == b"{" for name in (METADATA_FILE[2], ".zgroup")):
        return True
    content = _zarr3_content(path)
    # Opening reports metadata that is too large.
    return content is not None and (len(content) > MAX_METADATA_BYTES or _node_type(content) in ("array", "group"))


def _zarr3_content(path: Path) -> bytes | None:
    start = first_bytes(path / _ZARR3, 65536)
    return start if start is None or len(start) < 65536 else first_bytes(path / _ZARR3, MAX_METADATA_BYTES + 1)


def _node_type(content: bytes) -> str | None:
    """Return ``"array"`` or ``"group"`` from zarr v3 metadata; None if it is malformed.

    The metadata of a group may contain that of its arrays.
    """
    try:
        # msgspec refuses NaN, which zarr-python writes into attributes.
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kind = found.get("node_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def _version_at(folder: Path, files: set[str], shown: Path) -> int | None:
    """Return the version of zarr of the array in a folder; None if it holds no array.

    Malformed metadata counts as an array's, so that opening reports it.
    """
    if METADATA_FILE[2] in files:
        return 2
    if _ZARR3 not in files:
        return None
    content = _zarr3_content(folder) or b""
    check_metadata_size(len(content), shown / _ZARR3)
    return None if _node_type(content) == "group" else 3


def _holds_only_nodes(path: Path) -> bool:
    folders = [path / name for name in folders_in(path) if not name.startswith(".")]
    return bool(folders) and all(not sidecar.lies_in(folder, "tensorstore") and _is_node(folder) for folder in folders)


def _find_in_folders(directory: ArrayDirectory) -> Iterator[KnownArray]:
    count = 0
    waiting = [Path()]
    while waiting:
        inside = waiting.pop()
        folder, shown = Path(directory.root, inside), directory.path / inside
        if len(inside.parts) > _MAX_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MAX_DEPTH} deep", path=directory.path)
        entries = scan_folder(str(folder), shown)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        version = _version_at(folder, {entry.name for entry in entries}.difference(folders), shown)
        if version is not None:
            key = "" if inside == Path() else str(inside)
            count += 1
            _check_count(count, directory)
            yield KnownArray(key, version, sum(list_array(directory, key).values()))
            continue
        # The target of a link is not searched, so its arrays would be missing.
        linked = next((entry.name for entry in entries if stat.S_ISDIR(linked_mode(entry))), None)
        if linked is not None:
            raise link_error(shown / linked)
        waiting += [inside / name for name in reversed(folders)]


def _check_count(count: int, directory: ArrayDirectory) -> None:
    if count > _MAX_ARRAYS:
        raise UnsupportedError(f"holds more than {_MAX_ARRAYS:,} arrays", path=directory.path)


def _find_by_keys(directory: ArrayDirectory) -> list[KnownArray]:
    """Return the arrays in a database, or below a prefix of an object store."""
    files = list_array(directory, "")
    with directory.reading():
        store = directory.open_store()
        if directory.kvstore == "file":
            listed = list(files) or _listed_by_web_server(directory)
        else:
            listed = [key.decode(errors="surrogateescape") for key in sorted(directory.wait(store.list()))]
    found: dict[str, int] = {}
    for text in listed:
        folder, _, name = text.rpartition("/")
        version = next((version for version, file in METADATA_FILE.items() if file == name), None)
        if version is not None:
            found[folder] = min(version, found.get(folder, version))
            _check_count(len(found), directory)
            if folder.count("/") >= _MAX_DEPTH:
                raise UnsupportedError(f"its keys are nested more than {_MAX_DEPTH} deep", path=directory.path)
    groups = _groups(directory, store, [key for key, version in found.items() if version == 3])
    sizes = {key: sum(list_array(directory, key).values()) if directory.kvstore == "file" else 0 for key in found}
    return [KnownArray(key, version, sizes[key]) for key, version in found.items() if key not in groups]


def _listed_by_web_server(directory: ArrayDirectory) -> list[str]:
    """Return the metadata files of an array at the URL itself: a web server does not list the arrays of a group."""
    names = [name for name in METADATA_FILE.values() if first_bytes(directory.path / name, 1) is not None]
    if names == [_ZARR3] and _node_type(_zarr3_content(directory.path) or b"") == "group":
        raise UnsupportedError(
            "is a group of arrays, which a web server does not list", path=directory.path, remedy="give one array's URL"
        )
    return names


def _groups(directory: ArrayDirectory, store: Any, keys: list[str]) -> set[str]:
    """Return which of some keys of zarr v3 in a database are groups."""
    groups = set()
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        with directory.reading():
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in batch}
            contents = {key: directory.wait(future).value for key, future in futures.items()}
        for key, content in contents.items():
            check_metadata_size(len(content), directory.path / key / _ZARR3)
            if _node_type(content) == "group":
                groups.add(key)
    return groups


_OMIT = 'leave out what cannot be read with select="*", or read it with zarr'


class TensorStoreSidecar(Sidecar, frozen=True, kw_only=True):
    """``tensorkeep.json`` beside TensorStore arrays; the place of a tensor is the key of its array.

    ``options`` are those of the save that were not the default.
    """

    zarr: Literal[2, 3]
    kvstore: KvStore
    options: dict[str, Any]


class TensorStoreReader(ArraysReader):
    """An open directory of TensorStore arrays.

    With a sidecar, the arrays are the state that was saved, and a missing chunk is an error. Arrays of other programs
    are a dict of tensors by path, with dots for slashes; zarr defines a missing chunk as full of the fill value.
    """

    format = "tensorstore"

    def _open(self, directory: Directory) -> None:
        if sidecar.lies_in(directory.stable_path, self.format):
            notes, arrays, known = read_own(directory)
            leaves = self._open_arrays(directory, arrays, known, fill_missing=False)
            self._set_state(notes.flat(leaves), self.path / sidecar.FILE_NAME, notes.leaf_specs)
            self.metadata = notes.metadata
            names = ("version", "writer", "zarr", "kvstore", "options")
            self.details = {name: getattr(notes, name) for name in names}
            return
        arrays, known = read_foreign(directory)
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
    """Return the sidecar of a directory, and its arrays, after checking both and the files of the arrays.

    Raises the errors of `sidecar.read`; CorruptCheckpointError if an array's metadata is missing or changed;
    UnsupportedError if its files contain a link to a folder.
    """
    notes = sidecar.read(directory, "tensorstore", TensorStoreSidecar)
    arrays = ArrayDirectory.of(directory, notes.kvstore)
    source = directory.path / sidecar.FILE_NAME
    keys = {name: "".join(note.place) for name, note in notes.tensors.items()}
    if len({key.casefold() for key in keys.values()}) != len(keys):
        raise CorruptCheckpointError("two tensors have the same array", path=source)
    if notes.kvstore == "ocdbt":
        list_array(arrays, "")
    known = {}
    for name, note in notes.tensors.items():
        types, key, rank = StoredType(note.state_dtype, note.file_dtype), keys[name], len(note.shape)
        if not types.is_valid or not is_key(key) or rank > MAX_DIMENSIONS:
            text = f"an array {key!r} of {note.stored_dtype or note.dtype} and {rank} dimensions is impossible"
            raise CorruptCheckpointError(text, path=source, name=name)
        size = sum(list_array(arrays, key).values()) if notes.kvstore == "file" else note.stored_bytes
        known[name] = KnownArray(key, notes.zarr, size, types, note.shape)
    _check_metadata(notes, arrays, keys)
    return notes, arrays, known


def _check_metadata(notes: TensorStoreSidecar, directory: ArrayDirectory, keys: Mapping[str, str]) -> None:
    """Compare each array's metadata file with its checksum, before TensorStore uses it."""
    if not keys:
        return
    file = METADATA_FILE[notes.zarr]
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


def read_foreign(directory: Directory) -> tuple[ArrayDirectory, dict[str, KnownArray]]:
    """Return the arrays of a directory without a sidecar by name: the key with dots for slashes.

    Raises the errors of `find_arrays`; CorruptCheckpointError if Tensorkeep wrote it, so that the sidecar is missing;
    UnsupportedError if two arrays would have the same name.
    """
    arrays = ArrayDirectory.of(directory, "ocdbt" if is_database(directory.stable_path) else "file")
    if has_mark(arrays):
        raise CorruptCheckpointError(
            "is missing or damaged; without it the state of the arrays is unknown",
            path=directory.path / sidecar.FILE_NAME,
            remedy="take another checkpoint or copy; the arrays themselves can be read with TensorStore or zarr",
        )
    known: dict[str, KnownArray] = {}
    for found in find_arrays(arrays):
        # If the directory itself is one array, its name is the only one.
        name = found.key.replace("/", ".") or directory.path.absolute().name or "array"
        if name in known:
            raise UnsupportedError(f"holds two arrays with the name {name!r}", path=directory.path, name=name)
        known[name] = found
    return arrays, known
