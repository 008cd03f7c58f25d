"""Reading the files of ``torch.save`` without executing their pickles.

Tensors are mapped, and read when they are asked for. Torch writes a CRC-32 of every storage and never checks it; here
it is checked before the first byte of a storage is returned. Of an object in a store, the pickle and the zip directory
are fetched at once, a storage when it is first read. Files of torch before version 1.6 have no checksums, and no
alignment: their tensors cannot be used where they are mapped.
"""

import os
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StoreError
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import FetchedFile, FetchedParts
from tensorkeep.formats.probe import file_mode
from tensorkeep.formats.torch_file.old_file import OldFile
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values, load_untrusted
from tensorkeep.formats.torch_file.zip_file import TorchZip, begins_like_old_pickle
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects.store_directory import StoreFile
from tensorkeep.io.places import open_file
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import Flat, flatten
from tensorkeep.units import counted


class TorchReader(Reader):
    """An open ``torch.save`` file.

    Reading a tensor first checks the CRC-32 of its storage, once. The file is opened once, so that a checkpoint which
    is replaced meanwhile is read to the end as it was. What is fetched of an object is counted in ``parts``, if given.
    """

    format = "torch"

    def __init__(self, path: Path, settings: OpenSettings, parts: FetchedParts | None = None) -> None:
        import torch

        self.path = path
        self.metadata = {}
        mode = file_mode(path)
        if mode and not stat.S_ISREG(mode):
            raise NotACheckpointError("is not a regular file, as torch.save writes", path=path)
        self._fetched: FetchedFile | None = None
        with ExitStack() as stack:
            source = stack.enter_context(open_file(path))
            if isinstance(source, StoreFile):
                self._fetched = stack.enter_context(FetchedFile(source, parts or FetchedParts(settings.pool.budget)))
                place = self._fetched.fd_path
                file = cast(BinaryIO, stack.enter_context(self._fetched.stream()))
            else:
                # By its descriptor: its path may be that of another file by now.
                place = source.fd_path
                file = stack.enter_context(open(place, "rb"))
            self._is_old = begins_like_old_pickle(file.read(2))
            size = source.size
            archive: OldFile | TorchZip
            if self._is_old:
                archive = OldFile(file, size, path)
            else:
                archive = TorchZip(file, size, path)
                if archive.is_compressed:
                    file = stack.enter_context(archive.unpacked(file))
                    self._fetched, place, size = None, f"/proc/self/fd/{file.fileno()}", file.seek(0, os.SEEK_END)
                    archive = TorchZip(file, size, path)
            if self._fetched is not None:
                # The data of a record begins behind its local header.
                self._fetched.prefetch(archive.local_headers())
            whole = torch.UntypedStorage.from_file(place, False, size)
            found = load_untrusted(whole, archive, path, settings.allow)
            address = None if self._fetched is None else self._fetched.mapped_at()
        self.refusal = found.refusal
        with decoding(path):
            count_values(found.state, SHARED_VALUES + 4 * archive.pickle_bytes)
            flat = flatten(found.state, placeholders=True)
        self._leaves = dict(flat.leaves)
        self._checks = settings.verify and archive.checksummed
        self._storages = _storages(self._leaves, archive, size, path)
        if self._fetched is not None:
            for storage in set(self._storages.values()):
                storage.fetch_from(self._fetched, address)
        leaves = {
            name: StoredLeaf(self, name, leaf.dtype, leaf.shape, stored_bytes=self._own_bytes(name), file=path.name)
            for name, leaf in self._leaves.items()
        }
        self._set_state(Flat(flat.skeleton, leaves, flat.aliases, flat.parts), path)
        self.verifiable = "CRC-32 of every record" if archive.checksummed else None
        if archive.is_script:
            self.verifiable = "CRC-32 of every tensor"
        unwritten = "not known before torch 1.6" if self._is_old else "not written (set_crc32_options(False))"
        self._unread: list[str] = []
        if isinstance(archive, TorchZip) and archive.checksummed:
            self._unread = [key for key in archive.storage_keys() if key not in found.storages]
        self._archive = archive
        self._whole: Any = whole
        self.details = {
            "crc32": "written" if archive.checksummed else unwritten,
            "pickle_bytes": archive.pickle_bytes,
            "files": {path.name: source.size},
        }
        if archive.is_script:
            self.details["torchscript"] = f"code, and {found.others} values that are no tensors, are not read"
        if archive.constants:
            self.notes = [f"its code has {counted(archive.constants, 'tensor')} without a name: not read"]
        if found.attributes:
            self.details["attributes_left_out"] = found.attributes

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
        # The file is mapped privately.
        return None if self._is_old else self._leaves[name].host_bytes()

    def audit(self) -> Iterator[Problem]:
        """Check the storages that no tensor of the state uses: those of placeholders."""
        import torch

        if not self._unread:
            return
        assert isinstance(self._archive, TorchZip)
        content = torch.empty(0, dtype=torch.uint8).set_(self._whole).numpy()
        for key in self._unread:
            start, info = self._archive.storage_at(key, content), self._archive.records[f"data/{key}"]
            stop = start + info.file_size
            with nullcontext() if self._fetched is None else self._fetched.needed(start, stop):
                is_sound = stop <= len(content) and zlib.crc32(content[start:stop]) == info.CRC
            if not is_sound:
                yield Problem(f"the CRC-32 of the storage {key}, which no tensor of the state uses, is wrong")

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
        self._unread = []
        self._whole = None


def _storages(leaves: dict[str, Leaf], archive: TorchZip | OldFile, size: int, path: Path) -> "dict[str, _Storage]":
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

    def __init__(self, leaf: Leaf, archive: TorchZip | OldFile, path: Path) -> None:
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
