"""Reading a native checkpoint, trusting nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, NotACheckpointError
from holdfast.formats.base import Entry, OpenSettings, Problem, Reader, StoredLeaf
from holdfast.formats.native import manifest as manifests
from holdfast.formats.native.blocks import BlockReader, StoredTensor, lay_out
from holdfast.formats.native.manifest import LeafRecord, Manifest
from holdfast.io.files import Bytes, SourceFile
from holdfast.state.aliases import Alias
from holdfast.state.dtypes import BY_NAME
from holdfast.state.source import Source
from holdfast.state.tree import Flat, leaf_specs


class NativeReader(Reader):
    """An open native checkpoint.

    All files are opened at once, so that a checkpoint which is replaced meanwhile is read to the end as it was.
    """

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._manifest = manifests.read(path)
        self._blocks = BlockReader(settings.pool, verify=settings.verify)
        self._files: list[SourceFile] = []
        try:
            self._open_files(settings)
            self._tensors = {leaf.name: self._tensor(leaf) for leaf in self._manifest.leaves}
            self.flat = self._flat()
        except BaseException:
            self.close()
            raise
        self.entries = dict(self._entries())
        self.metadata = self._manifest.metadata
        self.details = _details(self._manifest)

    def _open_files(self, settings: OpenSettings) -> None:
        for record in self._manifest.files:
            try:
                file = SourceFile(self.path / record.name, follow_links=False, page_cache=settings.page_cache)
            except NotACheckpointError as error:
                raise CorruptCheckpointError(
                    "the manifest lists this file, but it is missing", path=self.path / record.name
                ) from error
            self._files.append(file)
            if file.size != record.bytes:
                problem = "was cut short" if file.size < record.bytes else "has grown"
                raise CorruptCheckpointError(
                    f"the file {problem}: it holds {file.size:,} bytes, {record.bytes:,} were written", path=file.path
                )

    def _tensor(self, leaf: LeafRecord) -> StoredTensor:
        blocks = lay_out(leaf.offset, [(b.codec, b.length, b.raw, b.stored) for b in leaf.blocks])
        dtype = BY_NAME[leaf.dtype]
        file = self._files[leaf.file]
        return StoredTensor(leaf.name, dtype, leaf.shape, leaf.nbytes, file, self._manifest.block_bytes, blocks)

    def _flat(self) -> Flat[Source]:
        """Return the state's structure; leaves, aliases and skeleton must agree on the names."""
        manifest = self._manifest
        aliases = {
            name: Alias(record.of, record.offset, record.shape, record.strides)
            for name, record in manifest.aliases.items()
        }
        try:
            for name, alias in aliases.items():
                if alias.of not in self._tensors:
                    raise ValueError(f"{name!r} is a view of {alias.of!r}, which is not stored")
                alias.validate(self._tensors[alias.of].shape)
            known = self._tensors.keys() | aliases.keys()
            if leaf_specs(manifest.skeleton).keys() != known:
                raise ValueError("the structure and the table of tensors do not name the same tensors")
        except ValueError as error:
            raise CorruptCheckpointError(str(error), path=self.path / manifests.FILE_NAME) from error
        return Flat(
            skeleton=manifest.skeleton,
            leaves={t.name: StoredLeaf(self, t.name, t.dtype, t.shape, t.nbytes) for t in self._tensors.values()},
            aliases=aliases,
            parts={leaf.name: (leaf.part, leaf.key) for leaf in manifest.leaves}
            | {name: (record.part, name) for name, record in manifest.aliases.items()},
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
            head = file.read(0, record.head_bytes)
            if manifests.digest(head) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _details(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "writer": manifest.writer,
        "compression": manifest.compression,
        "block_bytes": manifest.block_bytes,
        "files": {file.name: file.bytes for file in manifest.files},
    }


def is_native(path: Path) -> bool:
    """Say whether a path is a native checkpoint, whole or damaged, by the first bytes of its manifest."""
    with suppress(OSError), (path / manifests.FILE_NAME).open("rb") as file:
        start = file.read(4096)
        return start.startswith(manifests.OPENING) or b'"format":"holdfast"' in start
    return False
