"""The directory of a native checkpoint: detection, summary, foreign files, and the disk space that a removal frees."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, INDEX_SUFFIX, SUFFIX
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.open_files import missing_file, occupied_bytes, wrong_size
from tensorkeep.formats.native.pieces.fragments import read_files
from tensorkeep.formats.native.records import PIECES
from tensorkeep.formats.probe import first_bytes, names_in
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import store_error, store_errors
from tensorkeep.io.places import open_directory, read_directory

_SUFFIXES = "|".join(map(re.escape, (manifests.FILE_NAME, SUFFIX, CODED_SUFFIX, INDEX_SUFFIX)))
_OUR_NAMES = re.compile(rf".*({_SUFFIXES})|rank-\d{{5,}}\.json", re.DOTALL)


def is_native(path: Path) -> bool:
    """Return whether a path is a native checkpoint, undamaged or not, by the first bytes of its manifest."""
    start = first_bytes(path / manifests.FILE_NAME, 4096) or b""
    return start.startswith(sealed.OPENING) or b'"format":"tensorkeep"' in start


def foreign_names(path: Path) -> list[str]:
    """Return the names in the directory of a native checkpoint that do not belong to it.

    Raises NotACheckpointError, StoreError if the manifest is missing or cannot be read.
    """
    try:
        with open_directory(path) as directory:
            _, sizes = _read_sizes(directory)
    except (CorruptCheckpointError, UnsupportedError):
        # A damaged manifest lists nothing that can be relied on.
        return [name for name in names_in(path) if not _OUR_NAMES.fullmatch(name)]
    return [name for name in names_in(path) if name not in sizes]


def _read_sizes(directory: Directory) -> tuple[manifests.Outline, dict[str, int | None]]:
    """Return the outline of a checkpoint, and the names of its files with their sizes; None is that of the manifest."""
    outline = manifests.read_outline(directory)
    sizes: dict[str, int | None] = {manifests.FILE_NAME: None, **{file.name: file.bytes for file in outline.files}}
    if PIECES in outline.features:
        root = manifests.read_root(directory)
        sizes |= {record.name: record.bytes for record in root.fragments}
        sizes |= {file.name: file.bytes for file in read_files(directory, root)}
    return outline, sizes


def is_replaceable(path: Path) -> bool:
    """Return whether a path is a native checkpoint and nothing else.

    Raises DestinationExistsError if it holds files that do not belong to the checkpoint.
    """
    if not is_native(path):
        return False
    foreign = foreign_names(path)
    if foreign:
        raise DestinationExistsError(
            f"holds {foreign[0]!r}, which does not belong to the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


class Summary(NamedTuple):
    """The outline of a checkpoint, and the status of its files."""

    outline: manifests.Outline
    files: list[os.stat_result]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(status.st_size for status in self.files)

    @property
    def own_bytes(self) -> int:
        """The disk space of the files that nothing else links to."""
        return sum(occupied_bytes(status) for status in self.files if status.st_nlink == 1)


def summarise(path: Path) -> Summary:
    """Sum up a checkpoint, and check that its files exist and have the sizes that the manifest lists.

    Raises the errors of `OpenFiles`.
    """
    return read_directory(path, _summarise)


def _summarise(directory: Directory) -> Summary:
    outline, sizes = _read_sizes(directory)
    files: list[os.stat_result] = []
    for name, size in sizes.items():
        path = directory.path / name
        try:
            status = directory.status(name)
        except FileNotFoundError as error:
            raise missing_file(path) from error
        except OSError as error:
            raise store_error(error, path, "look at the file") from error
        if size not in (None, status.st_size):
            raise wrong_size(path, status.st_size, size or 0)
        files.append(status)
    directory.close()
    return Summary(outline, files)


def freed_bytes(checkpoints: Iterable[os.PathLike[str]]) -> int:
    """Return the bytes of disk that removing all of these checkpoints would free.

    A file that several of them share is freed if they hold all of its links.

    Raises StoreError if the operating system refuses access.
    """
    links: dict[tuple[int, int], int] = {}
    freed = 0
    for path in checkpoints:
        with store_errors(path, "look at the checkpoint"), os.scandir(path) as entries:
            files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
            statuses = [file.stat(follow_symlinks=False) for file in files]
        for status in statuses:
            identity = status.st_dev, status.st_ino
            links[identity] = links.get(identity, 0) + 1
            if links[identity] == status.st_nlink:
                freed += occupied_bytes(status)
    return freed
