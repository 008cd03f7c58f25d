"""Reading a native checkpoint, without trusting anything in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import OpenSettings, Problem, Reader
from tensorkeep.formats.blockfile.plan import BlockRecord
from tensorkeep.formats.blockfile.read import BlockReader, StoredBlock, StoredTensor
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.records import PLACES, WIDE_DIGESTS, FileRecord, LeafRecord, Manifest, PlaceRecord
from tensorkeep.formats.structure import Structure
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes, store_errors
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.dtypes import BY_NAME


class NativeReader(Reader):
    """An open native checkpoint; see `OpenFiles`."""

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._opened = OpenFiles(path, settings)
        self._manifest = manifest = self._opened.manifest
        try:
            self.tensors = {leaf.name: self._opened.tensor(leaf) for leaf in manifest.leaves}
            leaves = {name: tensor.leaf(self) for name, tensor in self.tensors.items()}
            structure = Structure(manifest.skeleton, manifest.aliases, manifest.parts())
            self._set_state(structure.flat(leaves), path / manifests.FILE_NAME)
            self.metadata = manifest.metadata
        except BaseException as error:
            self._opened.close()
            if isinstance(error, RecursionError):
                raise CorruptCheckpointError("is nested too deeply", path=path / manifests.FILE_NAME) from error
            raise
        if WIDE_DIGESTS in manifest.features:
            self.verifiable = "xxh3-128 of every block"
        if any(place.bases for leaf in manifest.leaves for place in leaf.places):
            self.buffers = 3
        self.step = manifest.step
        self.details = _details(manifest, [*self._opened.statuses, self._opened.manifest_status])

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._opened.blocks.read(self.tensors[name], start, stop, out)

    def mapped(self, name: str) -> Bytes | None:
        return self.tensors[name].mapped()

    def block_bytes(self, name: str) -> int:
        return self._manifest.block_bytes

    def audit(self) -> Iterator[Problem]:
        for record, file in zip(self._manifest.files, self._opened.files, strict=True):
            if sealed.digest_of(file, record.head_bytes) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        self._opened.close()


def _details(manifest: Manifest, statuses: list[os.stat_result]) -> dict[str, Any]:
    """Return further details for `info`, as plain values; the status of the manifest itself is the last."""
    occupied = sum(map(occupied_bytes, statuses))
    # Removing the checkpoint alone frees the files that nothing else has a link to.
    own = sum(occupied_bytes(status) for status in statuses if status.st_nlink <= 1)
    details: dict[str, Any] = {"version": manifest.version, "writer": manifest.writer}
    if manifest.step is not None:
        details["step"] = msgspec.to_builtins(manifest.step)
    if PLACES in manifest.features:
        linked: dict[str, int] = {}
        for file in manifest.files:
            if file.origin:
                linked[file.origin] = linked.get(file.origin, 0) + file.bytes
        details["history"] = {
            "new_bytes": sum(file.bytes for file in manifest.files if not file.origin) + statuses[-1].st_size,
            "linked_bytes": linked,
            "deepest_chain": max((len(place.bases) for leaf in manifest.leaves for place in leaf.places), default=0),
        }
    return {
        **details,
        "compression": manifest.compression,
        "block_bytes": manifest.block_bytes,
        "files": {file.name: file.bytes for file in manifest.files},
        "space": {"own_bytes": own, "shared_bytes": occupied - own, "occupied_bytes": occupied},
    }


def occupied_bytes(status: os.stat_result) -> int:
    """Return the bytes of disk that the file system has allocated for a file, as ``du`` counts them.

    The last block counts in full, and a file system that compresses or leaves out zeros allocates fewer.
    """
    return status.st_blocks * 512  # the unit on every file system


class OpenFiles:
    """The open files of a native checkpoint, and where in them its blocks are; to be closed.

    Its directory is held open, and all files are opened at once unless they are very many, so that a checkpoint which
    is replaced meanwhile is read to the end as it was. A file that is removed before it was opened is an error. The
    files are in the manifest's order, with their statuses when they were opened.

    Raises NotACheckpointError if the path has no manifest; CorruptCheckpointError if the manifest breaks a rule, or a
    file is missing or of another size; UnsupportedError if a later version wrote it; StoreError if the operating system
    refuses access.
    """

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self.blocks = BlockReader(settings.pool, verify=settings.verify)
        self.files: list[SourceFile] = []
        self.statuses: list[os.stat_result] = []
        read_directory(path, lambda directory: self._open(directory, settings))

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self.directory = directory
        try:
            self.manifest = manifests.read(directory)
            for record in self.manifest.files:
                self.files.append(self._open_file(record, page_cache=settings.page_cache))
                self.statuses.append(self.files[-1].status)
            with store_errors(self.path / manifests.FILE_NAME, "look at the file"):
                self.manifest_status = os.stat(f"{directory.fd_path}/{manifests.FILE_NAME}")
        except BaseException:
            self._close_files()
            raise

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> SourceFile:
        count = len(self.manifest.files)
        try:
            file = self.directory.open_one_of(count, record.name, follow_links=False, page_cache=page_cache)
        except NotACheckpointError as error:
            raise missing_file(self.path / record.name) from error
        if file.size != record.bytes:
            file.close()
            raise wrong_size(file.path, file.size, record.bytes)
        return file

    def tensor(self, leaf: LeafRecord) -> StoredTensor:
        """Return where a tensor is stored."""
        file, dtype = self.files[leaf.file], BY_NAME[leaf.dtype]
        if leaf.places:
            blocks = tuple(map(self.block, leaf.blocks, leaf.places))
            file = blocks[0].file
        else:
            blocks = tuple(
                [
                    StoredBlock(file, block.codec, offset, block.length, block.raw, block.stored)
                    for offset, block in zip(leaf.offsets(), leaf.blocks, strict=False)
                ]
            )
        return StoredTensor(leaf.name, dtype, leaf.shape, leaf.nbytes, file, self.manifest.block_bytes, blocks)

    def block(self, block: BlockRecord, place: PlaceRecord) -> StoredBlock:
        """Return where a block is stored, with the blocks that it is the difference from."""
        bases = tuple(
            StoredBlock(self.files[base.file], base.codec, base.offset, base.length, base.raw, base.stored)
            for base in place.bases
        )
        file = self.files[place.file]
        return StoredBlock(file, block.codec, place.offset, block.length, block.raw, block.stored, bases)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._close_files()
        self.directory.close()

    def _close_files(self) -> None:
        for file in self.files:
            file.close()
        self.files.clear()
        self.statuses.clear()


def missing_file(path: Path) -> CorruptCheckpointError:
    """Return the error for a file that the manifest lists and that does not exist."""
    return CorruptCheckpointError("the manifest lists this file, but it is missing", path=path)


def wrong_size(path: Path, size: int, expected: int) -> CorruptCheckpointError:
    """Return the error for a file that is longer or shorter than it was written."""
    problem = "was cut short" if size < expected else "has grown"
    return CorruptCheckpointError(f"the file {problem}: it holds {size:,} bytes, {expected:,} were written", path=path)
