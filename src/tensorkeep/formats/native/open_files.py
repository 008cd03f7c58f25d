"""The open files of a native checkpoint, and where in them its blocks are."""

import os
from collections.abc import Sequence
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.plan import BlockRecord
from tensorkeep.formats.blockfile.read import BlockReader, StoredBlock
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.pieces.fragments import PlacedBox, read_fragments
from tensorkeep.formats.native.pieces.records import Fragment, FragmentRecord, Root
from tensorkeep.formats.native.records import FileRecord, PlaceRecord, StoredRecord
from tensorkeep.storage import read_directory
from tensorkeep.storage.base import Directory, SourceFile
from tensorkeep.storage.direct_io import store_errors


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
        self.fragments: list[Fragment] = []
        self.boxes: dict[str, list[PlacedBox]] = {}
        self.numbers: list[list[int]] = []
        read_directory(path, lambda directory: self._open(directory, settings))

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        self.directory = directory
        try:
            self.manifest = manifests.read(directory)
            self.records = self._file_records(directory)
            for record in self.records:
                self.files.append(self._open_file(record, page_cache=settings.page_cache))
                self.statuses.append(self.files[-1].status)
            with store_errors(self.path / manifests.FILE_NAME, "look at the file"):
                self.manifest_names = [manifests.FILE_NAME, *(record.name for record in self._fragment_records())]
                self.manifest_statuses = [directory.status(name) for name in self.manifest_names]
        except BaseException:
            self._close_files()
            raise

    def _file_records(self, directory: Directory) -> list[FileRecord]:
        if not isinstance(self.manifest, Root):
            return self.manifest.files
        self.fragments, self.boxes = read_fragments(directory, self.manifest)
        # Two ranks may have linked the same file of an earlier save.
        records = {file.name: file for fragment in self.fragments for file in fragment.files}
        places = {name: number for number, name in enumerate(records)}
        self.numbers = [[places[file.name] for file in fragment.files] for fragment in self.fragments]
        return list(records.values())

    def _fragment_records(self) -> list[FragmentRecord]:
        return self.manifest.fragments if isinstance(self.manifest, Root) else []

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> SourceFile:
        count = len(self.records)
        try:
            file = self.directory.open_one_of(count, record.name, follow_links=False, page_cache=page_cache)
        except NotACheckpointError as error:
            raise missing_file(self.directory.path_of(record.name)) from error
        if file.size != record.bytes:
            file.close()
            raise wrong_size(file.path, file.size, record.bytes)
        return file

    def stored(self, record: StoredRecord, files: Sequence[SourceFile]) -> tuple[SourceFile, tuple[StoredBlock, ...]]:
        """Return the first file of a tensor or box, and where its blocks are; ``files`` are those that it counts."""
        if record.places:
            blocks = tuple([located(block, place, files) for block, place in record.located()])
            return blocks[0].file, blocks
        file = files[record.file]
        offsets = zip(record.block_offsets(), record.blocks, strict=False)
        return file, tuple(
            [StoredBlock(file, block.codec, offset, block.length, block.raw, block.stored) for offset, block in offsets]
        )

    def files_of(self, rank: int) -> list[SourceFile]:
        """Return the files in the order in which a rank's fragment lists them."""
        return [self.files[number] for number in self.numbers[rank]]

    def identity(self) -> str:
        """Return the checksum of the manifest, which has those of all blocks or of all fragments."""
        return checksummed_json.digest(checksummed_json.read_content(self.directory, manifests.FILE_NAME), wide=True)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._close_files()
        self.directory.close()

    def _close_files(self) -> None:
        for file in self.files:
            file.close()
        self.files.clear()
        self.statuses.clear()


def located(block: BlockRecord, place: PlaceRecord, files: Sequence[SourceFile]) -> StoredBlock:
    """Return where a block is stored, with the blocks that it is the difference from."""
    bases = tuple(
        StoredBlock(files[base.file], base.codec, base.offset, base.length, base.raw, base.stored)
        for base in place.bases
    )
    return StoredBlock(files[place.file], block.codec, place.offset, block.length, block.raw, block.stored, bases)


def missing_file(path: Path) -> CorruptCheckpointError:
    """Return the error for a file that the manifest lists and that does not exist."""
    return CorruptCheckpointError("the manifest lists this file, but it is missing", path=path)


def wrong_size(path: Path, size: int, expected: int) -> CorruptCheckpointError:
    """Return the error for a file that is longer or shorter than it was written."""
    problem = "was cut short" if size < expected else "has grown"
    return CorruptCheckpointError(f"the file {problem}: it holds {size:,} bytes, {expected:,} were written", path=path)


def occupied_bytes(status: os.stat_result) -> int:
    """Return the bytes of disk that the file system has allocated for a file, as ``du`` counts them.

    The last block counts in full, and a file system that compresses or leaves out zeros allocates fewer.
    """
    return status.st_blocks * 512  # the unit on every file system
