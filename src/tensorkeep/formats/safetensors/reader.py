"""Recognises and reads safetensors files and sharded directories, without trusting anything in them."""

import re
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, Reader, Structure
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.header import METADATA_KEY, FileEncoding, Header, TensorRecord, parse
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, FRAMEWORK_KEY, INDEX_SUFFIX, SUFFIX
from tensorkeep.formats.blockfile.read import BlockReader, StoredTensor, lay_out, read_ahead
from tensorkeep.formats.decoding import MAX_HEADER_BYTES, decode_json_object
from tensorkeep.formats.finding import check_not_other
from tensorkeep.formats.model_folder import (
    Index,
    is_index,
    is_part,
    notes_on_folder,
    open_shard,
    read_index,
    standard_weights,
    unused_files,
)
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.names import DEFAULT_PART, assign_names
from tensorkeep.storage import file_mode, first_bytes, names_in, read_directory, storage_of
from tensorkeep.storage.base import MANIFEST_NAME, Directory, SourceFile
from tensorkeep.storage.direct_io import Bytes
from tensorkeep.storage.store_commit import save_of

_SHARDING = "DCP_SHARDING_INFO"
# Keys of metadata that ``torch.distributed.checkpoint`` writes about a single file.
_OF_WRITER = (_SHARDING, "DCP_VERSION")
_FULL_TENSORS = re.compile(r"model-\d+-of-\d+\.safetensors")


def locate(path: Path) -> Path | None:
    """Return the file or the index of a path, from names and first bytes; None if it is not safetensors."""
    mode = file_mode(path)
    if stat.S_ISDIR(mode):
        return _locate_in(path)
    if not stat.S_ISREG(mode):
        return None
    if path.name.endswith((SUFFIX, CODED_SUFFIX)) or is_index(path.name, SUFFIX):
        return path
    return path if begins_like_safetensors(path) else None


def begins_like_safetensors(path: Path) -> bool:
    """Return whether a file begins with the length of a header and an opening brace."""
    start = first_bytes(path, 9)
    return start is not None and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES


def _locate_in(directory: Path) -> Path | None:
    if file_mode(directory / MANIFEST_NAME):
        return None
    names = names_in(directory)
    if storage_of(directory).remote:
        # Without a manifest, objects with names of a native save belong to an unfinished one.
        names = [name for name in names if save_of(name) is None]
    standard = standard_weights(directory, names)
    if standard is not None:
        return directory / standard if standard.endswith((SUFFIX, INDEX_SUFFIX)) else None
    indexes = [name for name in names if is_index(name, SUFFIX)]
    found = indexes or [name for name in names if name.endswith((SUFFIX, CODED_SUFFIX)) and not is_part(name)]
    # A folder may have the name of a file: a Zarr array has the name of its tensor. A link may lead nowhere.
    return directory / found[0] if len(found) == 1 and stat.S_ISREG(file_mode(directory / found[0])) else None


@dataclass(frozen=True, slots=True)
class _DataFile:
    file: SourceFile
    header: Header
    notes: FileEncoding


class SafetensorsReader(Reader):
    """An open safetensors file, or several with an index; the format has no checksums.

    ``written_by`` is metadata about single files, which a conversion does not copy.
    """

    format = "safetensors"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._blocks = BlockReader(settings.pool, verify=settings.verify)
        self._page_cache = settings.page_cache
        self._is_folder = stat.S_ISDIR(file_mode(path))
        data = read_directory(path if self._is_folder else path.parent, self._open)
        self.metadata = {}
        for found in reversed(data):
            self.metadata |= found.header.metadata
        self.metadata.pop(METADATA_KEY, None)
        # By convention the library that wrote the file, and not metadata of the user.
        framework = self.metadata.pop(FRAMEWORK_KEY, None)
        self.written_by = {key: self.metadata.pop(key) for key in _OF_WRITER if key in self.metadata}
        self.details = {"files": {file.path.name: file.size for file in self._files}, "framework": framework}
        if self._unused:
            self.details["unused_files"] = self._unused
        if self._is_folder:
            self.notes = [*self.notes, *notes_on_folder(path, self._unused)]

    def _open(self, directory: Directory) -> list[_DataFile]:
        self._directory = directory
        place = locate(self.path)
        if place is None:
            raise NotACheckpointError(
                "is neither a safetensors file, nor a directory with one or with an index",
                path=self.path,
                remedy="check the path; tensorkeep.load reads checkpoints of every format",
            )
        # All files are opened now, so that a checkpoint that is replaced meanwhile is read as it was.
        with ExitStack() as opened:
            index = read_index(directory, place) if is_index(place.name, SUFFIX) else None
            if index is None:
                self._files = [opened.enter_context(directory.open(place.name, page_cache=self._page_cache))]
            else:
                wanted = index.keys_by_file()
                self._files = [
                    opened.enter_context(open_shard(directory, file, key, len(wanted), page_cache=self._page_cache))
                    for file, key in wanted.items()
                ]
            headers = [(file, _header(file)) for file in self._files]
            data = [_DataFile(file, header, parse(header, file.path)) for file, header in headers]
            for found in data:
                _check_is_whole(found, listed=index is not None)
            if index is not None:
                index.check((found.file.path, found.header.records) for found in data)
            self._tensors = self._state(data, place, index)
            self._unused = self._unused_files(place) if self._is_folder else []
            # The index counts bytes in files, and compressed tensors have fewer bytes there than in the state.
            if index is not None and not any(found.notes.tensors for found in data):
                self.notes = [*index.notes(self.flat)]
            self._close_files = opened.pop_all().close
        return data

    def _unused_files(self, place: Path) -> list[str]:
        """Return the names in the folder that are not read.

        Raises NotACheckpointError if there are other tensors beside an index with a name that other tools do not know:
        nothing says whether the index or the other file is the checkpoint.
        """
        unused = [
            name
            for name in unused_files(self.path, {file.path.name for file in self._files} | {place.name})
            if save_of(name) is None
        ]
        rivals = [name for name in unused if name.endswith(SUFFIX)]
        if rivals and is_index(place.name, SUFFIX) and standard_weights(self.path, [place.name]) is None:
            raise NotACheckpointError(
                f"holds two checkpoints: {place.name}, and {rivals[0]}, which the index does not list",
                path=self.path,
                remedy=f"give the path of one: {place}",
            )
        return unused

    def _state(self, data: list[_DataFile], place: Path, index: Index | None) -> dict[str, StoredTensor]:
        homes = {key: found for found in data for key in found.header.records}
        records = {key: found.header.records[key] for key, found in homes.items()}
        structures = [found for found in data if found.notes.structure is not None]
        if len(structures) > 1:
            raise CorruptCheckpointError("a second file has the structure of the state", path=structures[1].file.path)
        structure = structures[0].notes.structure if structures else None
        if structure is None:
            keys = list(homes if index is None else index.files)
            names = dict(zip(assign_names([(key,) for key in keys]) if keys else [], keys, strict=True))
            unread = {name: record for name, key in names.items() if (record := records[key]).dtype is None}
            skeleton: Any = {
                "dict": {
                    key: {"placeholder": _placeholder(name, unread[name])} if name in unread else {"tensor": name}
                    for name, key in names.items()
                }
            }
            names = {name: key for name, key in names.items() if name not in unread}
            structure = Structure(skeleton, {}, {name: (DEFAULT_PART, name) for name in names})
        else:
            names = {key: key for key in homes}
            for key, record in records.items():
                if record.dtype is None:
                    text = f"has dtype {record.tag}, which this release does not know"
                    raise UnsupportedError(text, path=homes[key].file.path, name=key)
        files = {id(found): number for number, found in enumerate(data)}
        self._places = {
            name: (files[id(homes[key])], homes[key].header.records[key].start, homes[key].header.records[key].stop)
            for name, key in names.items()
        }
        tensors = {name: _stored(name, key, homes[key]) for name, key in names.items()}
        leaves = {name: tensor.leaf(self) for name, tensor in tensors.items()}
        self._set_state(structure.flat(leaves), structures[0].file.path if structures else place)
        return tensors

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._blocks.read(self._tensors[name], start, stop, out)

    def offset_order(self) -> list[str]:
        """Return the names of the stored tensors in file order."""
        return sorted(self._places, key=self._places.__getitem__)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        return read_ahead([(self._tensors[name], start, stop) for name, start, stop in ranges])

    def mapped(self, name: str) -> Bytes | None:
        return self._tensors[name].mapped()

    def block_bytes(self, name: str) -> int:
        starts = self._tensors[name].starts
        return starts.step if isinstance(starts, range) else BLOCK_BYTES

    def close(self) -> None:
        self._close_files()
        self._directory.close()


def _check_is_whole(data: _DataFile, *, listed: bool) -> None:
    """Refuse the files of single ranks that torch.distributed.checkpoint writes as safetensors.

    Their metadata has the offset of every shard, but the full shapes nowhere: a shard at offset 0 looks like a full
    tensor. Files of the writer's other mode, with full tensors, are known by an index or by their name.
    """
    text = data.header.metadata.get(_SHARDING)
    if text is None:
        return
    try:
        entries = decode_json_object(text.encode()).items()
        moved = {name: entry["saved_offsets"] for name, entry in entries if any(entry["saved_offsets"])}
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UnsupportedError(f"its metadata {_SHARDING} cannot be read ({error})", path=data.file.path) from error
    if not moved and (listed or _FULL_TENSORS.fullmatch(data.file.path.name)):
        return
    name, offsets = next(iter(moved.items()), (None, None))
    part = "may hold shards of tensors" if offsets is None else f"holds the shard of the tensor at {offsets}"
    raise UnsupportedError(
        f"{part}: it is one rank's file of a sharded save by torch.distributed.checkpoint",
        path=data.file.path,
        name=name,
        remedy="load the folder with torch.distributed.checkpoint.load(state, storage_reader="
        "HuggingFaceStorageReader(FOLDER)), and save the state again",
    )


def _header(file: SourceFile) -> Header:
    """Return the header of a file; raises NotACheckpointError, or the errors of `header.read`."""
    try:
        return header.read(file)
    except CorruptCheckpointError as error:
        if not begins_like_safetensors(file.path):
            check_not_other(file.path, error)
        raise


def _stored(name: str, key: str, home: _DataFile) -> StoredTensor:
    record = home.header.records[key]
    offset = home.header.nbytes + record.start
    note = home.notes.tensors.get(key)
    if note is not None:
        dtype = BY_NAME[note.dtype]
        nbytes = prod(note.shape) * dtype.itemsize
        blocks = lay_out(home.file, offset, note.blocks)
        starts: Sequence[int] = range(0, nbytes, home.notes.block_bytes)
        if note.raw is not None:
            starts = list(accumulate(note.raw[:-1], initial=0))
        return StoredTensor(name, dtype, note.shape, nbytes, home.file, starts, blocks)
    assert record.dtype is not None
    nbytes = record.stop - record.start
    lengths = [min(BLOCK_BYTES, nbytes - at) for at in range(0, nbytes, BLOCK_BYTES)]
    blocks = lay_out(home.file, offset, [("raw", length) for length in lengths])
    starts = range(0, nbytes, BLOCK_BYTES)
    return StoredTensor(name, record.dtype, record.element_shape, nbytes, home.file, starts, blocks)


def _placeholder(name: str, record: TensorRecord) -> list[str]:
    """Return the texts of the placeholder for a tensor of an unknown dtype."""
    what = (
        f"a tensor of {record.tag:.50} and shape {list(record.shape)}: neither torch nor numpy has this dtype and shape"
    )
    return [name, what, 'leave out what cannot be read with select="*", or read it with the tool that wrote it']
