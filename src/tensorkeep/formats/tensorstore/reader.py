"""Reader of directories of TensorStore arrays, written by Tensorkeep or not; untrusted."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats import sealed, sidecar
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.formats.tensorstore.arrays import ArraysReader, KnownArray
from tensorkeep.formats.tensorstore.discovery import find_arrays, has_mark, is_database
from tensorkeep.formats.tensorstore.library import ArrayDirectory, KvStore
from tensorkeep.formats.tensorstore.listing import list_array
from tensorkeep.formats.tensorstore.specs import MAX_DIMENSIONS, METADATA_FILE, StoredType, is_key
from tensorkeep.io.directory import Directory
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat

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
        if sealed.digest(result.value) != notes.tensors[name].xxh3_64:
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
