"""The directory of a native checkpoint: recognising it, committing it, foreign files, disk space."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, TensorkeepError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import StepRecord
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, INDEX_SUFFIX, SUFFIX
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.reader import missing_file, occupied_bytes, wrong_size
from tensorkeep.storage import first_bytes, names_in, read_directory, storage_of
from tensorkeep.storage.base import Directory, PendingCommit
from tensorkeep.storage.store_commit import TOMBSTONE_NAME, save_of
from tensorkeep.storage.system_errors import store_error, store_errors

T = TypeVar("T")

_SUFFIXES = "|".join(map(re.escape, (manifests.FILE_NAME, SUFFIX, CODED_SUFFIX, INDEX_SUFFIX)))
_OUR_NAMES = re.compile(rf".*({_SUFFIXES})|rank-\d{{5,}}\.json|{manifests.ATTACHED_NAMES}", re.DOTALL)
_SAVE_ID = re.compile(r"-[0-9a-f]{16}(?=\.)")


def _read(path: Path, read: Callable[[Directory], T]) -> T:
    def read_and_close(directory: Directory) -> T:
        found = read(directory)
        directory.close()
        return found

    return read_directory(path, read_and_close)


def is_native(path: Path) -> bool:
    """Return whether a path is a native checkpoint, undamaged or not, by the first bytes of its manifest."""
    # A damaged manifest is still one of ours: the user should hear of the damage, not of an unknown format.
    start = first_bytes(path / manifests.FILE_NAME, 4096) or b""
    return start.startswith(checksummed_json.OPENING) or b'"format":"tensorkeep"' in start


def is_ours(name: str) -> bool:
    return _OUR_NAMES.fullmatch(_SAVE_ID.sub("", name)) is not None


def foreign_names(path: Path) -> list[str]:
    """Return the names in the directory of a native checkpoint that do not belong to it."""
    names = names_in(path)
    # A damaged manifest lists nothing: then names are judged by their form.
    contents: ManifestContents | None = None
    with suppress(CorruptCheckpointError, UnsupportedError):
        contents = _read(path, read_contents)
    return foreign_among(names, contents, in_store=storage_of(path).remote)


def foreign_among(names: Iterable[str], contents: "ManifestContents | None", *, in_store: bool) -> list[str]:
    """Return the foreign ones among the names in a directory; ``contents`` is None for a damaged manifest."""
    if in_store:
        # The leftovers of other saves and of deleted steps belong to the checkpoint.
        names = [name for name in names if name != TOMBSTONE_NAME and save_of(name) is None]
    return sorted(name for name in names if not (is_ours(name) if contents is None else name in contents.sizes))


def listed_names(path: Path) -> list[str]:
    """Return the files that the manifest of a checkpoint lists, without its own; none if it is damaged."""
    try:
        contents = _read(path, read_contents)
    except (CorruptCheckpointError, UnsupportedError):
        return []
    return [name for name in contents.sizes if name != manifests.FILE_NAME]


class ManifestContents(NamedTuple):
    outline: manifests.Outline
    # File sizes by name; None for the manifest itself, which cannot list its own size.
    sizes: dict[str, int | None]


def read_contents(directory: Directory, manifest: str = manifests.FILE_NAME) -> ManifestContents:
    """Read what a manifest and its fragments list; ``manifest`` is its name. Raises as `manifests.read`."""
    outline = manifests.read_outline(directory, manifest)
    sizes: dict[str, int | None] = {manifest: None, **{file.name: file.bytes for file in outline.files}}
    # A root lists fragments, and only the fragments list the data files.
    if manifests.PIECES in outline.features:
        root = manifests.read_root(directory, manifest)
        sizes |= {record.name: record.bytes for record in root.fragments}
        sizes |= {file.name: file.bytes for file in manifests.read_files(directory, root)}
    return ManifestContents(outline, sizes)


def is_replaceable(path: Path) -> bool:
    """Return whether a path is a native checkpoint; DestinationExistsError if it holds foreign files."""
    if not is_native(path):
        return False
    # A replacement removes the old directory, so a user's file in it would be lost.
    foreign = foreign_names(path)
    if foreign:
        raise DestinationExistsError(
            f"holds {foreign[0]!r}, which does not belong to the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


def commit_to(destination: Path, *, overwrite: bool) -> PendingCommit:
    return storage_of(destination).commit(
        destination,
        directory=True,
        overwrite=overwrite,
        replaceable=is_replaceable,
        listed=listed_names,
        is_ours=is_ours,
    )


class CheckpointSummary(NamedTuple):
    outline: manifests.Outline
    files: list[os.stat_result]

    @property
    def nbytes(self) -> int:
        return sum(status.st_size for status in self.files)

    @property
    def own_bytes(self) -> int:
        # Other steps link the files that they share, so one link means that no other step has the file.
        return sum(occupied_bytes(status) for status in self.files if status.st_nlink == 1)


def step_record(path: Path) -> StepRecord | None:
    """Return what a manifest says of its step of a run; None without. Raises as `manifests.read`."""
    return _read(path, lambda directory: manifests.read_outline(directory, manifests.FILE_NAME).step)


def summarise(path: Path) -> CheckpointSummary:
    """Sum up a checkpoint, and compare its files with the sizes in the manifest; raises as `OpenFiles`."""
    return _read(path, lambda directory: summarise_contents(directory, read_contents(directory)))


def summarise_contents(directory: Directory, contents: ManifestContents) -> CheckpointSummary:
    files: list[os.stat_result] = []
    for name, size in contents.sizes.items():
        path = directory.path_of(name)
        try:
            status = directory.status(name)
        except FileNotFoundError as error:
            raise missing_file(path) from error
        except TensorkeepError:
            raise  # before OSError: some of our errors are OSErrors as well
        except OSError as error:
            raise store_error(error, path, "look at the file") from error
        # Only names and sizes: reading every byte is `verify`'s task.
        if size not in (None, status.st_size):
            raise wrong_size(path, status.st_size, size or 0)
        files.append(status)
    return CheckpointSummary(contents.outline, files)


def freed_bytes(checkpoints: Iterable[os.PathLike[str]]) -> int:
    """Return the bytes of disk that removing all ``checkpoints`` frees; StoreError if access is refused."""
    # A shared file is freed if the checkpoints hold all of its links.
    links: dict[tuple[int, int], int] = {}
    freed = 0
    for path in checkpoints:
        with store_errors(path, "look at the checkpoint"), os.scandir(path) as entries:
            files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
            statuses = [file.stat(follow_symlinks=False) for file in files]
        for status in statuses:
            identity = status.st_dev, status.st_ino
            links[identity] = links.get(identity, 0) + 1
            # The last link in sight is the last one at all: no checkpoint that stays has the file.
            if links[identity] == status.st_nlink:
                freed += occupied_bytes(status)
    return freed
