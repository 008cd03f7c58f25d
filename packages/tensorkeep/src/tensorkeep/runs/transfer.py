"""Copies a native checkpoint from a disk to an object store, without decoding its files."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.plan import INDEX_SUFFIX
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.manifest import REFERENCES, FileRecord, Manifest, Root
from tensorkeep.formats.native.reader import OpenFiles
from tensorkeep.paths import StorePath
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import open_directory, store_requests
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.buffers import ALIGNMENT, MINIMUM_BUDGET, BufferPool, round_up
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.object_store import Upload, part_bytes
from tensorkeep.storage.parallel import Cancellation, Meter
from tensorkeep.storage.store_commit import object_name

# A file name that begins like this refers to an object of another checkpoint of the run.
_BESIDE = "../"
# Of large files: the pool has at least MINIMUM_BUDGET, which suffices for eight parts of small files.
_PARTS_IN_MEMORY = 4
# Device, inode and size of a file.
FileIdentity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StoredCopy:
    path: Path
    # The checksum of the manifest on the disk.
    digest: str
    # References of a neighbouring step, `../step-000100/model-<id>.safetensors`, by file name on the disk.
    references: Mapping[str, str]


class Throttle:
    def __init__(self, bytes_per_second: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        # None: no limit.
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def wait(self, count: int, cancellation: Cancellation) -> None:
        """Wait until ``count`` more bytes may be sent; raises Cancelled."""
        if self._rate is not None:
            now = self._clock()
            # A part waits for the time of the parts before it, not for its own.
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
            cancellation.wait(begin - now)
        cancellation.check()


@dataclass(frozen=True, slots=True)
class Transfer:
    throttle: Throttle
    cancellation: Cancellation
    progress: Callable[[int, int], None]


def copy_to_store(
    source: Path, destination: StorePath, transfer: Transfer, *, earlier: Iterable[StoredCopy] = (), overwrite: bool
) -> StoredCopy:
    """Copy a native checkpoint into a store; ``earlier`` are copies of other checkpoints of the same folder."""
    with closing(OpenFiles(source, OpenSettings(pool=BufferPool(MINIMUM_BUDGET)))) as opened:
        manifest = opened.manifest
        if isinstance(manifest, Root):
            text = "many ranks saved it together, and such a checkpoint is not uploaded"
            raise UnsupportedError(text, path=source, remedy="let the ranks save into the store")
        with commit_to(destination, overwrite=overwrite) as commit:
            # A file that the store has from an earlier checkpoint is not sent again: the manifest refers to that copy.
            names, owners = _names_of_copies(opened, destination, commit.save_id, _shared_files(earlier))
            files = _copy_files(opened, names, destination, transfer)
            refers = any(file.name.startswith(_BESIDE) for file in files)
            features = [*manifest.features, REFERENCES] if refers else manifest.features
            content = checksummed_json.seal(msgspec.structs.replace(manifest, files=files, features=features))
            # A copy that no reader accepts must not be reported as uploaded: the disk would delete its step.
            manifests.parse(content, destination / manifests.FILE_NAME)
            _check_references(files, owners, destination)
            transfer.cancellation.check()
            # Last: the manifest makes the copy visible.
            commit.publish(content)
        return _stored_copy(source, opened.identity(), manifest.files, files, destination)


def find_copy(source: Path, destination: StorePath) -> StoredCopy | None:
    """Return the copy of a checkpoint that a store has; None if the destination is another checkpoint."""
    with open_directory(source) as own, open_directory(destination) as stored:
        manifest, other = manifests.read(own), manifests.read(stored)
        if isinstance(manifest, Root) or isinstance(other, Root) or _comparable(manifest) != _comparable(other):
            return None
        digest = checksummed_json.digest(checksummed_json.read_content(own, manifests.FILE_NAME), wide=True)
        return _stored_copy(source, digest, manifest.files, other.files, destination)


def _comparable(manifest: Manifest) -> Manifest:
    # An index names files, so a copy changes its bytes; other files keep their sizes and checksums.
    files = [
        FileRecord("", 0, 0, "") if _is_index(file) else msgspec.structs.replace(file, name="", origin="")
        for file in manifest.files
    ]
    features = sorted({*manifest.features} - {REFERENCES})
    return msgspec.structs.replace(manifest, files=files, features=features)


def _is_index(file: FileRecord) -> bool:
    return file.name.endswith(INDEX_SUFFIX)


def _stored_copy(
    path: Path, digest: str, files: Iterable[FileRecord], copies: Iterable[FileRecord], destination: StorePath
) -> StoredCopy:
    references = {
        file.name: copy.name if copy.name.startswith(_BESIDE) else f"{_BESIDE}{destination.name}/{copy.name}"
        # Both lists have the order of the manifest.
        for file, copy in zip(files, copies, strict=True)
    }
    return StoredCopy(path, digest, references)


def _shared_files(earlier: Iterable[StoredCopy]) -> dict[FileIdentity, tuple[str, str]]:
    """Return unchanged files of earlier checkpoints: the reference to the copy, and the step that has it."""
    found: dict[FileIdentity, tuple[str, str]] = {}
    for copy in earlier:
        try:
            with LocalDirectory(copy.path) as directory:
                content = checksummed_json.read_content(directory, manifests.FILE_NAME)
                if checksummed_json.digest(content, wide=True) != copy.digest:
                    continue  # it was replaced
                # A hard link has the inode of the file that was copied, so its bytes are in the store.
                for name, reference in copy.references.items():
                    status = directory.status(name)
                    found[status.st_dev, status.st_ino, status.st_size] = reference, copy.path.name
        except (OSError, TensorkeepError):
            continue  # it was deleted meanwhile, or is damaged: its files are copied again
    return found


def _names_of_copies(
    opened: OpenFiles, destination: StorePath, save_id: str, shared: Mapping[FileIdentity, tuple[str, str]]
) -> tuple[list[str], set[str]]:
    """Return the names of the files in the store, and the steps there that share their copies."""
    names: list[str] = []
    owners: set[str] = set()
    for record, status in zip(opened.records, opened.statuses, strict=True):
        # The inode identifies the file: it is open, so that no new file can have its inode.
        found = shared.get((status.st_dev, status.st_ino, status.st_size)) if record.origin else None
        # Only if the step still exists: the objects of a deleted step may go at any moment.
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
    # Just before the copy becomes visible. If the owner is deleted later, the grace period keeps its objects until a
    # sweep sees the new manifest.
    references = [file.name for file in files if file.name.startswith(_BESIDE)]
    for name in (*references, *map(_manifest_of, owners)):
        if not _exists(name, destination):
            text = f"{name.removeprefix(_BESIDE)} was deleted while a checkpoint that shares it was uploaded"
            raise StoreError(text, path=destination, remedy="upload it again")


def _copy_files(
    opened: OpenFiles, names: Sequence[str], destination: StorePath, transfer: Transfer
) -> list[FileRecord]:
    records = [msgspec.structs.replace(record, name=name) for record, name in zip(opened.records, names, strict=True)]
    meter = Meter(sum(each.bytes for each in records if not each.name.startswith(_BESIDE)), transfer.progress)
    homes = {record.name: name for record, name in zip(opened.records, names, strict=True)}
    # One pool for all files, so that the memory does not grow with their number. Larger files are sent in larger parts.
    largest = max((file.size for file in opened.files), default=0)
    with BufferPool(max(MINIMUM_BUDGET, _PARTS_IN_MEMORY * part_bytes(largest))) as pool:
        for number, file in enumerate(opened.files):
            record = records[number]
            if record.name.startswith(_BESIDE):
                continue
            if _is_index(record):
                content = _renamed_index(file, record.head, homes)
                records[number] = FileRecord(record.name, len(content), len(content), checksummed_json.digest(content))
                store_requests.put(destination / record.name, content)
                meter.add(record.bytes)
            else:
                _copy_file(file, destination / record.name, transfer, pool, meter)
    return records


def _copy_file(file: SourceFile, path: StorePath, transfer: Transfer, pool: BufferPool, meter: Meter) -> None:
    cancellation = transfer.cancellation
    # As many parts are sent at once as the pool has buffers.
    upload = Upload(path, pool, cancellation, most_bytes=file.size)
    size = part_bytes(file.size)
    try:
        # Reading is in this thread, and `upload` sends in others: `acquire` waits for a part that was sent.
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
        # The disk has failed. A StoreError would mean the store, and stop the uploads of other steps.
        raise CorruptCheckpointError(f"cannot be read: {error.message}", path=file.path) from error


def _renamed_index(file: SourceFile, digest: str, names: Mapping[str, str]) -> bytes:
    # An index names files, so its copy must name the objects.
    content = file.read(0, file.size)
    if checksummed_json.digest(content) != digest:
        raise CorruptCheckpointError("the checksum of its content is wrong", path=file.path)
    index = msgspec.json.decode(content, type=dict[str, Any])
    index["weight_map"] = {key: names[home] for key, home in index["weight_map"].items()}
    return msgspec.json.encode(index)
