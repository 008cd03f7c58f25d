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

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import FetchedFile, FetchedParts
from tensorkeep.formats.model_folder import (
    Index,
    is_index,
    notes_on_folder,
    open_shard,
    read_index,
    standard_weights,
    unused_files,
)
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, OldFile, count_values, load_untrusted
from tensorkeep.formats.torch_file.zip_file import TorchZip, begins_like_old_pickle
from tensorkeep.state.aliases import Alias
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat, flatten
from tensorkeep.storage import file_mode, first_bytes, names_in, open_file, read_directory
from tensorkeep.storage.base import Directory
from tensorkeep.storage.direct_io import Bytes
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
            if source.ranges_are_requests:
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


# Reading the files of ``torch.save`` in a folder of weights: ``pytorch_model.bin``, or several files with an index.

_SUFFIX = ".bin"


def locate(path: Path) -> Path | None:
    """Return the file or the index of a folder's torch weights, from names alone; an index stands for itself."""
    mode = file_mode(path)
    if stat.S_ISREG(mode):
        return path if is_index(path.name, _SUFFIX) and first_bytes(path, 1) is not None else None
    if not stat.S_ISDIR(mode):
        return None
    names = names_in(path)
    standard = standard_weights(path, names)
    if standard is not None:
        return path / standard if standard.startswith("pytorch_model.") else None
    indexes = [name for name in names if is_index(name, ".safetensors") or is_index(name, _SUFFIX)]
    is_one = len(indexes) == 1 and is_index(indexes[0], _SUFFIX) and stat.S_ISREG(file_mode(path / indexes[0]))
    return path / indexes[0] if is_one else None


class TorchFolderReader(Reader):
    """The open ``torch.save`` files of one state dict, of whose entries each file has some."""

    format = "torch"

    def __init__(self, path: Path, place: Path, settings: OpenSettings) -> None:
        self.path = path
        self.metadata = {}
        self._parts = FetchedParts(settings.pool.budget)
        index = read_directory(place.parent, lambda directory: self._open(directory, place, settings))
        first = self._files[0]
        if index is None:
            self._set_state(first.flat, first.path, first.leaf_specs)
        else:
            self._set_state(self._merged(index), place)
            self.notes = [*index.notes(self.flat)]
        self.refusal = next((file.refusal for file in self._files if file.refusal is not None), None)
        self._homes = {name: file for file in self._files for name in file.flat.leaves}
        self.verifiable = first.verifiable if all(file.verifiable for file in self._files) else None
        self.details = {
            "crc32": first.details["crc32"] if self.verifiable else "not written in some of the files",
            "pickle_bytes": sum(file.details["pickle_bytes"] for file in self._files),
            "files": {file.path.name: file.details["files"][file.path.name] for file in self._files},
        }
        left_out = dict.fromkeys(each for file in self._files for each in file.details.get("attributes_left_out", ()))
        if left_out:
            self.details["attributes_left_out"] = [*left_out]
        if script := first.details.get("torchscript"):
            self.details["torchscript"] = script
        self.notes = [*self.notes, *(note for file in self._files for note in file.notes)]
        if stat.S_ISDIR(file_mode(path)):
            unused = unused_files(path, {*self.details["files"], place.name})
            if unused:
                self.details["unused_files"] = unused
            self.notes = [*self.notes, *notes_on_folder(path, unused)]

    def _open(self, directory: Directory, place: Path, settings: OpenSettings) -> Index | None:
        """Open the files, and return the index if there is one."""
        index = read_index(directory, place) if is_index(place.name, _SUFFIX) else None
        wanted = {place.name: ""} if index is None else index.keys_by_file()
        for name, key in wanted.items():
            # A missing file is reported as missing from the index.
            open_shard(directory, name, key, len(wanted)).close()
        self._files = [TorchReader(directory.path_of(name), settings, self._parts) for name in wanted]
        directory.close()
        return index

    def _merged(self, index: Index) -> Flat[StoredLeaf]:
        """Return the entries of all files as one dict, in the order of the index."""
        merged: dict[str, Any] = {}
        entries: dict[str, Any] = {}
        leaves: dict[str, StoredLeaf] = {}
        aliases: dict[str, Alias] = {}
        contents: list[tuple[Path, dict[str, Any]]] = []
        for file in self._files:
            skeleton: Any = file.flat.skeleton
            kind = next((kind for kind in ("dict", "ordered") if isinstance(skeleton, dict) and kind in skeleton), None)
            if kind is None:
                raise UnsupportedError("is not a dict of tensors, as each file of an index is", path=file.path)
            contents.append((file.path, skeleton[kind]))
            entries |= skeleton[kind]
            # An OrderedDict may have the metadata of its modules, too.
            merged = merged or {**skeleton, kind: entries}
            leaves |= file.flat.leaves
            aliases |= file.flat.aliases
        index.check(contents)
        ordered = {key: entries[key] for key in index.files}
        skeleton = {key: ordered if node is entries else node for key, node in merged.items()}
        return Flat(skeleton, leaves, aliases, {name: (DEFAULT_PART, name) for name in [*leaves, *aliases]})

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._homes[name].read(name, start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        return self._homes[name].mapped(name)

    def audit(self) -> Iterator[Problem]:
        for file in self._files:
            yield from file.audit()

    def bytes_to_check(self, name: str) -> int:
        return self._homes[name].bytes_to_check(name)

    def close(self) -> None:
        for file in self._files:
            file.close()
