"""Reading the files of ``torch.save`` through torch's restricted unpickler.

Nothing is ever unpickled without ``weights_only=True``. Tensors are mapped, and read when they are asked for. Torch
writes a CRC-32 of every storage and never checks it; here it is checked before the first byte of a storage is returned.
Of an object in a store, the pickle and the zip directory are fetched at once, a storage when it is first read.
"""

import stat
import threading
import zlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO, cast

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import FetchedFile, FetchedParts
from tensorkeep.formats.probe import file_mode
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values, load_untrusted
from tensorkeep.formats.torch_file.zip_file import TorchZip, begins_like_old_pickle
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects.store_directory import StoreFile
from tensorkeep.io.places import open_file
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
        mode = file_mode(path)
        if mode and not stat.S_ISREG(mode):
            raise NotACheckpointError("is not a regular file, as torch.save writes", path=path)
        self._fetched: FetchedFile | None = None
        with ExitStack() as stack:
            source = stack.enter_context(open_file(path))
            if isinstance(source, StoreFile):
                self._fetched = stack.enter_context(FetchedFile(source, FetchedParts(settings.pool.budget)))
                place = self._fetched.fd_path
                file = cast(BinaryIO, stack.enter_context(self._fetched.stream()))
            else:
                # By its descriptor: its path may be that of another file by now.
                place = source.fd_path
                file = stack.enter_context(open(place, "rb"))
            if begins_like_old_pickle(file.read(2)):
                raise UnsupportedError(
                    "is a bare Python pickle, as torch.save wrote before version 1.6; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it and save it again with torch 1.6 or later",
                )
            archive = TorchZip(file, source.size, path)
            if self._fetched is not None:
                # Torch reads the local header of each record, to find its data.
                self._fetched.prefetch(archive.local_headers())
            state = load_untrusted(place, archive, path, settings.allow)
            address = None if self._fetched is None else self._fetched.mapped_at()
        with decoding(path):
            count_values(state, SHARED_VALUES + 4 * archive.pickle_bytes)
            flat = flatten(state)
        self._leaves = dict(flat.leaves)
        self._checks = settings.verify and archive.checksummed
        self._storages = _storages(self._leaves, archive, source.size, path)
        if self._fetched is not None:
            for storage in set(self._storages.values()):
                storage.fetch_from(self._fetched, address)
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
        storage = self._storages.get(name) if leaf.nbytes else None
        if storage is None:
            leaf.read(start, stop, out)
            return
        if self._checks:
            storage.check()
        with storage.needed(leaf, start, stop):
            leaf.read(start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        if self._fetched is not None:
            self._fetched.source.map_private()  # raises
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
        self._fetched = None


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
        self._file: FetchedFile | None = None

    def fetch_from(self, file: FetchedFile, address: int | None) -> None:
        """Fetch the storage, which is memory of a file at an address, when it is needed."""
        if self.nbytes:
            if address is None:
                raise StoreError("cannot be found in memory", path=file.path, remedy="copy it to a disk first")
            self._file = file
            self._address = address
            self._start = int(self._leaf.array.untyped_storage().data_ptr()) - address

    def needed(self, leaf: Leaf, start: int, stop: int) -> AbstractContextManager[None]:
        """Use a range of a leaf's bytes in a block; of the full storage if the bytes are not in their order there."""
        host = None if self._file is None else leaf.host_bytes()
        if self._file is None or host is None:
            return self._all_needed()
        first = host.ctypes.data - self._address
        return self._file.needed(first + start, first + stop)

    def _all_needed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._file is None else self._file.needed(self._start, self._start + self.nbytes)

    def check(self) -> None:
        """Check the CRC-32 once; CorruptCheckpointError if it is wrong."""
        if self._sound is None:
            # Outside the lock: threads that wait for it share the requests of a storage.
            with self._all_needed():
                self._compute()
        if not self._sound:
            raise CorruptCheckpointError(
                "the CRC-32 of its storage is wrong",
                path=self._path,
                name=self._leaf.name,
                remedy="the stored bytes have changed since the save: take another checkpoint or copy",
            )

    def _compute(self) -> None:
        import torch

        with self._lock:
            if self._sound is None:
                # The mapped memory itself is checked, not the record that the zip directory lists.
                content = torch.empty(0, dtype=torch.uint8).set_(self._leaf.array.untyped_storage()).numpy()
                self._sound = (len(content), zlib.crc32(content)) in self._known
