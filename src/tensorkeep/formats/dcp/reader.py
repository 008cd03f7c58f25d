"""Reader of distributed checkpoints: untrusted, memory-mapped or fetched, without a process group."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.boxes import box_shape, intersection, range_to_boxes, relative
from tensorkeep.formats.dcp.metadata import FILE_NAME, Contents, parse
from tensorkeep.formats.dcp.nesting import NestedState, rebuild
from tensorkeep.formats.dcp.pieces import PieceZip, TensorPiece
from tensorkeep.formats.mapped_file import FetchedParts, MappedFile, map_file
from tensorkeep.formats.model_folder import notes_on_folder, unused_files
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.places import read_directory
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import Flat

_MAX_METADATA_BYTES = 1024**3


class DcpReader(Reader):
    """An open distributed checkpoint: its files are mapped, and the chunks of a tensor are assembled as it is read."""

    format = "dcp"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._verify = settings.verify
        self._allow = settings.allow
        self._budget = settings.pool.budget
        read_directory(path, self._open)

    def _open(self, directory: Directory) -> None:
        notes = sidecar.read(directory, "dcp", Sidecar) if sidecar.FILE_NAME in names_in(directory.path) else None
        contents = parse(_metadata_bytes(directory), directory.path / FILE_NAME)
        if contents.has_mark and notes is None:
            raise CorruptCheckpointError(
                f"tensorkeep.json, which describes the state, is missing from {directory.path}",
                path=directory.path,
                remedy="restore the missing file, or take another copy",
            )
        self._files = _map_files(directory, contents, FetchedParts(self._budget))
        self._contents = contents
        self._pieces = {
            name: [TensorPiece(tensor, chunk, self._files[chunk.location.file]) for chunk in tensor.chunks]
            for name, tensor in contents.tensors.items()
        }
        # Tensors that were pickled among plain values, and for each other one its name in the metadata.
        self._unpickled: dict[str, Leaf] = {}
        self._keys: dict[str, str] = {}
        attributes: list[str] = []
        if notes is not None:
            flat = self._flat_of_sidecar(notes, directory.path)
            self._set_state(flat, directory.path / sidecar.FILE_NAME, notes.leaf_specs)
        else:
            nested = rebuild(contents, self._files, self.path, self._allow)
            self.refusal, attributes = nested.refusal, nested.attributes
            flat = self._flat_of_nested(nested)
            self._set_state(flat, directory.path / FILE_NAME)
        self.metadata = notes.metadata if notes is not None else {}
        first = next(contents.locations(), None)
        checksummed = first is None or PieceZip(self._files[first[1].file], first[1]).archive.checksummed
        self.verifiable = "CRC-32 of every record" if checksummed else None
        self.details = {
            "dcp_version": contents.version,
            "crc32": "written" if checksummed else "not written: torch was configured not to",
            "values": len(contents.values),
            "files": {name: file.size for name, file in self._files.items()},
        }
        if attributes:
            self.details["attributes_left_out"] = attributes
        unused = unused_files(directory.path, {*self._files, FILE_NAME, sidecar.FILE_NAME})
        if unused:
            self.details["unused_files"] = unused
        self.notes = [*notes_on_folder(directory.path, unused)]
        directory.close()

    def _flat_of_sidecar(self, notes: Sidecar, path: Path) -> Flat[StoredLeaf]:
        leaves: dict[str, StoredLeaf] = {}
        for name, note in notes.tensors.items():
            entry = self._contents.tensors.get(name)
            if entry is None or (entry.dtype, entry.shape) != stored_form(note.state_dtype, note.shape):
                raise CorruptCheckpointError("differs between the metadata and tensorkeep.json", path=path, name=name)
            self._keys[name] = name
            leaves[name] = self._leaf(name, note.state_dtype, note.shape)
        return notes.flat(leaves)

    def _flat_of_nested(self, nested: NestedState) -> Flat[StoredLeaf]:
        flat = nested.flat
        self._keys = nested.keys
        leaves: dict[str, StoredLeaf] = {}
        for name, leaf in flat.leaves.items():
            if name in self._keys:
                tensor = self._contents.tensors[self._keys[name]]
                leaves[name] = self._leaf(name, tensor.dtype, tensor.shape)
            else:
                self._unpickled[name] = leaf
                leaves[name] = self._leaf(name, leaf.dtype, leaf.shape)
        return Flat(flat.skeleton, leaves, flat.aliases, flat.parts)

    def _leaf(self, name: str, dtype: DType, shape: tuple[int, ...]) -> StoredLeaf:
        key = self._keys.get(name)
        locations = [] if key is None else [chunk.location for chunk in self._contents.tensors[key].chunks]
        files = sorted({location.file for location in locations})
        file = files[0] if len(files) == 1 else f"{len(files)} files"
        stored_bytes = sum(location.length for location in locations)
        return StoredLeaf(self, name, dtype, shape, stored_bytes=stored_bytes, file=file)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._unpickled:
            self._unpickled[name].read(start, stop, out)
            return
        key = self._keys[name]
        tensor = self._contents.tensors[key]
        size, at = tensor.dtype.itemsize, 0
        for box in range_to_boxes(tensor.shape, start // size, stop // size):
            shape = box_shape(box)
            for piece in self._pieces[key]:
                common = intersection(box, piece.chunk.box)
                if common is not None:
                    # The dots make it a view, not a number, if there are no dimensions.
                    place: tuple[Any, ...] = (*relative(common, piece.chunk.box), ...)
                    source = piece.open(verify=self._verify)[place]
                    target = out[at : at + prod(shape) * size].view(source.dtype).reshape(shape)
                    with piece.needed(source):
                        target[relative(common, box)] = source
            at += prod(shape) * size

    def audit(self) -> Iterator[Problem]:
        """Check the chunks that no tensor of the state uses: plain values, and tensors stored twice."""
        used = set(self._keys.values())
        for name, places in _ends(self._contents).items():
            self._files[name].prefetch(places)
        locations = list(self._contents.values.items())
        for key, pieces in self._pieces.items():
            locations += [(key, piece.chunk.location) for piece in pieces if key not in used or _lacks_checksum(piece)]
        for key, location in locations:
            try:
                piece = PieceZip(self._files[location.file], location)
                piece.check()
            except TensorkeepError as error:
                yield Problem(error.message, file=location.file, name=key)
            else:
                if self.verifiable and not piece.archive.checksummed:
                    message = "has no CRC-32, unlike the rest of the checkpoint"
                    yield Problem(message, file=location.file, name=key)

    def close(self) -> None:
        self._unpickled = {}
        self._pieces = {}
        self._files = {}


def stored_form(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and the shape that a tensor is stored as: its bytes, if torch lacks its dtype."""
    return (dtype, tuple(shape)) if dtype.has_torch else (BY_NAME["uint8"], (prod(shape) * dtype.itemsize,))


def _ends(contents: Contents) -> dict[str, list[tuple[int, int]]]:
    """Return where in each file the first and the last byte of each piece are, beside its headers."""
    places: dict[str, list[tuple[int, int]]] = {}
    for _, location, _ in contents.locations():
        stop = location.offset + location.length
        places.setdefault(location.file, []).extend([(location.offset, location.offset + 1), (stop - 1, stop)])
    return places


def _lacks_checksum(piece: TensorPiece) -> bool:
    try:
        piece.open(verify=False)
    except TensorkeepError:
        return True
    return piece.crc is None


def _metadata_bytes(directory: Directory) -> bytes:
    try:
        file = directory.open(FILE_NAME)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            "is not a distributed checkpoint: it holds no .metadata",
            path=directory.path,
            remedy="a save that was killed leaves none; give the directory that dcp.save was given",
        ) from error
    with file:
        if file.size > _MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"{file.size:,} bytes of metadata are too many", path=file.path)
        return file.read(0, file.size)


def _map_files(directory: Directory, contents: Contents, parts: FetchedParts) -> dict[str, MappedFile]:
    """Map all files, and check their sizes against the metadata before memory is allocated."""
    files: dict[str, MappedFile] = {}
    claimed = 0
    for name, location, nbytes in contents.locations():
        if location.file not in files:
            files[location.file] = _map(directory, name, location.file, parts)
        file = files[location.file]
        if location.length <= 0 or location.offset + location.length > file.size:
            raise CorruptCheckpointError(
                f"a chunk of {location.length:,} bytes at {location.offset:,} exceeds the file of {file.size:,}",
                path=file.path,
                name=name,
                remedy="the file was truncated or replaced: take another copy",
            )
        if nbytes > location.length:
            message = f"a chunk of {location.length:,} bytes cannot hold the {nbytes:,} of its shape"
            raise CorruptCheckpointError(message, path=file.path, name=name)
        claimed += location.length
    total = sum(file.size for file in files.values())
    if claimed > total:
        message = f"its chunks claim {claimed:,} bytes, its files have {total:,}"
        raise CorruptCheckpointError(message, path=directory.path)
    return files


def _map(directory: Directory, name: str, file: str, parts: FetchedParts) -> MappedFile:
    # One plain name beside the metadata: no separator, no parent, no drive.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0:]{1,255}", file):
        raise CorruptCheckpointError(
            f"the metadata names the file {file!r}, which is not in the checkpoint's directory",
            path=directory.path,
            name=name,
        )
    try:
        with directory.open(file) as opened:
            return map_file(opened, parts)
    except NotACheckpointError as error:
        raise CorruptCheckpointError(
            "a chunk of it is in this file, which is missing",
            path=directory.path / file,
            name=name,
            remedy="restore the missing file: those of all ranks are needed",
        ) from error
