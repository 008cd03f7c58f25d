"""Reader of directories of TensorStore arrays, written by Tensorkeep or not; untrusted."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tensorkeep.errors import CorruptCheckpointError, StoreError, UnsupportedError
from tensorkeep.formats import sealed, sidecar
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.sidecar import Sidecar, TensorNote
from tensorkeep.formats.tensorstore.arrays import ArraySet, KnownArray
from tensorkeep.formats.tensorstore.compressors import checksum_of, codec_of
from tensorkeep.formats.tensorstore.discovery import find_arrays, has_mark, is_database
from tensorkeep.formats.tensorstore.library import ArrayDirectory, KvStore, tensorstore
from tensorkeep.formats.tensorstore.listing import list_array
from tensorkeep.formats.tensorstore.specs import METADATA_FILE, StoredType, is_key
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat

_MAX_DIMENSIONS = 32


class TensorStoreSidecar(Sidecar, frozen=True, kw_only=True):
    """``tensorkeep.json`` beside TensorStore arrays; the place of a tensor is the key of its array.

    Attributes
    ----------
    zarr : int
        2 or 3.
    kvstore : str
        ``"file"`` or ``"ocdbt"``.
    options : dict
        The options of the save that were not the default.
    """

    zarr: Literal[2, 3]
    kvstore: KvStore
    options: dict[str, Any]


class ArraysReader(Reader):
    """Base of readers whose tensors are arrays of TensorStore.

    The directory is held open by a descriptor: if the checkpoint is replaced while it is read, its old content is
    read, or a StoreError is raised.
    """

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        self.path = path
        self._budget = settings.pool.budget
        read_directory(path, self._open)

    @abstractmethod
    def _open(self, directory: Directory) -> None:
        """Read the metadata of the directory, and call `_open_arrays` and `_set_state`."""

    def _open_arrays(
        self, held: Directory, directory: ArrayDirectory, known: Mapping[str, KnownArray], *, fill_missing: bool
    ) -> dict[str, StoredLeaf]:
        """Open arrays and return their tensors."""
        self._held = held
        self._set = ArraySet(directory, known, budget=self._budget, fill_missing=fill_missing)
        checksums = {checksum_of(array.metadata) for array in self._set.arrays.values()}
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
            for name, array in self._set.arrays.items()
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        try:
            self._set.read(name, start, stop, out)
        except CorruptCheckpointError as error:
            if self._held.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        return self._set.block_bytes(name)

    def close(self) -> None:
        self._held.close()


class TensorStoreReader(ArraysReader):
    """An open directory of TensorStore arrays.

    With a sidecar, the arrays are the state that was saved, and a missing chunk is an error. Arrays of other programs
    are a dict of tensors by path, with dots for slashes; zarr defines a missing chunk as full of the fill value.
    """

    format = "tensorstore"

    def _open(self, directory: Directory) -> None:
        if sidecar.lies_in(Path(directory.fd_path), self.format):
            notes, arrays, known = read_own(directory)
            leaves = self._open_arrays(directory, arrays, known, fill_missing=False)
            self._set_state(notes.flat(leaves), self.path / sidecar.FILE_NAME, notes.leaf_specs)
            self.metadata = notes.metadata
            names = ("version", "writer", "zarr", "kvstore", "options")
            self.details = {name: getattr(notes, name) for name in names}
            return
        arrays, known = read_foreign(directory)
        leaves = self._open_arrays(directory, arrays, known, fill_missing=True)
        kinds = {name: "tensor" if leaf.dtype.has_torch else "ndarray" for name, leaf in leaves.items()}
        skeleton = {"dict": {name: {kind: name} for name, kind in kinds.items()}}
        self._set_state(Flat(skeleton, leaves, {}, {name: (DEFAULT_PART, name) for name in leaves}), self.path)
        self.metadata = {}
        self.details = {"kvstore": arrays.kvstore, "missing_chunks": "are read as the fill value"}


def read_own(directory: Directory) -> tuple[TensorStoreSidecar, ArrayDirectory, dict[str, KnownArray]]:
    """Return the sidecar of a directory, and its arrays, after checking both and the files of the arrays.

    Raises
    ------
    CorruptCheckpointError, UnsupportedError, StoreError
        As `sidecar.read`; and if an array's metadata is missing or changed, or its files contain a link.
    """
    notes = sidecar.read(directory, "tensorstore", TensorStoreSidecar)
    arrays = ArrayDirectory(directory.path, f"{directory.fd_path}/", notes.kvstore)
    keys = {name: "".join(note.place) for name, note in notes.tensors.items()}
    if len({key.casefold() for key in keys.values()}) != len(keys):
        raise CorruptCheckpointError("two tensors have the same array", path=directory.path / sidecar.FILE_NAME)
    known = {name: _known_array(name, note, notes, directory.path) for name, note in notes.tensors.items()}
    if notes.kvstore == "file":
        sizes = {name: sum(list_array(arrays, key).values()) for name, key in keys.items()}
        known = {name: KnownArray(a.key, a.zarr, sizes[name], a.types, a.shape) for name, a in known.items()}
    else:
        list_array(arrays, "")
    _check_metadata(notes, arrays, keys)
    return notes, arrays, known


def _known_array(name: str, note: TensorNote, notes: TensorStoreSidecar, path: Path) -> KnownArray:
    types = StoredType(note.state_dtype, note.file_dtype)
    key = "".join(note.place)
    if not types.is_valid or not is_key(key) or len(note.shape) > _MAX_DIMENSIONS:
        raise CorruptCheckpointError(
            f"an array {key!r} of {note.stored_dtype or note.dtype} and {len(note.shape)} dimensions is impossible",
            path=path / sidecar.FILE_NAME,
            name=name,
        )
    return KnownArray(key, notes.zarr, note.stored_bytes, types, note.shape)


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
            result = future.result()
        path = directory.path / keys[name] / file
        if result.state == "missing":
            raise CorruptCheckpointError("the array's metadata is missing", path=path, name=name)
        if sealed.digest(result.value) != notes.tensors[name].xxh3_64:
            raise CorruptCheckpointError("the array's metadata has changed since the save", path=path, name=name)


def read_foreign(directory: Directory) -> tuple[ArrayDirectory, dict[str, KnownArray]]:
    """Return the arrays of a directory without a sidecar by name: the key with dots for slashes.

    Raises
    ------
    CorruptCheckpointError
        If Tensorkeep wrote it, so that the sidecar is missing.
    NotACheckpointError, UnsupportedError, StoreError
        As `find_arrays`; and if two arrays would have the same name.
    """
    root = Path(directory.fd_path)
    arrays = ArrayDirectory(directory.path, f"{root}/", "ocdbt" if is_database(root) else "file")
    if has_mark(arrays):
        raise CorruptCheckpointError(
            "is missing or damaged; without it the state of the arrays is unknown",
            path=directory.path / sidecar.FILE_NAME,
            remedy="take another checkpoint or copy; the arrays themselves can be read with TensorStore or zarr",
        )
    known: dict[str, KnownArray] = {}
    for key, found in find_arrays(arrays).items():
        # If the directory itself is one array, its name is the only one.
        name = key.replace("/", ".") or directory.path.absolute().name or "array"
        if name in known:
            raise UnsupportedError(f"holds two arrays with the name {name!r}", path=directory.path, name=name)
        known[name] = KnownArray(key, found.zarr, found.stored_bytes)
    return arrays, known
