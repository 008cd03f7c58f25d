"""Detecting and reading safetensors files and sharded directories, without trusting anything in them."""

import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile.header import MAX_HEADER_BYTES, SUB_BYTE, Header, TensorRecord
from tensorkeep.formats.blockfile.notes import METADATA_KEY, Notes, parse
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, FRAMEWORK_KEY, INDEX_SUFFIX, SUFFIX
from tensorkeep.formats.blockfile.read import BlockReader, StoredTensor, lay_out, read_ahead
from tensorkeep.formats.probe import file_mode, first_bytes, names_in
from tensorkeep.formats.sealed import MANIFEST_NAME
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects.store_commit import save_of
from tensorkeep.io.places import read_directory
from tensorkeep.io.source_file import SourceFile
from tensorkeep.paths import StorePath
from tensorkeep.state.dtypes import BY_NAME, BY_SAFETENSORS, DType
from tensorkeep.state.names import DEFAULT_PART, assign_names


def locate(path: Path) -> Path | None:
    """Return the file or the index of a path, from names and first bytes; None if it is not safetensors."""
    mode = file_mode(path)
    if stat.S_ISDIR(mode):
        return _locate_in(path)
    if not stat.S_ISREG(mode):
        return None
    if path.name.endswith((SUFFIX, CODED_SUFFIX, INDEX_SUFFIX)):
        return path
    return path if begins_like_safetensors(path) else None


def begins_like_safetensors(path: Path) -> bool:
    """Return whether a file begins with the length of a header, and the header."""
    start = first_bytes(path, 9)
    return start is not None and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES


def _locate_in(directory: Path) -> Path | None:
    if file_mode(directory / MANIFEST_NAME):
        return None
    names = names_in(directory)
    if isinstance(directory, StorePath):
        # Without a manifest, the objects of a native save are those of one that did not end.
        names = [name for name in names if save_of(name) is None]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    found = indexes or [name for name in names if name.endswith((SUFFIX, CODED_SUFFIX))]
    return directory / found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class _DataFile:
    file: SourceFile
    header: Header
    notes: Notes


class SafetensorsReader(Reader):
    """An open safetensors file, or set of files with an index; the format has no checksums."""

    format = "safetensors"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._blocks = BlockReader(settings.pool, verify=settings.verify)
        self._page_cache = settings.page_cache
        data = read_directory(path if stat.S_ISDIR(file_mode(path)) else path.parent, self._open)
        self.metadata = {}
        for found in reversed(data):
            self.metadata |= found.header.metadata
        self.metadata.pop(METADATA_KEY, None)
        # The library that wrote the file, by convention; not the user's metadata.
        framework = self.metadata.pop(FRAMEWORK_KEY, None)
        self.details = {"files": {file.path.name: file.size for file in self._files}, "framework": framework}

    def _open(self, directory: Directory) -> list[_DataFile]:
        self._directory = directory
        place = locate(self.path)
        if place is None:
            raise NotACheckpointError(
                "is neither a safetensors file, nor a directory with one or with an index",
                path=self.path,
                remedy="check the path; tensorkeep.load reads checkpoints of every format",
            )
        # All files are opened at once, so that a checkpoint that is replaced meanwhile is read as it was.
        with ExitStack() as opened:
            index = _read_index(directory, place) if place.name.endswith(INDEX_SUFFIX) else None
            if index is None:
                self._files = [opened.enter_context(directory.open(place.name, page_cache=self._page_cache))]
            else:
                wanted = {file: key for key, file in index.items()}
                self._files = [
                    opened.enter_context(self._open_shard(file, key, len(wanted))) for file, key in wanted.items()
                ]
            headers = [(file, header.read(file)) for file in self._files]
            data = [_DataFile(file, header, parse(header, file.path)) for file, header in headers]
            if index is not None:
                _check_index(index, data)
            self._tensors = self._state(data, place, index)
            self._close_files = opened.pop_all().close
        return data

    def _open_shard(self, name: str, key: str, count: int) -> SourceFile:
        try:
            return self._directory.open_one_of(count, name, page_cache=self._page_cache)
        except NotACheckpointError as error:
            raise CorruptCheckpointError(
                "the index lists this file, but it is missing",
                path=self._directory.path / name,
                name=key,
                remedy="fetch the missing file, or take another copy",
            ) from error

    def _state(self, data: list[_DataFile], place: Path, index: Mapping[str, str] | None) -> dict[str, StoredTensor]:
        homes = {key: found for found in data for key in found.header.records}
        structures = [found for found in data if found.notes.structure is not None]
        if len(structures) > 1:
            raise CorruptCheckpointError("a second file has the structure of the state", path=structures[1].file.path)
        structure = structures[0].notes.structure if structures else None
        if structure is None:
            keys = list(index or homes)
            names = dict(zip(assign_names([(key,) for key in keys]) if keys else [], keys, strict=True))
            skeleton: Any = {"dict": {key: {"tensor": name} for name, key in names.items()}}
            structure = Structure(skeleton, {}, {name: (DEFAULT_PART, name) for name in names})
        else:
            names = {key: key for key in homes}
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
        """Return the names of the stored tensors in the order of their bytes, file by file."""
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


def _read_index(directory: Directory, path: Path) -> dict[str, str]:
    """Return the name of the file of each tensor, all in the index's directory."""
    with directory.open(path.name) as file:
        if file.size > MAX_HEADER_BYTES:
            raise CorruptCheckpointError(f"is too large for an index: {file.size:,} bytes", path=path)
        content = file.read(0, file.size)
    try:
        weight_map = header.decode_object(content).get("weight_map")
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the index is not valid JSON ({error})", path=path) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError("the index has no weight_map", path=path)
    for name, file_name in weight_map.items():
        # One plain name beside the index: no separator, no parent, no drive.
        if not isinstance(file_name, str) or not re.fullmatch(r"(?!\.\.?$)[^/\\\0:]{1,255}", file_name):
            raise CorruptCheckpointError(
                f"the index names the file {file_name!r}, which is not beside it", path=path, name=name
            )
    return weight_map


def _check_index(index: Mapping[str, str], data: list[_DataFile]) -> None:
    paths = {found.file.path.name: found.file.path for found in data}
    found_in = [(key, found.file.path) for found in data for key in found.header.records]
    for key, path in found_in:
        if (listed := index.get(key)) != path.name:
            where = "does not list" if listed is None else f"lists in {listed}"
            raise CorruptCheckpointError(f"holds a tensor that the index {where}", path=path, name=key)
    for key in index.keys() - dict(found_in):
        text = "the index lists it in this file, but it is not there"
        raise CorruptCheckpointError(text, path=paths[index[key]], name=key)


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
    dtype, shape = _true_type(record)
    nbytes = record.stop - record.start
    lengths = [min(BLOCK_BYTES, nbytes - at) for at in range(0, nbytes, BLOCK_BYTES)]
    blocks = lay_out(home.file, offset, [("raw", length) for length in lengths])
    return StoredTensor(name, dtype, shape, nbytes, home.file, range(0, nbytes, BLOCK_BYTES), blocks)


def _true_type(record: TensorRecord) -> tuple[DType, tuple[int, ...]]:
    """Return dtype and shape; elements smaller than a byte become torch's packed dtype, or else plain bytes."""
    if record.tag not in SUB_BYTE:
        return BY_SAFETENSORS[record.tag], record.shape
    if record.tag == "F4" and record.shape and record.shape[-1] % 2 == 0:
        return BY_NAME["float4_e2m1fn_x2"], (*record.shape[:-1], record.shape[-1] // 2)
    return BY_NAME["uint8"], (record.stop - record.start,)
