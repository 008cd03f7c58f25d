"""Reading the files of ``torch.save`` through torch's restricted unpickler.

Nothing is ever unpickled without ``weights_only=True``. Tensors are mapped, and read when they are asked for. Torch
writes a CRC-32 of every storage and never checks it; here it is checked before the first byte of a storage is returned.
"""

import stat
import threading
import zlib
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.probe import file_mode
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values, load_untrusted
from tensorkeep.formats.torch_file.zip_file import TorchZip, begins_like_old_pickle
from tensorkeep.io.files import Bytes
from tensorkeep.io.source_file import SourceFile
from tensorkeep.paths import StorePath
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import Flat, flatten


class TorchReader(Reader):
    """An open ``torch.save`` file.

    Reading a tensor first checks the CRC-32 of its storage, once. The file is opened once, so that a checkpoint which
    is replaced meanwhile is read to the end as it was.
    """

    format = "torch"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self.metadata = {}
        if isinstance(path, StorePath):
            raise UnsupportedError(
                "files of torch.save are not read from object stores yet", path=path, remedy="copy it to a disk first"
            )
        mode = file_mode(path)
        if mode and not stat.S_ISREG(mode):
            raise NotACheckpointError("is not a regular file, as torch.save writes", path=path)
        with SourceFile(path) as source, open(source.fd_path, "rb") as file:
            if begins_like_old_pickle(file.read(2)):
                raise UnsupportedError(
                    "is a bare Python pickle, as torch.save wrote before version 1.6; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it and save it again with torch 1.6 or later",
                )
            archive = TorchZip(file, source.size, path)
            # By its descriptor: its path may be that of another file by now.
            state = load_untrusted(source.fd_path, archive, path, settings.allow)
        with decoding(path):
            count_values(state, SHARED_VALUES + 4 * archive.pickle_bytes)
            flat = flatten(state)
        self._leaves = dict(flat.leaves)
        self._checks = settings.verify and archive.checksummed
        self._storages = _storages(self._leaves, archive, source.size, path)
        leaves = {
            name: StoredLeaf(self, name, leaf.dtype, leaf.shape, stored_bytes=self._own_bytes(name), file=path.name)
            for name, leaf in self._leaves.items()
        }
        self._set_state(Flat(flat.skeleton, leaves, flat.aliases, flat.parts), path)
        self.verifiable = "CRC-32 of every record" if archive.checksummed else None
        self.details = {
            "crc32": "written" if archive.checksummed else "not written (set_crc32_options(False))",
            "pickle_bytes": archive.pickle_bytes,
            "files": {path.name: source.size},
        }

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        leaf = self._leaves[name]
        if self._checks and leaf.nbytes and name in self._storages:
            self._storages[name].check()
        leaf.read(start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        # The restricted unpickler maps the file privately.
        return self._leaves[name].host_bytes()

    def bytes_to_check(self, name: str) -> int:
        # An expanded tensor may be larger than any file, and every read checks the full storage.
        leaf = self._leaves[name]
        return min(leaf.nbytes, self._own_bytes(name) // leaf.dtype.itemsize * leaf.dtype.itemsize)

    def _own_bytes(self, name: str) -> int:
        """Return the bytes of a leaf's storage, which count for the first leaf in it; an array is in the pickle."""
        if name not in self._storages:
            return self._leaves[name].nbytes
        storage = self._storages[name]
        return storage.nbytes if storage.name == name else 0

    def close(self) -> None:
        self._leaves = {}
        self._storages = {}


def _storages(leaves: dict[str, Leaf], archive: TorchZip, size: int, path: Path) -> "dict[str, _Storage]":
    """Return the storage of each tensor, by its name; arrays of numpy have none, they are in the pickle."""
    found: dict[tuple[int, int], _Storage] = {}
    storages = {}
    for name, leaf in leaves.items():
        if not leaf.is_torch:
            continue
        content = leaf.array.untyped_storage()
        place = content.data_ptr(), content.nbytes()
        storage = _Storage(leaf, archive, path)
        # An empty leaf is never read, so it would never check the storage.
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
        import torch

        with self._lock:
            if self._sound is None:
                # The mapped memory itself is checked, not the record that the zip directory lists.
                content = torch.empty(0, dtype=torch.uint8).set_(self._leaf.array.untyped_storage()).numpy()
                self._sound = (len(content), zlib.crc32(content)) in self._known
        if not self._sound:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong",
                path=self._path,
                name=self._leaf.name,
                remedy="the stored bytes have changed since the save: take another checkpoint or copy",
            )
