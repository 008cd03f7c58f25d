"""Reading T5X checkpoints, trusting nothing in them."""

from __future__ import annotations

import re
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.t5x.contents import look
from tensorkeep.formats.t5x.tree import FILE_NAME
from tensorkeep.formats.tensorstore.compressors import check_of, codec_of
from tensorkeep.formats.tensorstore.failures import tensorstore
from tensorkeep.formats.tensorstore.opened import ArraySet
from tensorkeep.formats.tensorstore.specs import Place
from tensorkeep.formats.tensorstore.walking import check_folders, files_below
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes


class T5XReader(Reader):
    """An open T5X checkpoint.

    What Tensorkeep wrote is the state that was saved, and a chunk that is lost is an error. Others' checkpoints are the
    dicts under ``optimizer`` (``target``, ``state``); in them zarr takes a chunk that is not there for one of zeros.
    """

    format = "t5x"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        tensorstore()
        refuse_unfinished(path)
        self.path = path
        read_directory(path, lambda directory: self._open(directory, settings))

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self._directory = directory
        # By its descriptor: its path may be another directory's by now.
        self._root = f"{directory.fd_path}/"
        contents = look(directory)
        check_folders(self._root, (wanted.key for wanted in contents.wanted.values()), self.path)
        self._inline = contents.inline
        own = contents.notes is not None
        self._set = ArraySet(
            self.path,
            Place(self._root),
            contents.wanted,
            budget=settings.pool.budget,
            fill_missing=not own,
        )
        leaves: dict[str, StoredLeaf] = {}
        for name, array in self._set.arrays.items():
            if not array.types.dtype.has_torch and not own:
                raise UnsupportedError(f"torch has no dtype {array.types.dtype}", path=self.path, name=name)
            stored_bytes = sum(files_below(Path(self._root, array.key), self.path / array.key).values())
            codec = codec_of(array.metadata)
            leaves[name] = StoredLeaf(
                self, name, array.types.dtype, array.shape, stored_bytes=stored_bytes, codec=codec, file=array.key
            )
        for name, stored in self._inline.items():
            size = 0 if stored.content is None else len(stored.content)
            leaves[name] = StoredLeaf(self, name, stored.dtype, stored.shape, stored_bytes=size, file=FILE_NAME)
        notes = contents.notes
        description = self.path / (sidecar.FILE_NAME if notes is not None else FILE_NAME)
        self._set_state(contents.flat(leaves), description, None if notes is None else notes.leaf_specs)
        self.metadata = notes.metadata if notes is not None else {}
        checks = {check_of(array.metadata) for array in self._set.arrays.values()}
        self.verifiable = checks.pop() if len(checks) == 1 else None
        self.details = {
            "t5x_version": contents.version,
            "arrays": len(self._set.arrays),
            "missing_chunks": "are errors" if own else "are read as zeros",
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        stored = self._inline.get(name)
        if stored is not None:
            if stored.content is not None:
                out[:] = stored.content[start:stop]
            return
        try:
            self._set.read(name, start, stop, out)
        except CorruptCheckpointError as error:
            if self._directory.was_replaced():
                raise StoreError(
                    "the checkpoint was replaced while it was read", path=self.path, remedy="read it again"
                ) from error
            raise

    def block_bytes(self, name: str) -> int:
        return super().block_bytes(name) if name in self._inline else self._set.block_bytes(name)

    def close(self) -> None:
        self._directory.close()


def refuse_unfinished(path: Path) -> None:
    """Refuse a directory that T5X was still writing.

    Raises
    ------
    NotACheckpointError
    """
    if re.search(r"\.tmp-\d+$", path.name):
        raise NotACheckpointError(
            "was never finished: T5X writes under such a name and renames what is complete",
            path=path,
            remedy="take an earlier step",
        )
