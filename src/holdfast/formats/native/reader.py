"""Reading a native checkpoint, trusting nothing in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from holdfast.errors import CorruptCheckpointError, DestinationExistsError, NotACheckpointError, UnsupportedError
from holdfast.formats import sealed
from holdfast.formats.base import Entry, OpenSettings, Problem, Reader, StepRecord, StoredLeaf
from holdfast.formats.first_bytes import first_bytes
from holdfast.formats.native import manifest as manifests
from holdfast.formats.native.blocks import BlockReader, StoredBlock, StoredTensor
from holdfast.formats.native.details import about
from holdfast.formats.native.records import WIDE_DIGESTS, BlockRecord, FileRecord, LeafRecord, PlaceRecord
from holdfast.formats.native.space import occupied_bytes
from holdfast.formats.structure import check_structure
from holdfast.io.directory import Directory, Readable, hold
from holdfast.io.files import Bytes, store_error
from holdfast.io.source_file import SourceFile
from holdfast.state.aliases import Alias
from holdfast.state.dtypes import BY_NAME
from holdfast.state.source import Source
from holdfast.state.tree import Flat, leaf_specs

_HASH_BYTES = 1024**2
_OUR_NAMES = (manifests.FILE_NAME, ".safetensors", ".safetensors.index.json")


class NativeReader(Reader):
    """An open native checkpoint.

    Its directory is held, and all files are opened at once unless they are very many, so that a checkpoint which is
    replaced meanwhile is read to the end as it was; a file that is gone before it was opened is an error.

    Attributes
    ----------
    manifest : Manifest
    statuses : list of os.stat_result
        Of its files, as they were when they were opened.
    """

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self.blocks = BlockReader(settings.pool, verify=settings.verify)
        self._files: list[Readable] = []
        self.statuses: list[os.stat_result] = []
        hold(path, lambda directory: self._open(directory, settings))
        self.entries = dict(self._entries())
        self.metadata = self.manifest.metadata
        if WIDE_DIGESTS in self.manifest.features:
            self.verifiable = "xxh3-128 of every block"
        if any(block.bases for tensor in self.tensors.values() for block in tensor.blocks):
            self.buffers = 3
        self.step = self.manifest.step
        self.details = about(self.manifest, [*self.statuses, self._manifest_status])

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self.directory = directory
        try:
            self.manifest = manifests.read(directory)
            for record in self.manifest.files:
                self._files.append(self._open_file(record, page_cache=settings.page_cache))
                self.statuses.append(self._status(record.name, self._files[-1]))
            self._manifest_status = self._status(manifests.FILE_NAME)
            self.tensors = {leaf.name: self._tensor(leaf) for leaf in self.manifest.leaves}
            self.flat = self._flat()
        except BaseException:
            for file in self._files:
                file.close()
            self._files.clear()
            self.statuses.clear()
            raise

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> Readable:
        count = len(self.manifest.files)
        try:
            file = self.directory.open_one_of(count, record.name, follow_links=False, page_cache=page_cache)
        except NotACheckpointError as error:
            raise _missing(self.path / record.name) from error
        if file.size != record.bytes:
            file.close()
            raise _wrong_size(file.path, file.size, record.bytes)
        return file

    def _status(self, name: str, file: Readable | None = None) -> os.stat_result:
        """Return what the system says of a file: of the one that is open, whatever its name stands for by now."""
        try:
            return os.stat(file.held_path if isinstance(file, SourceFile) else f"{self.directory.held_path}/{name}")
        except OSError as error:
            raise store_error(error, self.path / name, "look at the file") from error

    def _tensor(self, leaf: LeafRecord) -> StoredTensor:
        blocks = tuple(self._block(block, place) for block, place in leaf.located())
        file = blocks[0].file if blocks else self._files[leaf.file]
        dtype = BY_NAME[leaf.dtype]
        return StoredTensor(leaf.name, dtype, leaf.shape, leaf.nbytes, file, self.manifest.block_bytes, blocks)

    def _block(self, block: BlockRecord, place: PlaceRecord) -> StoredBlock:
        bases = tuple(
            StoredBlock(self._files[base.file], base.codec, base.offset, base.length, base.raw, base.stored)
            for base in place.bases
        )
        file = self._files[place.file]
        return StoredBlock(file, block.codec, place.offset, block.length, block.raw, block.stored, bases)

    def _flat(self) -> Flat[Source]:
        manifest = self.manifest
        aliases = {
            name: Alias(record.of, record.offset, record.shape, record.strides)
            for name, record in manifest.aliases.items()
        }
        parts = manifest.parts()
        try:
            check_structure(manifest.skeleton, self.tensors, aliases, parts)
        except ValueError as error:
            raise CorruptCheckpointError(str(error), path=self.path / manifests.FILE_NAME) from error
        return Flat(
            skeleton=manifest.skeleton,
            leaves={t.name: StoredLeaf(self, t.name, t.dtype, t.shape, t.nbytes) for t in self.tensors.values()},
            aliases=aliases,
            parts=parts,
        )

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        for name in leaf_specs(self.manifest.skeleton):
            part, _ = self.flat.parts[name]
            alias = self.manifest.aliases.get(name)
            tensor = self.tensors[alias.of if alias else name]
            file = tensor.file.path.name
            if alias is None:
                entry = Entry(
                    name, part, tensor.dtype, tensor.shape, tensor.nbytes, tensor.stored_bytes, tensor.codec, file
                )
            else:
                nbytes = prod(alias.shape) * tensor.dtype.itemsize
                entry = Entry(name, part, tensor.dtype, alias.shape, nbytes, 0, "alias", file, alias.of)
            yield name, entry

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self.blocks.read(self.tensors[name], start, stop, out)

    def block_bytes(self, name: str) -> int:
        return self.manifest.block_bytes

    def audit(self) -> Iterator[Problem]:
        for record, file in zip(self.manifest.files, self._files, strict=True):
            if _head_digest(file, record.head_bytes) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.directory.close()


def _head_digest(file: Readable, count: int) -> str:
    hasher = xxhash.xxh3_64()
    piece = np.empty(min(count, _HASH_BYTES), np.uint8)
    for at in range(0, count, _HASH_BYTES):
        part = piece[: count - at]
        file.read_into(at, part)
        hasher.update(part)
    return hasher.hexdigest()


def is_native(path: Path) -> bool:
    """Say whether a path is a native checkpoint, whole or damaged, by the first bytes of its manifest.

    Raises
    ------
    StoreError
        If the operating system does not let one look.
    """
    start = first_bytes(path / manifests.FILE_NAME, 4096) or b""
    return start.startswith(sealed.OPENING) or b'"format":"holdfast"' in start


def foreign_names(path: Path) -> list[str]:
    """Return what lies in the folder of a native checkpoint, whole or damaged, and is no part of it.

    Raises
    ------
    NotACheckpointError, StoreError, OSError
        If one cannot look.
    """
    try:
        with Directory(path) as directory:
            listed = {manifests.FILE_NAME, *(file.name for file in manifests.read(directory).files)}
        return sorted(entry.name for entry in path.iterdir() if entry.name not in listed)
    except (CorruptCheckpointError, UnsupportedError):
        # What a damaged manifest lists is not known.
        return sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(_OUR_NAMES))


def is_replaceable(path: Path) -> bool:
    """Say whether a path is a native checkpoint and nothing else.

    Raises
    ------
    DestinationExistsError
        If it holds files that are no part of the checkpoint, which nobody asked to remove.
    """
    if not is_native(path):
        return False
    foreign = foreign_names(path)
    if foreign:
        raise DestinationExistsError(
            f"holds {foreign[0]!r}, which is no part of the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


def look(path: Path) -> tuple[StepRecord | None, int, int]:
    """Look at a checkpoint without reading a tensor: its files must be there, as long as its manifest says.

    Returns
    -------
    tuple of (StepRecord or None, int, int)
        Which step of a run it is, the bytes of its files, and the bytes of disk that those of them occupy which nothing
        else has a link to.

    Raises
    ------
    NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
    """
    return hold(path, _look_at)


def _look_at(directory: Directory) -> tuple[StepRecord | None, int, int]:
    manifest = manifests.read(directory)
    nbytes = own = 0
    sizes: dict[str, int | None] = {manifests.FILE_NAME: None, **{file.name: file.bytes for file in manifest.files}}
    for name, size in sizes.items():
        path = directory.path / name
        try:
            status = os.stat(f"{directory.held_path}/{name}", follow_symlinks=False)
        except FileNotFoundError as error:
            raise _missing(path) from error
        except OSError as error:
            raise store_error(error, path, "look at the file") from error
        if size not in (None, status.st_size):
            raise _wrong_size(path, status.st_size, size or 0)
        nbytes += status.st_size
        own += occupied_bytes(status) if status.st_nlink == 1 else 0
    directory.close()
    return manifest.step, nbytes, own


def _missing(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError("the manifest lists this file, but it is missing", path=path)


def _wrong_size(path: Path, size: int, expected: int) -> CorruptCheckpointError:
    problem = "was cut short" if size < expected else "has grown"
    return CorruptCheckpointError(f"the file {problem}: it holds {size:,} bytes, {expected:,} were written", path=path)
