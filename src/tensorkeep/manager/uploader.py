"""Copying a native checkpoint from a disk to an object store: its files as they are, under the names of a new save.

Nothing is decoded. The manifest is written again, and so is an index that names files. A file that an earlier
checkpoint shares by a hard link, and whose copy is in the store already, is not copied: the manifest refers to that
copy.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.plan import INDEX_SUFFIX
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import commit_to, summarise
from tensorkeep.formats.native.manifest import REFERENCES, FileRecord, Manifest, Root
from tensorkeep.formats.native.reader import OpenFiles
from tensorkeep.paths import StorePath
from tensorkeep.runs.steps import UploadStatus, step_path
from tensorkeep.storage import exists, open_directory, store_requests
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.buffers import ALIGNMENT, MINIMUM_BUDGET, BufferPool, round_up
from tensorkeep.storage.direct_io import Bytes
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.object_store import Upload, part_bytes
from tensorkeep.storage.parallel import Cancellation, Cancelled, Meter
from tensorkeep.storage.store_commit import object_name
from tensorkeep.units import counted, format_speed

# Copying a native checkpoint from a disk to an object store: its files as they are, under the names of a new save.
#
# Nothing is decoded. The manifest is written again, and so is an index that names files. A file that an earlier
# checkpoint shares by a hard link, and whose copy is in the store already, is not copied: the manifest refers to that
# copy.

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
            content = checksummed_json.seal(_with_files(manifest, files))
            # A copy that no reader would accept must not be reported as uploaded.
            manifests.parse(content, destination / manifests.FILE_NAME)
            _check_references(files, owners, destination)
            transfer.cancellation.check()
            commit.publish(content)
        return _stored_copy(source, opened.identity(), manifest.files, files, destination)


def find_copy(source: Path, destination: StorePath) -> StoredCopy | None:
    """Return the copy of a checkpoint that a store has; None if what it has there is another checkpoint.

    Raises NotACheckpointError if either does not exist; CorruptCheckpointError if a manifest is damaged; StoreError.
    """
    with open_directory(source) as own, open_directory(destination) as stored:
        manifest, other = manifests.read(own), manifests.read(stored)
        if isinstance(manifest, Root) or isinstance(other, Root) or _unnamed(manifest) != _unnamed(other):
            return None
        digest = checksummed_json.digest(checksummed_json.read_content(own, manifests.FILE_NAME), wide=True)
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
            with LocalDirectory(copy.path) as directory:
                content = checksummed_json.read_content(directory, manifests.FILE_NAME)
                if checksummed_json.digest(content, wide=True) != copy.digest:
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
                records[number] = FileRecord(record.name, len(content), len(content), checksummed_json.digest(content))
                store_requests.put(destination / record.name, content)
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
    if checksummed_json.digest(content) != digest:
        raise CorruptCheckpointError("the checksum of its content is wrong", path=file.path)
    index = msgspec.json.decode(content, type=dict[str, Any])
    index["weight_map"] = {key: names[home] for key, home in index["weight_map"].items()}
    return msgspec.json.encode(index)


# The uploads of a run's steps, from a folder on a disk to an object store, by one background thread.

logger = logging.getLogger(__name__)


def in_short(error: BaseException) -> str:
    """Return what an error says, without its remedy, for another message."""
    return str(error).partition("\n")[0] or type(error).__name__


class Uploader:
    """Uploads the steps of a folder, by their numbers, until none waits or the store fails.

    A thread does so, which ends then; `add` and `start` begin again. An interpreter that exits waits for it.

    In the thread, ``prepare`` is called until it has succeeded, to find the steps that earlier processes have left
    (`add_found`); ``choose`` with the numbers that wait, if they are several, to return those that are still wanted;
    and ``uploaded`` after each step.
    """

    def __init__(
        self,
        root: Path,
        store: StorePath,
        bytes_per_second: int | None,
        *,
        prepare: Callable[[], None],
        choose: Callable[[list[int]], list[int]],
        uploaded: Callable[[int], None],
    ) -> None:
        self._root = root
        self._store = store
        self._throttle = Throttle(bytes_per_second)
        self._prepare = prepare
        self._choose = choose
        self._uploaded = uploaded
        # Ctrl-C cannot come between taking a plain lock and entering its block; a condition is entered by Python code.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._cancellation = Cancellation()
        self._prepared = False
        self._waiting: dict[int, bool] = {}  # with whether another step of the number is replaced
        self._current: UploadStatus | None = None
        self._copies: dict[int, StoredCopy] = {}
        self._refused: dict[int, TensorkeepError] = {}  # steps that cannot be uploaded, though the store works
        self._failure: BaseException | None = None
        self._process = os.getpid()

    # Called in the threads of the user and of saves

    def add(self, number: int, *, overwrite: bool) -> None:
        """Upload a step that was saved, and all that wait; ``overwrite`` one of this number that the store has."""
        with self._lock:
            self._copies.pop(number, None)
            self._refused.pop(number, None)
            self._waiting[number] = overwrite
        self.start()

    def start(self, *, look: bool = False) -> None:
        """Begin to upload what waits, unless that is being done; with ``look``, after another `prepare`."""
        with self._lock:
            self._prepared = self._prepared and not look
            if self._thread is not None:
                return
            self._failure = None
            if self._prepared and not self._waiting:
                return
            self._cancellation = Cancellation()
            try:
                self._thread = threading.Thread(target=self._run, name="tensorkeep-uploads")
                self._thread.start()
                return
            except RuntimeError:
                # The interpreter exits, and waits for the thread of a save, which is this one.
                self._thread = threading.current_thread()
            except BaseException:
                # Nobody must wait for a thread that may never run; one that does run ends at once.
                self._thread = None
                raise
        self._run()

    def drain(self) -> None:
        """Upload what waits, until that is done or the store has failed; Ctrl-C ends the waiting and the uploads."""
        try:
            while True:
                self.start()
                with self._lock:
                    while self._thread is not None:
                        self._changed.wait()
                    # Else the thread was about to end after an earlier Ctrl-C.
                    if self._failure is not None or not self._waiting:
                        return
        except KeyboardInterrupt:
            self._cancellation.cancel()
            raise

    def forget(self, number: int) -> None:
        """Do not upload a step, since it is to be deleted; one that is being uploaded is waited for."""
        with self._lock:
            while self._current is not None and self._current.step == number:
                self._changed.wait()
            for steps in (self._waiting, self._refused, self._copies):
                steps.pop(number, None)

    def drop_copy(self, number: int) -> None:
        """Forget the copy of a step that is saved again, or deleted from the disk."""
        with self._lock:
            self._copies.pop(number, None)

    def stored(self) -> set[int]:
        """Return the steps of the folder that the store has a copy of."""
        with self._lock:
            return set(self._copies)

    def pending(self) -> set[int]:
        """Return the steps that wait, or cannot be uploaded."""
        with self._lock:
            return {*self._waiting, *self._refused}

    def statuses(self) -> list[UploadStatus]:
        """Return the steps that are not in the store yet, by number."""
        with self._lock:
            reason = None if self._failure is None else str(self._failure)
            state: Literal["waiting", "failed"] = "waiting" if reason is None else "failed"
            found = {number: UploadStatus(number, state, error=reason) for number in self._waiting}
            found |= {number: UploadStatus(number, "failed", error=str(why)) for number, why in self._refused.items()}
            if self._current is not None:
                found[self._current.step] = self._current
            return [found[number] for number in sorted(found)]

    def take_failure(self) -> BaseException | None:
        """Return the reason of the last failure, unless it was returned or raised before."""
        return _unreported.pop(self, None)

    def raise_failure(self) -> None:
        """Raise StoreError with the steps that could not be uploaded, and the reason."""
        with self._lock:
            left = sorted({*self._waiting, *self._refused})
            reason = self._failure or next(iter(self._refused.values()), None)
        self.take_failure()
        if reason is None:
            return
        what = f"{counted(len(left), 'step')} ({', '.join(map(str, left))})" if left else "its steps"
        raise StoreError(
            f"{what} could not be uploaded from {self._root}: {in_short(reason)}",
            path=self._store,
            remedy="the next process that saves into this run uploads those that are on the disk",
        ) from reason

    # Called in the thread that uploads

    def add_found(self, number: int) -> None:
        """Note a step that an earlier process has saved: the store has a whole copy of it, or it waits."""
        try:
            if not self._look_at_copy(number, replace=True):
                self._refuse(number, self._conflict(number))
        except NotACheckpointError:
            with self._lock:
                self._waiting.setdefault(number, False)
        except (CorruptCheckpointError, UnsupportedError) as error:
            self._refuse(number, error)

    def _look_at_copy(self, number: int, *, replace: bool) -> bool:
        """Note the copy in the store, or with ``replace`` that the step waits to replace a damaged one.

        Returns False if neither is so, as of another step. Raises the errors of `find_copy`.
        """
        source, destination = self._paths(number)
        copy = find_copy(source, destination)
        if copy is None:
            return False
        try:
            summarise(destination)
        except CorruptCheckpointError as error:
            if not replace:
                return False
            logger.warning("step %d of %s is uploaded again: %s", number, self._root, in_short(error))
            with self._lock:
                self._waiting.setdefault(number, True)
        else:
            self._note_copy(number, copy)
        return True

    def _run(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._thread is not thread:
                return  # its start was interrupted
        try:
            if not self._prepared:
                self._prepare()
                self._prepared = True
            while (found := self._next()) is not None:
                self._upload(*found)
        except Cancelled:
            pass
        except BaseException as error:
            logger.info("steps of %s are not uploaded: %s", self._root, in_short(error))
            with self._lock:
                self._failure = _unreported[self] = error
        finally:
            with self._lock:
                if self._thread is thread:
                    self._current = self._thread = None
                self._changed.notify_all()

    def _next(self) -> tuple[int, bool] | None:
        """Return the next step, and whether it replaces another one; None if no step waits, which ends the thread."""
        with self._lock:
            waiting = sorted(self._waiting)
        wanted = self._choose(waiting) if len(waiting) > 1 else waiting
        with self._lock:
            self._current = None
            for number in {*waiting} - {*wanted}:
                self._waiting.pop(number, None)
            self._changed.notify_all()
            if not self._waiting:
                # In the same moment, so that a step which is added now begins a new thread.
                self._thread = None
                return None
            number = min(self._waiting)
            self._current = UploadStatus(number, "uploading")
            return number, self._waiting.pop(number)

    def _upload(self, number: int, overwrite: bool) -> None:
        source, destination = self._paths(number)
        started = time.perf_counter()
        try:
            self._note_copy(number, self._copy(number, overwrite=overwrite))
        except DestinationExistsError as error:
            # Others may have uploaded this very step. A damaged copy that could not be replaced is not tried again.
            with suppress(NotACheckpointError):
                if self._look_at_copy(number, replace=not overwrite):
                    return
            self._refuse(number, error)
            return
        except (CorruptCheckpointError, UnsupportedError) as error:
            self._refuse(number, error)
            return
        except BaseException as error:
            if isinstance(error, NotACheckpointError) and not exists(source):
                # Not by `forget`, which waits for this.
                self._refuse(number, NotFoundError("was deleted before it was uploaded", path=source))
                return
            with self._lock:
                self._waiting.setdefault(number, overwrite)
            raise
        sent = self._current.bytes_total if self._current else 0
        logger.info("uploaded %s to %s: %s", source, destination, format_speed(sent, time.perf_counter() - started))
        self._uploaded(number)

    def _copy(self, number: int, *, overwrite: bool) -> StoredCopy:
        """Copy a step, at a second attempt if a request fails once: not every one is repeated below."""
        source, destination = self._paths(number)
        transfer = Transfer(self._throttle, self._cancellation, partial(self._note_progress, number))
        with self._lock:
            earlier = list(self._copies.values())
        try:
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)
        except StoreError as error:
            logger.info("step %d of %s is uploaded again: %s", number, self._root, in_short(error))
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)

    def _paths(self, number: int) -> tuple[Path, StorePath]:
        source = step_path(self._root, number)
        return source, self._store / source.name

    def _note_progress(self, number: int, done: int, total: int) -> None:
        with self._lock:
            self._current = UploadStatus(number, "uploading", done, total)

    def _conflict(self, number: int) -> TensorkeepError:
        source, destination = self._paths(number)
        return DestinationExistsError(
            "another step of this number is in the store", path=destination, remedy=f"delete it, or {source}"
        )

    def _note_copy(self, number: int, copy: StoredCopy) -> None:
        with self._lock:
            # Unless it was saved again meanwhile.
            if number not in self._waiting:
                self._copies[number] = copy

    def _refuse(self, number: int, error: TensorkeepError) -> None:
        """Note a step that cannot be uploaded, while others can."""
        logger.info("step %d of %s cannot be uploaded: %s", number, self._root, in_short(error))
        with self._lock:
            _unreported[self] = error
            if number not in self._waiting:
                self._refused[number] = error


_unreported: dict[Uploader, BaseException] = {}
"""The last failure of each uploader for which no method has returned or raised it yet."""


def _log_unreported() -> None:
    for uploader, error in list(_unreported.items()):
        if uploader._process == os.getpid():
            logger.error("NOT UPLOADED: steps of %s: %s", uploader._root, in_short(error))


atexit.register(_log_unreported)
