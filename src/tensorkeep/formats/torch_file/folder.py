"""Reading the files of ``torch.save`` in a folder of weights: ``pytorch_model.bin``, or several files with an index."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.mapped_file import FetchedParts
from tensorkeep.formats.model_folder import (
    Index,
    is_index,
    notes_on_folder,
    open_shard,
    read_index,
    standard_weights,
    unused_files,
)
from tensorkeep.formats.probe import file_mode, first_bytes, names_in
from tensorkeep.formats.torch_file.reader import TorchReader
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.places import read_directory
from tensorkeep.state.aliases import Alias
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat

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
