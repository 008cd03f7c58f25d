"""Reading a distributed checkpoint without a process group, trusting nothing in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError
from tensorkeep.formats import sidecar
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StoredLeaf
from tensorkeep.formats.dcp.foreign import Rebuilt, rebuild
from tensorkeep.formats.dcp.metadata import FILE_NAME, Contents, Place, TensorEntry, parse
from tensorkeep.formats.dcp.slice_zip import MappedFile, SliceZip
from tensorkeep.formats.dcp.slices import TensorSlice
from tensorkeep.formats.dcp.tiling import copy_common, have_common, runs
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import Sidecar
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import Flat

_MOST_METADATA_BYTES = 1024**3


class DcpReader(Reader):
    """An open distributed checkpoint: its files are mapped, and a tensor that lies in several pieces is one again."""

    format = "dcp"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._verify = settings.verify
        read_directory(path, self._open)

    def _open(self, directory: Directory) -> None:
        notes = _sidecar(directory)
        contents = parse(_metadata_bytes(directory), directory.path / FILE_NAME)
        if contents.marked and notes is None:
            raise CorruptCheckpointError(
                f"tensorkeep.json, which says what the state looks like, is missing from {directory.path}",
                path=directory.path,
                remedy="fetch the missing file, or take another copy",
            )
        self._files = _map_files(directory, contents)
        self._contents = contents
        self._slices = {
            name: [TensorSlice(tensor, chunk, self._files[chunk.place.file]) for chunk in tensor.chunks]
            for name, tensor in contents.tensors.items()
        }
        self._memory: dict[str, Leaf] = {}
        self._keys: dict[str, str] = {}
        if notes is not None:
            self._set_state(self._own(notes, directory.path), directory.path / sidecar.FILE_NAME, notes.leaf_specs)
            self.metadata = notes.metadata
        else:
            self._set_state(self._foreign(rebuild(contents, self._files, self.path)), directory.path / FILE_NAME)
            self.metadata = {}
        checksummed = self._first_is_checksummed()
        self.verifiable = "CRC-32 of every record" if checksummed else None
        self.details = {
            "dcp_version": contents.version,
            "crc32": "written" if checksummed else "not written: torch was told not to",
            "values": len(contents.values),
            "files": {name: file.size for name, file in self._files.items()},
        }
        directory.close()

    def _own(self, notes: Sidecar, path: Path) -> Flat[StoredLeaf]:
        for name, note in notes.tensors.items():
            entry = self._contents.tensors.get(name)
            if entry is None or (entry.dtype, entry.shape) != stored_form(note.state_dtype, note.shape):
                raise CorruptCheckpointError("is another in the metadata than in tensorkeep.json", path=path, name=name)
            self._keys[name] = name
        return notes.flat({name: self._leaf(name, n.state_dtype, n.shape) for name, n in notes.tensors.items()})

    def _foreign(self, rebuilt: Rebuilt) -> Flat[StoredLeaf]:
        flat = rebuilt.flat
        leaves: dict[str, StoredLeaf] = {}
        for name, leaf in flat.leaves.items():
            key = rebuilt.keys.get(name)
            if key is None:
                self._memory[name] = leaf
                leaves[name] = self._leaf(name, leaf.dtype, leaf.shape)
            else:
                self._keys[name] = key
                tensor = self._contents.tensors[key]
                leaves[name] = self._leaf(name, tensor.dtype, tensor.shape)
        return Flat(flat.skeleton, leaves, flat.aliases, flat.parts)

    def _leaf(self, name: str, dtype: DType, shape: tuple[int, ...]) -> StoredLeaf:
        places = self._places(name)
        files = sorted({place.file for place in places})
        file = files[0] if len(files) == 1 else f"{len(files)} files"
        return StoredLeaf(self, name, dtype, shape, stored_bytes=sum(place.length for place in places), file=file)

    def _places(self, name: str) -> list[Place]:
        key = self._keys.get(name)
        return [] if key is None else [chunk.place for chunk in self._contents.tensors[key].chunks]

    def _first_is_checksummed(self) -> bool:
        places = [chunk.place for tensor in self._contents.tensors.values() for chunk in tensor.chunks]
        places += self._contents.values.values()
        return all(SliceZip(self._files[place.file], place).checksummed for place in places[:1])

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        if name in self._memory:
            self._memory[name].read(start, stop, out)
            return
        slices = self._slices[self._keys[name]]
        tensor = self._contents.tensors[self._keys[name]]
        if start == stop:
            return
        if len(slices) == 1:
            self._array(slices[0]).read(start, stop, out)
        else:
            self._assemble(tensor, slices, start, stop, out)

    def _array(self, piece: TensorSlice) -> Leaf:
        return (piece.checked() if self._verify else piece.piece()).leaf

    def _assemble(self, tensor: TensorEntry, slices: list[TensorSlice], start: int, stop: int, out: Bytes) -> None:
        size = tensor.dtype.itemsize
        for (offsets, sizes), place in runs(tensor.shape, start // size, stop // size):
            part = out[place * size : (place + prod(sizes)) * size]
            for piece in slices:
                chunk = piece.chunk
                if have_common((offsets, sizes), (chunk.offsets, chunk.sizes)):
                    source = self._array(piece).array
                    copy_common(part.view(source.dtype).reshape(sizes), offsets, source, chunk.offsets)

    def audit(self) -> Iterator[Problem]:
        """Check what no tensor of the state is read from: plain values, and tensors that are stored twice."""
        used = set(self._keys.values())
        places = list(self._contents.values.items())
        for key, tensor in self._contents.tensors.items():
            for number, chunk in enumerate(tensor.chunks):
                if key not in used or self._lacks_checksum(key, number):
                    places.append((key, chunk.place))
        for key, place in places:
            try:
                archive = SliceZip(self._files[place.file], place)
                archive.check()
            except TensorkeepError as error:
                yield Problem(error.message, file=place.file, name=key)
            else:
                if self.verifiable and not archive.checksummed:
                    yield Problem("has no CRC-32, which the rest of the checkpoint has", file=place.file, name=key)

    def _lacks_checksum(self, key: str, number: int) -> bool:
        try:
            return self._slices[key][number].piece().crc is None
        except TensorkeepError:
            return True

    def close(self) -> None:
        self._memory = {}
        self._slices = {}
        self._files = {}


def stored_form(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return as what a tensor is stored: as bytes, if torch lacks its dtype."""
    return (dtype, tuple(shape)) if dtype.has_torch else (BY_NAME["uint8"], (prod(shape) * dtype.itemsize,))


def _sidecar(directory: Directory) -> Sidecar | None:
    if sidecar.FILE_NAME not in names_in(directory.path):
        return None
    return sidecar.read(directory, "dcp", Sidecar)


def _metadata_bytes(directory: Directory) -> bytes:
    try:
        with directory.open(FILE_NAME, follow_links=False) as file:
            if file.size > _MOST_METADATA_BYTES:
                raise CorruptCheckpointError(f"{file.size:,} bytes of metadata are too many", path=file.path)
            return file.read(0, file.size)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            "is no distributed checkpoint: it holds no .metadata",
            path=directory.path,
            remedy="a save that was killed leaves none; give the directory that dcp.save was given",
        ) from error


def _map_files(directory: Directory, contents: Contents) -> dict[str, MappedFile]:
    files: dict[str, MappedFile] = {}
    pieces = list(_pieces(contents, directory.path / FILE_NAME))
    claimed = 0
    for name, place in [*pieces, *contents.values.items()]:
        if place.file not in files:
            files[place.file] = _map(directory, name, place.file)
        file = files[place.file]
        if place.length <= 0 or place.offset + place.length > file.size:
            raise CorruptCheckpointError(
                f"a piece of it lies at byte {place.offset:,} and is {place.length:,} long, the file has {file.size:,}",
                path=file.path,
                name=name,
                remedy="the file was cut short or replaced: take another copy",
            )
        claimed += place.length
    total = sum(file.size for file in files.values())
    if claimed > total:
        raise CorruptCheckpointError(
            f"its pieces claim {claimed:,} bytes, its files have {total:,}", path=directory.path
        )
    return files


def _pieces(contents: Contents, path: Path) -> Iterator[tuple[str, Place]]:
    """Yield where the pieces of tensors lie, having checked that there is room for them, before memory is allocated."""
    for name, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            nbytes = prod(chunk.sizes) * tensor.dtype.itemsize
            if nbytes > chunk.place.length:
                raise CorruptCheckpointError(
                    f"a piece of it is {chunk.place.length:,} bytes long, which cannot hold {nbytes:,}",
                    path=path,
                    name=name,
                )
            yield name, chunk.place


def _map(directory: Directory, name: str, file: str) -> MappedFile:
    # One plain name beside the metadata: no separator, no parent, no drive.
    if not re.fullmatch(r"(?!\.\.?$)[^/\\\0:]{1,255}", file):
        raise CorruptCheckpointError(
            f"the metadata names the file {file!r}, which does not lie beside it", path=directory.path, name=name
        )
    try:
        return MappedFile(directory, file)
    except NotACheckpointError as error:
        raise CorruptCheckpointError(
            "a piece of it lies in this file, which is missing",
            path=directory.path / file,
            name=name,
            remedy="fetch the missing file: every rank's is needed",
        ) from error
