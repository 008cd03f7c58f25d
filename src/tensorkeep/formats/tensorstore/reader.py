"""Reading directories of TensorStore's arrays, ours and others', trusting nothing in them."""

from __future__ import annotations

from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, StoreError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.tensorstore import sidecar as sidecars
from tensorkeep.formats.tensorstore.compressors import check_of, codec_of
from tensorkeep.formats.tensorstore.failures import tensorstore
from tensorkeep.formats.tensorstore.opened import ArraySet
from tensorkeep.formats.tensorstore.places import foreign_arrays, own_arrays
from tensorkeep.formats.tensorstore.saving import as_details
from tensorkeep.formats.tensorstore.walking import files_below
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import DType
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat


class TensorStoreReader(Reader):
    """An open directory of TensorStore's arrays.

    With our own file beside them, the arrays are the state that was saved, and a chunk that is lost is an error.
    Others' arrays are a dict of tensors under their paths, with dots for slashes; in them zarr takes a chunk that is
    not there for one full of the fill value. The directory is held, so that a checkpoint that is replaced meanwhile is
    read as it was, or not at all.
    """

    format = "tensorstore"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        self.path = path
        read_directory(path, lambda directory: self._open(directory, settings))

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self._directory = directory
        # By its descriptor: its path may be another directory's by now.
        root = f"{directory.fd_path}/"
        budget = settings.pool.budget
        if sidecars.is_ours(Path(root)):
            found, self._place, wanted = own_arrays(directory, root)
            self._set = ArraySet(self.path, self._place, wanted, budget=budget, fill_missing=False)
            self.metadata = found.metadata
            self.details = as_details(found)
            sizes = {name: record.stored_bytes for name, record in found.arrays.items()}
            self._set_state(found.structure.flat(self._leaves(sizes)), self.path / sidecars.FILE_NAME)
        else:
            self._place, wanted = foreign_arrays(self.path, root)
            self._set = ArraySet(self.path, self._place, wanted, budget=budget, fill_missing=True)
            self.metadata = {}
            self.details = {"kvstore": self._place.kvstore, "missing_chunks": "are read as the fill value"}
            sizes = {
                name: sum(files_below(Path(root, array.key), self.path / array.key).values())
                if self._place.kvstore == "file"
                else 0
                for name, array in self._set.arrays.items()
            }
            self._set_state(_flat_of_foreign(self._leaves(sizes)), self.path)
        checks = {check_of(array.metadata) for array in self._set.arrays.values()}
        self.verifiable = checks.pop() if len(checks) == 1 else None

    def _leaves(self, sizes: dict[str, int]) -> dict[str, StoredLeaf]:
        return {
            name: StoredLeaf(
                self,
                name,
                array.types.dtype,
                array.shape,
                stored_bytes=sizes[name],
                codec=codec_of(array.metadata),
                file=array.key or ".",
            )
            for name, array in self._set.arrays.items()
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        try:
            self._set.read(name, start, stop, out)
        except CorruptCheckpointError as error:
            if self._directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        return self._set.block_bytes(name)

    def close(self) -> None:
        self._directory.close()


def _flat_of_foreign(leaves: dict[str, StoredLeaf]) -> Flat[StoredLeaf]:
    skeleton = {"dict": {name: {_kind(leaf.dtype): name} for name, leaf in leaves.items()}}
    return Flat(skeleton, leaves, {}, {name: (DEFAULT_PART, name) for name in leaves})


def _kind(dtype: DType) -> str:
    return "tensor" if dtype.has_torch else "ndarray"
