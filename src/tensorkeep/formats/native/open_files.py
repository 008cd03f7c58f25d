"""The open files of a native checkpoint, and where in them its blocks lie."""

from __future__ import annotations

import os
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.read import BlockReader, StoredBlock, StoredTensor
from tensorkeep.formats.blockfile.records import BlockRecord, FileRecord, LeafRecord, PlaceRecord
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import store_error
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.dtypes import BY_NAME


class OpenFiles:
    """The open files of a native checkpoint; to be closed.

    Its directory is held, and all files are opened at once unless they are very many, so that a checkpoint which is
    replaced meanwhile is read to the end as it was; a file that is gone before it was opened is an error.

    Parameters
    ----------
    path : Path
    settings : OpenSettings

    Attributes
    ----------
    path : Path
    directory : Directory
    manifest : Manifest
    files : list of SourceFile
        In the manifest's order.
    statuses : list of os.stat_result
        Of these files, as they were when they were opened.
    manifest_status : os.stat_result
    blocks : BlockReader

    Raises
    ------
    NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
        If it cannot be read.
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
                self.statuses.append(self._status(record.name, self.files[-1]))
            self.manifest_status = self._status(manifests.FILE_NAME)
        except BaseException:
            self._close_files()
            raise

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> SourceFile:
        count = len(self.manifest.files)
        try:
            file = self.directory.open_one_of(count, record.name, follow_links=False, page_cache=page_cache)
        except NotACheckpointError as error:
            raise missing(self.path / record.name) from error
        if file.size != record.bytes:
            file.close()
            raise wrong_size(file.path, file.size, record.bytes)
        return file

    def _status(self, name: str, file: SourceFile | None = None) -> os.stat_result:
        """Return what the system says of a file: of the one that is open, whatever its name stands for by now."""
        try:
            return os.stat(file.fd_path if file is not None else f"{self.directory.fd_path}/{name}")
        except OSError as error:
            raise store_error(error, self.path / name, "look at the file") from error

    def tensor(self, leaf: LeafRecord) -> StoredTensor:
        """Return where a tensor lies."""
        blocks = tuple(self.block(block, place) for block, place in leaf.located())
        file = blocks[0].file if blocks else self.files[leaf.file]
        dtype = BY_NAME[leaf.dtype]
        return StoredTensor(leaf.name, dtype, leaf.shape, leaf.nbytes, file, self.manifest.block_bytes, blocks)

    def block(self, block: BlockRecord, place: PlaceRecord) -> StoredBlock:
        """Return where a block lies, and what it is made from."""
        bases = tuple(
            StoredBlock(self.files[base.file], base.codec, base.offset, base.length, base.raw, base.stored)
            for base in place.bases
        )
        file = self.files[place.file]
        return StoredBlock(file, block.codec, place.offset, block.length, block.raw, block.stored, bases)

    def close(self) -> None:
        """Close them; a second call does nothing."""
        self._close_files()
        self.directory.close()

    def _close_files(self) -> None:
        for file in self.files:
            file.close()
        self.files.clear()
        self.statuses.clear()


def missing(path: Path) -> CorruptCheckpointError:
    """Return the error for a file that is not there."""
    return CorruptCheckpointError("the manifest lists this file, but it is missing", path=path)


def wrong_size(path: Path, size: int, expected: int) -> CorruptCheckpointError:
    """Return the error for a file that is longer or shorter than it was written."""
    problem = "was cut short" if size < expected else "has grown"
    return CorruptCheckpointError(f"the file {problem}: it holds {size:,} bytes, {expected:,} were written", path=path)
