"""The files of ``torch.save``: read through torch's restricted unpickler, written by torch itself.

Nothing is ever unpickled without ``weights_only=True``. Tensors are mapped, not read, until they are asked for. Torch
writes a CRC-32 of every storage and does not check it; here it is checked before the first byte of one is handed out.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

from tensorkeep.errors import (
    CorruptCheckpointError,
    UnsupportedError,
)
from tensorkeep.formats.base import Format, OpenSettings, Reader, StoredLeaf, WriteResult, WriteSettings
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.torch_file.stream import crc32
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values, load_untrusted
from tensorkeep.formats.torch_file.writer import write
from tensorkeep.formats.torch_file.zip_file import (
    TorchZip,
    begins_like_old_pickle,
    is_old_pickle,
    is_torch_zip,
    open_file,
)
from tensorkeep.io.files import Bytes
from tensorkeep.state.leaf import Leaf, Source
from tensorkeep.state.tree import Flat, flatten


class TorchFormat(Format):
    """See `tensorkeep.formats.base.Format`; there are no options, no compression and no metadata.

    What can be written is what ``torch.load(weights_only=True)`` reads back: tensors, parameters, dicts, lists, tuples,
    sets and plain scalars, but no numpy arrays, named tuples, dataclasses, enums, ranges or frozensets. Writing from
    another checkpoint holds the whole state in memory, because ``torch.save`` does.
    """

    name = "torch"

    def recognises(self, path: Path) -> bool:
        return is_torch_zip(path) or is_old_pickle(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return TorchReader(path, settings)

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings, replaceable=self.recognises)


class TorchReader(Reader):
    """An open ``torch.save`` file.

    Its tensors are mapped. Reading one checks the CRC-32 of its whole storage first, once. The file is opened once, so
    that a checkpoint which is replaced meanwhile is read to the end as it was.
    """

    format = "torch"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self.metadata = {}
        with open_file(path) as file:
            _refuse_old_pickle(file, path)
            size = os.fstat(file.fileno()).st_size
            archive = TorchZip(file, size, path)
            # By its descriptor: its path may be another file's by now.
            state = load_untrusted(f"/proc/self/fd/{file.fileno()}", archive, path)
        with decoding(path):
            count_values(state, SHARED_VALUES + 4 * archive.pickle_bytes)
            flat = flatten(state)
        self._leaves = dict(flat.leaves)
        self._checks = settings.verify and archive.checksummed
        self._storages = _storages(self._leaves, archive, size, path)
        leaves = {
            name: StoredLeaf(self, name, leaf.dtype, leaf.shape, stored_bytes=self._own_bytes(name), file=path.name)
            for name, leaf in self._leaves.items()
        }
        self._set_state(Flat(flat.skeleton, leaves, flat.aliases, flat.parts), path)
        self.verifiable = "CRC-32 of every record" if archive.checksummed else None
        self.details = {
            "crc32": "written" if archive.checksummed else "not written: torch was told not to",
            "pickle_bytes": archive.pickle_bytes,
            "files": {path.name: size},
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        leaf = self._leaves[name]
        if self._checks and leaf.nbytes:
            self._storages[name].check()
        leaf.read(start, stop, out)

    def bytes_to_check(self, name: str) -> int:
        # An expanded tensor may be larger than any file, and every read checks the whole storage.
        leaf = self._leaves[name]
        return min(leaf.nbytes, self._own_bytes(name) // leaf.dtype.itemsize * leaf.dtype.itemsize)

    def _own_bytes(self, name: str) -> int:
        """Return the bytes of a leaf's storage, which count for the first leaf that lies in it."""
        storage = self._storages[name]
        return storage.nbytes if storage.name == name else 0

    def close(self) -> None:
        self._leaves = {}
        self._storages = {}


def _storages(leaves: dict[str, Leaf], archive: TorchZip, size: int, path: Path) -> dict[str, _Storage]:
    """Return the storage of each leaf, by its name."""
    found: dict[tuple[int, int], _Storage] = {}
    storages = {}
    for name, leaf in leaves.items():
        content = leaf.array.untyped_storage()
        place = content.data_ptr(), content.nbytes()
        storage = _Storage(leaf, archive, path)
        # An empty leaf is never read, so that nothing would be checked in its name.
        storages[name] = found.setdefault(place, storage) if leaf.nbytes else storage
    total = sum(storage.nbytes for storage in found.values())
    if total > size:
        raise CorruptCheckpointError(f"its storages claim {total:,} bytes, the file has {size:,}", path=path)
    return storages


class _Storage:
    """The storage of a leaf: checked once, by the first thread that reads from it."""

    def __init__(self, leaf: Leaf, archive: TorchZip, path: Path) -> None:
        self.name = leaf.name
        self.nbytes = int(leaf.array.untyped_storage().nbytes()) if leaf.nbytes else 0
        self._leaf = leaf
        self._known = archive.storages
        self._path = path
        self._sound: bool | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        with self._lock:
            if self._sound is None:
                self._sound = self._has_known_checksum()
        if not self._sound:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong",
                path=self._path,
                name=self._leaf.name,
                remedy="the bytes on disk are not what was saved: take another checkpoint or copy",
            )

    def _has_known_checksum(self) -> bool:
        import torch

        # What is checked is the mapped memory itself, so that there is no second way to find a record to be wrong in.
        content = torch.empty(0, dtype=torch.uint8).set_(self._leaf.array.untyped_storage()).numpy()
        return (len(content), crc32(content)) in self._known


def _refuse_old_pickle(file: BinaryIO, path: Path) -> None:
    start = file.read(2)
    if begins_like_old_pickle(start):
        raise UnsupportedError(
            "is a bare Python pickle, as torch.save wrote before version 1.6; loading it could run any code",
            path=path,
            remedy="where you trust it, load it and save it again with torch 1.6 or later",
        )


FORMAT = TorchFormat()
