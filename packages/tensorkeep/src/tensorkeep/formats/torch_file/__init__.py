"""The format ``torch``: files of ``torch.save``, read without executing their pickles and written by torch.

Files are read as mapped memory: single files, and folders with one or with an index of several.
"""

import stat
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError, UsageError
from tensorkeep.formats import model_folder
from tensorkeep.formats.base import Format, OpenSettings, Problem, Reader, StoredLeaf, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, SUFFIX
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.mapped_file import FetchedFile, FetchedParts, MappedFile, map_file
from tensorkeep.formats.torch_file.archive import (
    Archive,
    OldFile,
    StorageCheck,
    TorchZip,
    begins_like_pickle,
    is_torch_file,
)
from tensorkeep.formats.torch_file.unpickle import SHARED_VALUES, count_values, load_untrusted
from tensorkeep.formats.torch_file.writer import write
from tensorkeep.state.aliases import Alias
from tensorkeep.state.leaf import Bytes, Source
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.skeleton import ReplacingWriter
from tensorkeep.state.tree import Flat, flatten
from tensorkeep.storage import file_mode, first_bytes, names_in, open_file, read_directory
from tensorkeep.storage.base import Directory
from tensorkeep.units import counted

# Of the files in a folder.
_BIN = ".bin"


# Torch stores a CRC-32 of every storage and never checks it. Here it is checked before the first byte of a storage is
# returned. In an object store, the pickle and the zip directory are fetched on opening, and a storage on its first
# read.
class TorchReader(Reader):
    """An open ``torch.save`` file; ``parts`` limits the fetched memory of several files together."""

    format = "torch"

    def __init__(self, path: Path, settings: OpenSettings, parts: FetchedParts | None = None) -> None:
        self.path = path
        self.metadata = {}
        mode = file_mode(path)
        if mode and not stat.S_ISREG(mode):
            raise NotACheckpointError("is not a regular file, as torch.save writes", path=path)
        # Opened once: a checkpoint that is replaced meanwhile is read to the end as it was.
        with open_file(path) as source:
            file = map_file(source, parts or FetchedParts(settings.pool.budget))
            # Not through a mapping of a disk's file, because an I/O error would end the process.
            with file.stream() if source.ranges_are_requests else open(source.fd_path, "rb") as stream:
                self._is_old = begins_like_pickle(stream.read(2))
                # Old files begin with a pickle, and zip archives with "PK".
                archive: Archive = (OldFile if self._is_old else TorchZip)(stream, source.size, path)
                if isinstance(archive, TorchZip) and archive.is_compressed:
                    copy = archive.unpacked(stream)
                    file = MappedFile(path, np.frombuffer(copy.getbuffer(), np.uint8))
                    archive = TorchZip(copy, file.size, path)
        # Finding a storage reads its local header.
        with file.all_needed(archive.local_headers()), warnings.catch_warnings():
            # Torch warns about tensors of complex32.
            warnings.simplefilter("ignore", UserWarning)
            found = load_untrusted(file.content, archive, path, settings.allow)
        self._file = file
        self._archive = archive
        self.refusal = found.refusal
        with decoding(path):
            # Flattening visits containers as often as they are reached.
            count_values(found.state, SHARED_VALUES + 4 * archive.pickle_bytes)
            flat = flatten(found.state, ReplacingWriter())
        self._leaves = dict(flat.leaves)
        self._verify = settings.verify and archive.checksummed
        self._storages = self._find_storages()
        leaves = {
            name: StoredLeaf(self, name, leaf.dtype, leaf.shape, stored_bytes=self._own_bytes(name), file=path.name)
            for name, leaf in self._leaves.items()
        }
        self._set_state(Flat(flat.skeleton, leaves, flat.aliases, flat.parts), path)
        self._unread = [key for key in archive.storage_keys() if key not in found.storages]
        if archive.checksummed:
            self.verifiable = "CRC-32 of every tensor" if archive.is_script else "CRC-32 of every record"
        unwritten = "not known before torch 1.6" if self._is_old else "not written (set_crc32_options(False))"
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

    def _find_storages(self) -> dict[str, StorageCheck]:
        found: dict[tuple[int, int], StorageCheck] = {}
        storages = {}
        content = self._file.content
        for name, leaf in self._leaves.items():
            # An empty leaf is never read, so it cannot stand for a storage that must be checked.
            if not leaf.is_torch or not leaf.nbytes:
                continue
            storage = leaf.array.untyped_storage()
            start, nbytes = storage.data_ptr() - content.ctypes.data, storage.nbytes()
            # The elements of numpy arrays are in the pickle, even if a tensor has them.
            if not 0 <= start < self._file.size:
                continue
            # Views of one storage share its check, and its bytes count once.
            if (start, nbytes) not in found:
                found[start, nbytes] = StorageCheck(name, content[start : start + nbytes], self._archive.storages)
            storages[name] = found[start, nbytes]
        total = sum(nbytes for _, nbytes in found)
        # Storages that overlap would let a small file take any amount of memory.
        if total > self._file.size:
            raise CorruptCheckpointError(
                f"its storages claim {total:,} bytes, the file has {self._file.size:,}", path=self.path
            )
        return storages

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        leaf = self._leaves[name]
        storage = self._storages.get(name)
        if storage is None:
            leaf.read(start, stop, out)
            return
        # Every byte of the storage counts: torch has one CRC-32 per storage, and none per block.
        if self._verify:
            storage.run(self._file)
        host = leaf.host_bytes()
        # A leaf that is not contiguous may use any bytes of its storage.
        with self._file.needed_by(storage.content if host is None else host[start:stop]):
            leaf.read(start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        if isinstance(self._file, FetchedFile):
            self._file.source.map_private()  # raises UnsupportedError: an object has no mapping
        # Storages of old files are not aligned, so tensors cannot use them in place.
        return None if self._is_old else self._leaves[name].host_bytes()

    def audit(self) -> Iterator[Problem]:
        archive = self._archive
        if not isinstance(archive, TorchZip) or not archive.checksummed or not self._unread:
            return
        # No read checks the storages that only placeholders use.
        content = self._file.content
        for key in self._unread:
            name = f"data/{key}"
            try:
                start = archive.record_start(name, content)
                stop = start + archive.records[name].file_size
                with self._file.needed(start, stop):
                    differs = archive.crc_differs(name, content[start:stop])
            except ValueError:
                differs = True
            if differs:
                yield Problem(f"the CRC-32 of the storage {key}, which no tensor of the state uses, is wrong")

    def bytes_to_check(self, name: str) -> int:
        # A read of any byte checks the full storage. An expanded tensor may be larger than any file.
        leaf = self._leaves[name]
        return min(leaf.nbytes, self._own_bytes(name) // leaf.dtype.itemsize * leaf.dtype.itemsize)

    def _own_bytes(self, name: str) -> int:
        if name not in self._storages:
            return self._leaves[name].nbytes
        storage = self._storages[name]
        # Several leaves may share a storage. Its bytes count for the first leaf.
        return len(storage.content) if storage.name == name else 0

    def close(self) -> None:
        self._leaves = {}
        self._storages = {}
        self._unread = []
        self._file = MappedFile(self.path, np.empty(0, np.uint8))


def locate(path: Path) -> Path | None:
    """Return the file or the index of a folder's torch weights, from names alone; an index is itself."""
    mode = file_mode(path)
    if stat.S_ISREG(mode):
        return path if model_folder.is_index(path.name, _BIN) and first_bytes(path, 1) is not None else None
    if not stat.S_ISDIR(mode):
        return None
    # Names alone decide, because opening every file of a folder of shards takes long.
    names = names_in(path)
    standard = model_folder.standard_weights(path, names)
    if standard is not None:
        return path / standard if standard.startswith("pytorch_model.") else None
    indexes = [
        name for name in names if model_folder.is_index(name, ".safetensors") or model_folder.is_index(name, _BIN)
    ]
    is_one = (
        len(indexes) == 1 and model_folder.is_index(indexes[0], _BIN) and stat.S_ISREG(file_mode(path / indexes[0]))
    )
    return path / indexes[0] if is_one else None


class TorchFolderReader(Reader):
    """The open ``torch.save`` files of one state dict; each file has some of the entries."""

    format = "torch"

    def __init__(self, path: Path, place: Path, settings: OpenSettings) -> None:
        self.path = path
        self.metadata = {}
        index = read_directory(place.parent, partial(self._open, place=place, settings=settings))
        first = self._files[0]
        if index is None:
            self._set_state(first.flat, first.path, first.leaf_specs)
        else:
            self._set_state(self._merge(index), place)
            self.notes = [*index.notes(self.flat)]
        self.refusal = next((file.refusal for file in self._files if file.refusal is not None), None)
        self._file_of = {name: file for file in self._files for name in file.flat.leaves}
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
            model_folder.add_unused(self, path, {*self.details["files"], place.name})

    def _open(self, directory: Directory, *, place: Path, settings: OpenSettings) -> model_folder.Index | None:
        index = model_folder.read_index(directory, place) if model_folder.is_index(place.name, _BIN) else None
        wanted = {place.name: ""} if index is None else index.keys_by_file()
        for name, key in wanted.items():
            # Reports a missing file as listed in the index, and not as a wrong path.
            model_folder.open_shard(directory, name, key, len(wanted)).close()
        parts = FetchedParts(settings.pool.budget)
        self._files = [TorchReader(directory.path_of(name), settings, parts) for name in wanted]
        directory.close()
        return index

    def _merge(self, index: model_folder.Index) -> Flat[StoredLeaf]:
        merged: dict[str, Any] = {}
        entries: dict[str, Any] = {}
        leaves: dict[str, StoredLeaf] = {}
        aliases: dict[str, Alias] = {}
        found: list[tuple[Path, dict[str, Any]]] = []
        for file in self._files:
            skeleton: Any = file.flat.skeleton
            kind = next((kind for kind in ("dict", "ordered") if isinstance(skeleton, dict) and kind in skeleton), None)
            if kind is None:
                raise UnsupportedError("is not a dict of tensors, as each file of an index is", path=file.path)
            found.append((file.path, skeleton[kind]))
            entries |= skeleton[kind]
            # An OrderedDict may also have the ``_metadata`` of a module.
            merged = merged or {**skeleton, kind: entries}
            leaves |= file.flat.leaves
            aliases |= file.flat.aliases
        # Otherwise an entry of one file could silently replace an entry of another file.
        index.check(found)
        ordered = {key: entries[key] for key in index.files}
        skeleton = {key: ordered if node is entries else node for key, node in merged.items()}
        return Flat(skeleton, leaves, aliases, {name: (DEFAULT_PART, name) for name in [*leaves, *aliases]})

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._file_of[name].read(name, start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        return self._file_of[name].mapped(name)

    def audit(self) -> Iterator[Problem]:
        for file in self._files:
            yield from file.audit()

    def bytes_to_check(self, name: str) -> int:
        return self._file_of[name].bytes_to_check(name)

    def close(self) -> None:
        for file in self._files:
            file.close()


class TorchFormat(Format):
    """The files of ``torch.save``, without options, compression and metadata; see `tensorkeep.formats.base.Format`.

    It also reads files of torch before version 1.6, and the tensors of TorchScript archives as a flat dict by name.
    It writes what ``torch.load(weights_only=True)`` reads: tensors, parameters, dicts, lists, tuples, sets and plain
    scalars, but not numpy arrays, named tuples, dataclasses, enums, ranges or frozensets. Writing from another
    checkpoint holds the whole state in memory, because ``torch.save`` does.
    """

    name = "torch"
    suffixes = (".pt", ".pth", ".bin")

    def recognises(self, path: Path) -> bool:
        return locate(path) is not None or is_torch_file(path)

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        place = locate(path)
        return TorchReader(path, settings) if place is None else TorchFolderReader(path, place, settings)

    def check(self, destination: Path, settings: WriteSettings) -> None:
        if destination.name.endswith((SUFFIX, CODED_SUFFIX)):
            raise UsageError(
                f"a file of torch.save is not read under the suffix {destination.suffix}, which means safetensors",
                path=destination,
                remedy='give it the suffix .pt, or write safetensors (format="safetensors")',
            )

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings, replaceable=is_torch_file)


FORMAT = TorchFormat()
