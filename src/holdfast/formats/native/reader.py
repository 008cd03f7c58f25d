"""Reading a native checkpoint, trusting nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast.errors import CorruptCheckpointError, DestinationExistsError, NotACheckpointError, UnsupportedError
from holdfast.formats import sealed
from holdfast.formats.base import Entry, OpenSettings, Problem, Reader, StoredLeaf
from holdfast.formats.first_bytes import first_bytes
from holdfast.formats.native import manifest as manifests
from holdfast.formats.native.blocks import BlockReader, StoredTensor, lay_out
from holdfast.formats.native.manifest import FileRecord, LeafRecord, Manifest
from holdfast.formats.structure import check_structure
from holdfast.io.directory import Directory, Readable, hold
from holdfast.io.files import Bytes
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
    """

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._blocks = BlockReader(settings.pool, verify=settings.verify)
        self._files: list[Readable] = []
        hold(path, lambda directory: self._open(directory, settings))
        self.entries = dict(self._entries())
        self.metadata = self._manifest.metadata
        self.details = _details(self._manifest)

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self._directory = directory
        try:
            self._manifest = manifests.read(directory)
            for record in self._manifest.files:
                self._files.append(self._open_file(record, page_cache=settings.page_cache))
            self._tensors = {leaf.name: self._tensor(leaf) for leaf in self._manifest.leaves}
            self.flat = self._flat()
        except BaseException:
            for file in self._files:
                file.close()
            self._files.clear()
            raise

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> Readable:
        count = len(self._manifest.files)
        try:
            file = self._directory.open_one_of(count, record.name, follow_links=False, page_cache=page_cache)
        except NotACheckpointError as error:
            raise CorruptCheckpointError(
                "the manifest lists this file, but it is missing", path=self.path / record.name
            ) from error
        if file.size != record.bytes:
            file.close()
            problem = "was cut short" if file.size < record.bytes else "has grown"
            raise CorruptCheckpointError(
                f"the file {problem}: it holds {file.size:,} bytes, {record.bytes:,} were written", path=file.path
            )
        return file

    def _tensor(self, leaf: LeafRecord) -> StoredTensor:
        blocks = lay_out(leaf.offset, [(b.codec, b.length, b.raw, b.stored) for b in leaf.blocks])
        dtype = BY_NAME[leaf.dtype]
        file = self._files[leaf.file]
        return StoredTensor(leaf.name, dtype, leaf.shape, leaf.nbytes, file, self._manifest.block_bytes, blocks)

    def _flat(self) -> Flat[Source]:
        manifest = self._manifest
        aliases = {
            name: Alias(record.of, record.offset, record.shape, record.strides)
            for name, record in manifest.aliases.items()
        }
        parts = manifest.parts()
        try:
            check_structure(manifest.skeleton, self._tensors, aliases, parts)
        except ValueError as error:
            raise CorruptCheckpointError(str(error), path=self.path / manifests.FILE_NAME) from error
        return Flat(
            skeleton=manifest.skeleton,
            leaves={t.name: StoredLeaf(self, t.name, t.dtype, t.shape, t.nbytes) for t in self._tensors.values()},
            aliases=aliases,
            parts=parts,
        )

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        for name in leaf_specs(self._manifest.skeleton):
            part, _ = self.flat.parts[name]
            alias = self._manifest.aliases.get(name)
            tensor = self._tensors[alias.of if alias else name]
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
        self._blocks.read(self._tensors[name], start, stop, out)

    def block_bytes(self, name: str) -> int:
        return self._manifest.block_bytes

    def audit(self) -> Iterator[Problem]:
        for record, file in zip(self._manifest.files, self._files, strict=True):
            if _head_digest(file, record.head_bytes) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._directory.close()


def _details(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "writer": manifest.writer,
        "compression": manifest.compression,
        "block_bytes": manifest.block_bytes,
        "files": {file.name: file.bytes for file in manifest.files},
    }


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


def is_replaceable(path: Path) -> bool:
    """Say whether a path is a native checkpoint and nothing else.

    Raises
    ------
    DestinationExistsError
        If it holds files that are no part of the checkpoint, which nobody asked to remove.
    """
    if not is_native(path):
        return False
    try:
        with Directory(path) as directory:
            listed = {manifests.FILE_NAME, *(file.name for file in manifests.read(directory).files)}
        foreign = [entry.name for entry in path.iterdir() if entry.name not in listed]
    except (CorruptCheckpointError, UnsupportedError):
        # What a damaged manifest lists is not known.
        foreign = [entry.name for entry in path.iterdir() if not entry.name.endswith(_OUR_NAMES)]
    if foreign:
        raise DestinationExistsError(
            f"holds {min(foreign)!r}, which is no part of the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True
