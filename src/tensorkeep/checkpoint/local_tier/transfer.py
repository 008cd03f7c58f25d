"""Copying a native checkpoint from a disk to an object store: its files as they are, under the names of a new save.

Nothing is decoded. The manifest is written again, and so is an index that names files. A file that an earlier
checkpoint shares by a hard link, and whose copy is in the store already, is not copied: the manifest refers to that
copy.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.plan import INDEX_SUFFIX
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import commit_to, publish
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.formats.native.pieces.records import Root
from tensorkeep.formats.native.records import REFERENCES, FileRecord, Manifest
from tensorkeep.io.buffers import ALIGNMENT, MINIMUM_BUDGET, BufferPool, round_up
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import object_name
from tensorkeep.io.objects.uploads import Upload, part_bytes
from tensorkeep.io.parallel import Cancellation, Meter
from tensorkeep.io.places import open_directory
from tensorkeep.io.source_file import SourceFile
from tensorkeep.paths import StorePath

_BESIDE = "../"
"""A file name that begins with it refers to an object of another checkpoint of the run."""

_PARTS_IN_MEMORY = 4
"""One is read while others are sent; of small parts, more fit into the least budget."""

Identity = tuple[int, int, int]
"""Device, inode and size of a file."""


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A checkpoint on a disk that a store has a copy of.

    ``digest`` is the checksum of its manifest. ``references`` has the copy of each of its files, by the file's name on
    the disk, as a checkpoint beside the copy refers to it: ``../step-000100/model-<id>.safetensors``.
    """

    path: Path
    digest: str
    references: Mapping[str, str]


class Throttle:
    """Limits the bytes that are sent per second, on average; None for no limit."""

    def __init__(self, bytes_per_second: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def wait(self, count: int, cancellation: Cancellation) -> None:
        """Wait until ``count`` more bytes may be sent; raises `Cancelled`."""
        if self._rate is not None:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
            cancellation.wait(begin - now)
        cancellation.check()


@dataclass(frozen=True, slots=True)
class Transfer:
    """How bytes are sent: how fast, until when, and a function of the bytes done and the total bytes."""

    throttle: Throttle
    cancellation: Cancellation
    progress: Callable[[int, int], None]


def copy_to_store(
    source: Path, destination: StorePath, transfer: Transfer, *, earlier: Iterable[StoredCopy] = (), overwrite: bool
) -> StoredCopy:
    """Copy a native checkpoint into a store; its manifest is written last and makes the copy visible.

    ``earlier`` are checkpoints of the same folder that have copies beside the destination.

    Raises NotACheckpointError if the source does not exist; CorruptCheckpointError if it is damaged or cannot be read;
    UnsupportedError if many ranks saved it; DestinationExistsError if the store has a checkpoint there, unless
    ``overwrite`` is given; StoreError if the store fails; `Cancelled`.
    """
    with closing(OpenFiles(source, OpenSettings(pool=BufferPool(MINIMUM_BUDGET)))) as opened:
        manifest = opened.manifest
        if isinstance(manifest, Root):
            raise UnsupportedError(
                "many ranks saved it together, and such a checkpoint is not uploaded",
                path=source,
                remedy="let the ranks save into the store",
            )
        with commit_to(destination, overwrite=overwrite) as commit:
            names, owners = _names_of_copies(opened, destination, commit.save_id, _shared_files(earlier))
            files = _copy_files(opened, names, destination, transfer)
            content = sealed.seal(_with_files(manifest, files))
            # A copy that no reader would accept must not be reported as uploaded.
            manifests.parse(content, destination / manifests.FILE_NAME)
            _check_references(files, owners, destination)
            transfer.cancellation.check()
            publish(commit, content)
        return _stored_copy(source, opened.identity(), manifest.files, files, destination)


def find_copy(source: Path, destination: StorePath) -> StoredCopy | None:
    """Return the copy of a checkpoint that a store has; None if what it has there is another checkpoint.

    Raises NotACheckpointError if either does not exist; CorruptCheckpointError if a manifest is damaged; StoreError.
    """
    with open_directory(source) as own, open_directory(destination) as stored:
        manifest, other = manifests.read(own), manifests.read(stored)
        if isinstance(manifest, Root) or isinstance(other, Root) or _unnamed(manifest) != _unnamed(other):
            return None
        digest = sealed.digest(sealed.read_content(own, manifests.FILE_NAME), wide=True)
        return _stored_copy(source, digest, manifest.files, other.files, destination)


def _unnamed(manifest: Manifest) -> Manifest:
    """Return a manifest without what a copy changes in it."""
    files = [
        FileRecord("", 0, 0, "") if _is_index(file) else msgspec.structs.replace(file, name="", origin="")
        for file in manifest.files
    ]
    features = sorted({*manifest.features} - {REFERENCES})
    return msgspec.structs.replace(manifest, files=files, features=features)


def _with_files(manifest: Manifest, files: list[FileRecord]) -> Manifest:
    """Return the manifest of a copy that has these files."""
    refers = any(file.name.startswith(_BESIDE) for file in files)
    features = [*manifest.features, REFERENCES] if refers else manifest.features
    return msgspec.structs.replace(manifest, files=files, features=features)


def _is_index(file: FileRecord) -> bool:
    return file.name.endswith(INDEX_SUFFIX)


def _stored_copy(
    path: Path, digest: str, files: Iterable[FileRecord], copies: Iterable[FileRecord], destination: StorePath
) -> StoredCopy:
    """Return the record of a copy, from the files of the checkpoint and those of the copy, in the same order."""
    references = {
        file.name: copy.name if copy.name.startswith(_BESIDE) else f"{_BESIDE}{destination.name}/{copy.name}"
        for file, copy in zip(files, copies, strict=True)
    }
    return StoredCopy(path, digest, references)


def _shared_files(earlier: Iterable[StoredCopy]) -> dict[Identity, tuple[str, str]]:
    """Return references to the copies of the files of earlier checkpoints that are still as they were copied.

    With each comes the name of a checkpoint in the store that has it.
    """
    found: dict[Identity, tuple[str, str]] = {}
    for copy in earlier:
        try:
            with Directory(copy.path) as directory:
                content = sealed.read_content(directory, manifests.FILE_NAME)
                if sealed.digest(content, wide=True) != copy.digest:
                    continue  # it was replaced
                for name, reference in copy.references.items():
                    status = directory.status(name)
                    found[status.st_dev, status.st_ino, status.st_size] = reference, copy.path.name
        except (OSError, TensorkeepError):
            continue  # it was deleted meanwhile, or is damaged: its files are copied again
    return found


def _names_of_copies(
    opened: OpenFiles, destination: StorePath, save_id: str, shared: Mapping[Identity, tuple[str, str]]
) -> tuple[list[str], set[str]]:
    """Return the name in the store of each file, and the checkpoints there whose copies are used.

    A copy is used if that checkpoint is still there: otherwise its objects may be deleted at any moment.
    """
    names: list[str] = []
    owners: set[str] = set()
    for record, status in zip(opened.records, opened.statuses, strict=True):
        # The file is open, so that no other one can have its inode.
        found = shared.get((status.st_dev, status.st_ino, status.st_size)) if record.origin else None
        if found and _exists(_manifest_of(found[1]), destination) and _exists(found[0], destination):
            names.append(found[0])
            owners.add(found[1])
        else:
            names.append(object_name(record.name, save_id))
    return names, owners


def _manifest_of(name: str) -> str:
    return f"{_BESIDE}{name}/{manifests.FILE_NAME}"


def _exists(reference: str, destination: Path) -> bool:
    with open_directory(destination) as directory:
        try:
            directory.status(reference)
        except FileNotFoundError:
            return False
    return True


def _check_references(files: Iterable[FileRecord], owners: Iterable[str], destination: StorePath) -> None:
    """Check that what a copy refers to, and the checkpoints that have it, still exist, just before it is visible.

    From then on, the grace period of a deletion spares it.
    """
    references = [file.name for file in files if file.name.startswith(_BESIDE)]
    for name in (*references, *map(_manifest_of, owners)):
        if not _exists(name, destination):
            raise StoreError(
                f"{name.removeprefix(_BESIDE)} was deleted while a checkpoint that shares it was uploaded",
                path=destination,
                remedy="upload it again",
            )


def _copy_files(
    opened: OpenFiles, names: Sequence[str], destination: StorePath, transfer: Transfer
) -> list[FileRecord]:
    """Copy the files whose names are new; return the records of all files of the copy."""
    records = [msgspec.structs.replace(record, name=name) for record, name in zip(opened.records, names, strict=True)]
    meter = Meter(sum(each.bytes for each in records if not each.name.startswith(_BESIDE)), transfer.progress)
    homes = {record.name: name for record, name in zip(opened.records, names, strict=True)}
    with BufferPool(copy_budget(max((file.size for file in opened.files), default=0))) as pool:
        for number, file in enumerate(opened.files):
            record = records[number]
            if record.name.startswith(_BESIDE):
                continue
            if _is_index(record):
                content = _renamed_index(file, record.head, homes)
                records[number] = FileRecord(record.name, len(content), len(content), sealed.digest(content))
                stores.put(destination / record.name, content)
                meter.add(record.bytes)
            else:
                _copy_file(file, destination / record.name, transfer, pool, meter)
    return records


def copy_budget(most_bytes: int) -> int:
    """Return the memory for copies of files of at most so many bytes, whose parts grow with them.

    Examples
    --------
    >>> copy_budget(1024**3) // 1024**2, copy_budget(1024**4) // 1024**2
    (64, 420)
    """
    return max(MINIMUM_BUDGET, _PARTS_IN_MEMORY * part_bytes(most_bytes))


def _copy_file(file: SourceFile, path: StorePath, transfer: Transfer, pool: BufferPool, meter: Meter) -> None:
    """Upload one file, with a few parts on their way at once: as many as the pool has buffers."""
    cancellation = transfer.cancellation
    upload = Upload(path, pool, cancellation, most_bytes=file.size)
    size = part_bytes(file.size)
    try:
        for at in range(0, file.size, size):
            count = min(size, file.size - at)
            transfer.throttle.wait(count, cancellation)
            memory = pool.acquire(max(round_up(count), 2 * ALIGNMENT), cancellation)
            try:
                upload.write(at, _read(file, at, count, memory.array), memory)
            finally:
                memory.release()
            meter.add(count)
        upload.finish(file.size)
    finally:
        upload.close()


def _read(file: SourceFile, at: int, count: int, memory: Bytes) -> Bytes:
    try:
        return file.fetch(at, count, memory)
    except StoreError as error:
        # The disk has failed, not the store, which can take other checkpoints.
        raise CorruptCheckpointError(f"cannot be read: {error.message}", path=file.path) from error


def _renamed_index(file: SourceFile, digest: str, names: Mapping[str, str]) -> bytes:
    """Return the index that Hugging Face tools read, with the names of the copies."""
    content = file.read(0, file.size)
    if sealed.digest(content) != digest:
        raise CorruptCheckpointError("the checksum of its content is wrong", path=file.path)
    index = msgspec.json.decode(content, type=dict[str, Any])
    index["weight_map"] = {key: names[home] for key, home in index["weight_map"].items()}
    return msgspec.json.encode(index)
