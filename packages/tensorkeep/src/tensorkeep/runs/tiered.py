"""The steps of a run on a disk, which a background thread uploads to an object store."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, SupportsIndex, TypeVar

from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    first_line,
    warn_caller,
)
from tensorkeep.formats.native.directory import summarise
from tensorkeep.paths import StorePath, absolute, checked_path
from tensorkeep.runs.backends import LocalBackend, StepBackend, collect_failures
from tensorkeep.runs.object_store import StoreBackend
from tensorkeep.runs.pruned import PrunedStep
from tensorkeep.runs.retention import Keep, unwanted
from tensorkeep.runs.steps import Step, StepListing, UploadStatus, manifest_digest, step_numbers, step_path
from tensorkeep.runs.transfer import StoredCopy, Throttle, Transfer, copy_to_store, find_copy
from tensorkeep.storage import exists
from tensorkeep.storage.parallel import Cancellation, Cancelled, answer_within
from tensorkeep.units import check_count, counted, format_speed, parse_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long the first save waits for the store; see `TieredBackend.claim`.
_FIRST_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class LocalTier:
    """A folder of a disk in front of a run in an object store; an option of `CheckpointManager`.

    A step is saved to the disk, and uploaded in the background once it is durable. It is restored from the disk, or
    from the store if its copy on the disk is damaged or gone. The next process uploads what a killed process
    has left.

    Parameters
    ----------
    folder : path-like
    keep_local : int or None
        How many of the last steps stay on the disk, besides the steps that are not uploaded yet. None: the steps that
        the manager's rules keep.
    upload_bytes_per_second : int or str, optional
        Limit of the uploads, also as ``"100MB"``.

    Raises
    ------
    UsageError
        If the folder is a URL, or a number is not positive.

    Examples
    --------
    >>> from tensorkeep import LocalTier
    >>> tier = LocalTier("/nvme/run", keep_local=5, upload_bytes_per_second="200MB")
    >>> tier.bytes_per_second
    200000000
    """

    folder: PathLike
    keep_local: int | None = 2
    upload_bytes_per_second: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(checked_path(self.folder, stores=True), StorePath):
            raise UsageError("is a URL, and local= is for a folder of a disk", path=self.folder, remedy="give a path")
        if self.keep_local is not None:
            check_count("keep_local", self.keep_local)
        if self.bytes_per_second is not None:
            check_count("upload_bytes_per_second", self.bytes_per_second)

    @property
    def bytes_per_second(self) -> int | None:
        return None if self.upload_bytes_per_second is None else parse_bytes(self.upload_bytes_per_second)


class TieredBackend(StepBackend):
    """A folder of steps on a disk, and the copies of the steps in an object store."""

    def __init__(self, tier: LocalTier, store: StorePath, rule: Keep) -> None:
        super().__init__(absolute(checked_path(tier.folder)))
        self._disk = LocalBackend(self.root)
        self._store = StoreBackend(store)
        self._rule = rule
        self._keep_local = tier.keep_local
        self._uploader = Uploader(self.root, store, tier.bytes_per_second, self)
        self._claimed = False
        self._known: set[int] = set()  # steps that were in the store at the last look
        self._broken: set[int] = set()  # steps among them with an incomplete copy
        self._damaged: dict[int, str | None] = {}  # damaged steps, with the manifest's digest in the store
        self._saving: dict[int, bool] = {}  # steps that are being saved, and whether each replaces another one
        self._saved_last: int | None = None
        # Not `_deleting`: the thread that uploads needs this lock, and a deletion waits for that thread.
        self._disk_mutex = threading.RLock()

    # Finding steps

    def numbers(self) -> list[int]:
        if not self._claimed:
            self._known = set(self._store.numbers())
        return sorted({*self._disk.numbers(), *(self._known - self._damaged.keys())})

    def exists(self, path: Path) -> bool:
        if self._disk.exists(self._on_disk(path)):
            return True
        # A writer relies on what it knows of the store: its saves must not wait for a store that does not answer.
        return _number(path) in self._known if self._claimed else self._store.exists(path)

    def find(self, number: SupportsIndex) -> Path:
        for backend in (self._disk, self._store):
            path = backend.path_of(number)
            if backend.exists(path):
                return path
        return super().find(number)

    def listing(self) -> StepListing:
        """List the steps on the disk, and the further steps in the store; warn if the store does not answer."""
        disk = self._disk.listing()
        try:
            return self._with_store(disk)
        except StoreError as error:
            if not disk.steps:
                raise
            _warn(f"only the steps of {self.root} are found: {first_line(error)}")
            return disk

    def _with_store(self, disk: StepListing) -> StepListing:
        store = self._store.listing()
        self._broken = set(store.broken)
        self._known = {step.number for step in store.steps} | self._broken
        steps = {step.number: step for step in (*store.steps, *disk.steps)}
        broken = {number: error for number, error in {**store.broken, **disk.broken}.items() if number not in steps}
        return StepListing([steps[number] for number in sorted(steps)], MappingProxyType(broken))

    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        found = self.listing()
        steps: dict[int, Step | TensorkeepError] = {step.number: step for step in found.steps}
        yield from sorted((steps | {**found.broken}).items(), key=lambda each: -each[0])

    def read_nearest(self, path: Path, read: Callable[[Path], T]) -> T:
        errors: list[TensorkeepError] = []
        # The disk first: it is faster, and may have what the store does not.
        for copy in (self._on_disk(path), self._in_store(path)):
            try:
                found = read(copy)
            except (CorruptCheckpointError, NotACheckpointError, StoreError) as error:
                if isinstance(error, CorruptCheckpointError):
                    logger.warning("%s is damaged: %s", copy, first_line(error))
                errors.append(error)
            else:
                logger.info("read %s", copy)
                return found
        # A store that does not answer may have the step: training must not continue from an earlier step.
        errors.sort(key=lambda error: (isinstance(error, StoreError), isinstance(error, CorruptCheckpointError)))
        if isinstance(errors[-1], CorruptCheckpointError):
            self._damaged[_number(path)] = manifest_digest(self._in_store(path))
        raise errors[-1]

    # Saving steps

    def claim(self) -> None:
        with self._deleting:
            self._disk.claim()
            if self._claimed:
                return
            try:
                # A save needs the disk alone. It must not wait as long as requests to the store are repeated.
                self._known = {*answer_within(_FIRST_ANSWER_SECONDS, self._store.numbers)}
            except (StoreError, TimeoutError) as error:
                _warn(f"steps are saved to {self.root}, and uploaded later: {first_line(error)}")
            self._claimed = True
            self._uploader.start(look=True)

    def release(self) -> None:
        self._disk.release()
        self._claimed = False
        self._saving.clear()  # entries of failed saves

    def before_save(self, number: int, *, overwrite: bool) -> None:
        with self._disk_mutex:
            self._saving[number] = overwrite
            self._saved_last = number
            self._uploader.drop_copy(number)

    def after_save(self, number: int, rule: Keep) -> None:
        self._disk.pruned.saved(number, self.numbers)
        damaged, overwrite = self._damaged.pop(number, None), self._saving.get(number, False)
        # A damaged copy in the store is replaced, unless another process has replaced it meanwhile.
        overwrite = overwrite or (damaged is not None and damaged == manifest_digest(self._store.path_of(number)))
        self._uploader.add(number, overwrite=overwrite)
        # Only now: `clean_up` spares steps that are being saved, and steps that wait for their upload.
        self._saving.pop(number, None)

    def wait_for_uploads(self) -> None:
        if self._claimed:
            self._uploader.drain()
            self._uploader.raise_failure()

    def uploads(self) -> list[UploadStatus]:
        return self._uploader.statuses()

    def take_warnings(self) -> list[str]:
        found = self._store.take_warnings() + self._disk.take_warnings()
        failure = self._uploader.take_failure()
        if failure is not None:
            found.insert(0, f"steps are on the disk, and not in the store yet: {first_line(failure)}")
        error, self._undeleted = self._undeleted, None
        return found if error is None else [*found, f"an old step was not deleted from the disk: {error}"]

    # Called by the thread that uploads

    def find_left(self) -> None:
        """Find the steps that an earlier process has saved and not uploaded."""
        disk = self._disk.listing()
        found = self._with_store(disk).steps
        # Steps that the rule has deleted from the store may still be among the last ones on the disk.
        needless = self._unwanted(found) - self._known
        noted = self._uploader.pending() | self._uploader.stored() | {self._saved_last}
        for step in disk.steps:
            if step.number not in needless | noted:
                self._uploader.add_found(step.number)

    def still_wanted(self, waiting: list[int]) -> list[int]:
        # Steps may be saved faster than they are uploaded: a step that no rule keeps any more is not uploaded.
        needless = self._unwanted(self._with_store(self._disk.listing()).steps)
        return [number for number in waiting if number not in needless]

    def clean_up(self, uploaded: int) -> None:
        """Delete steps after an upload: from the store by the rule, from the disk what is whole in the store."""
        self._known.add(uploaded)
        self._store.pruned.saved(uploaded, self.numbers)
        self._store.apply_rule(self._rule, uploaded)
        try:
            disk = self._disk.listing()
            needless = self._unwanted(self._with_store(disk).steps)
            # The next incremental step shares files of the step that was uploaded last: an upload finds them by inode.
            kept = self._kept_on_disk(disk.steps) | {uploaded}
            gone = ((self._uploader.stored() - self._broken) | needless) - kept
            steps = [step for step in disk.steps if step.number in gone]
            self._disk.record(steps)
            # A step that no rule keeps may never have been uploaded.
            self._store.record([step for step in steps if step.number not in self._known])
            for number in gone:
                self._remove_from_disk(number)
        except TensorkeepError as error:
            self._undeleted = error

    def _unwanted(self, steps: list[Step]) -> set[int]:
        try:
            protect = () if self._saved_last is None else (self._saved_last,)
            return {step.number for step in unwanted(self._rule, steps, protect)}
        except TensorkeepError as error:
            self._undeleted = error  # the rule needs a metric that no step has
            return set()

    def _remove_from_disk(self, number: int) -> None:
        # The lock is held during the removal: a save of the same number waits in `before_save` until it is over.
        with self._disk_mutex:
            if number not in {*self._saving, *self._uploader.pending(), self._saved_last}:
                self._disk.remove(self._disk.path_of(number))
                self._uploader.drop_copy(number)

    def _kept_on_disk(self, steps: list[Step]) -> set[int | None]:
        # Not uploaded yet, or the base of the next incremental save.
        kept = {*self._uploader.pending(), self._saved_last}
        if self._keep_local is None:
            return kept.union({step.number for step in steps} - self._unwanted(steps))
        # By time: after a return to an earlier step, the steps that were saved last have lower numbers.
        by_age = sorted(steps, key=lambda step: (step.saved_at, step.number))
        return kept.union(step.number for step in by_age[-self._keep_local :])

    # Deleting steps

    def record(self, steps: Iterable[Step | PrunedStep]) -> None:
        found = list(steps)
        self._disk.record(found)
        self._store.record(found)

    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        return collect_failures(self._remove, paths, TensorkeepError)

    def _remove(self, path: Path) -> None:
        on_disk, in_store = self._on_disk(path), self._in_store(path)
        # Both are checked first, so that a step with foreign files loses neither copy.
        for backend, copy in ((self._disk, on_disk), (self._store, in_store)):
            if backend.exists(copy):
                for error in backend.not_removable([copy]).values():
                    raise error
        self._uploader.forget(_number(path))
        with self._disk_mutex:
            self._disk.remove(on_disk)
        self._store.remove(in_store)
        self._known.discard(_number(path))

    def sweep(self) -> None:
        self._store.sweep()

    def _on_disk(self, path: Path) -> Path:
        return self.root / path.name

    def _in_store(self, path: Path) -> Path:
        return self._store.root / path.name


def _number(path: Path) -> int:
    return step_numbers([path.name])[0]


def _warn(message: str) -> None:
    logger.info("%s", message)
    warn_caller(message)


class Uploader:
    """Uploads the steps of a folder in a background thread, by number, until no step waits or the store fails."""

    def __init__(self, root: Path, store: StorePath, bytes_per_second: int | None, backend: TieredBackend) -> None:
        self._root = root
        self._store = store
        self._throttle = Throttle(bytes_per_second)
        self._backend = backend
        # The thread ends when no step waits or the store has failed; `add` and `start` begin a new one. The lock is
        # always taken by `with self._lock`, never by `with self._changed`: a condition is entered by Python code, and
        # Ctrl-C could come between taking the lock and entering the block.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._cancellation = Cancellation()
        self._looked = False  # for steps that an earlier process has left
        self._waiting: dict[int, bool] = {}  # and whether each replaces another step of its number
        self._current: UploadStatus | None = None
        self._copies: dict[int, StoredCopy] = {}
        self._refused: dict[int, TensorkeepError] = {}  # steps that cannot be uploaded, while others can
        self._failure: BaseException | None = None
        self._process = os.getpid()

    # Called by the threads of the user and of saves

    def add(self, number: int, *, overwrite: bool) -> None:
        """Upload a saved step; ``overwrite`` replaces the step of this number in the store."""
        with self._lock:
            self._copies.pop(number, None)
            self._refused.pop(number, None)
            self._waiting[number] = overwrite
        self.start()

    def start(self, *, look: bool = False) -> None:
        with self._lock:
            # `look`: steps may have been left on the disk since the last look.
            self._looked = self._looked and not look
            if self._thread is not None:
                return
            self._failure = None
            if self._looked and not self._waiting:
                return
            self._cancellation = Cancellation()
            try:
                # Not a daemon: an interpreter that exits waits for the uploads.
                self._thread = threading.Thread(target=self._run, name="tensorkeep-uploads")
                self._thread.start()
                return
            except RuntimeError:
                # No thread can start: the interpreter exits, and waits for this thread, which has saved a step.
                self._thread = threading.current_thread()
            except BaseException:
                # An interrupt: nobody must wait for a thread that may never run. If it does run, `_run` ends at once.
                self._thread = None
                raise
        self._run()

    def drain(self) -> None:
        """Wait until all steps are uploaded or the store has failed; Ctrl-C cancels the uploads."""
        try:
            while True:
                self.start()
                with self._lock:
                    while self._thread is not None:
                        self._changed.wait()
                    # Otherwise the thread has ended because of an earlier Ctrl-C: start another one.
                    if self._failure is not None or not self._waiting:
                        return
        except KeyboardInterrupt:
            self._cancellation.cancel()
            raise

    def forget(self, number: int) -> None:
        """Drop a step that will be deleted; waits if it is being uploaded."""
        with self._lock:
            while self._current is not None and self._current.step == number:
                self._changed.wait()
            for steps in (self._waiting, self._refused, self._copies):
                steps.pop(number, None)

    def drop_copy(self, number: int) -> None:
        with self._lock:
            # The step is saved again, or deleted from the disk.
            self._copies.pop(number, None)

    def stored(self) -> set[int]:
        with self._lock:
            return set(self._copies)

    def pending(self) -> set[int]:
        with self._lock:
            return {*self._waiting, *self._refused}

    def statuses(self) -> list[UploadStatus]:
        with self._lock:
            reason = None if self._failure is None else str(self._failure)
            state: Literal["waiting", "failed"] = "waiting" if reason is None else "failed"
            found = {number: UploadStatus(number, state, error=reason) for number in self._waiting}
            found |= {number: UploadStatus(number, "failed", error=str(why)) for number, why in self._refused.items()}
            if self._current is not None:
                found[self._current.step] = self._current
            return [found[number] for number in sorted(found)]

    def take_failure(self) -> BaseException | None:
        return _unreported.pop(self, None)

    def raise_failure(self) -> None:
        """Raise StoreError if steps could not be uploaded; it names the steps and the reason."""
        with self._lock:
            left = sorted({*self._waiting, *self._refused})
            reason = self._failure or next(iter(self._refused.values()), None)
        self.take_failure()
        if reason is None:
            return
        what = f"{counted(len(left), 'step')} ({', '.join(map(str, left))})" if left else "its steps"
        text = f"{what} could not be uploaded from {self._root}: {first_line(reason)}"
        remedy = "the next process that saves into this run uploads those that are on the disk"
        raise StoreError(text, path=self._store, remedy=remedy) from reason

    # Called by the thread that uploads

    def add_found(self, number: int) -> None:
        """Add a step that an earlier process has saved; it waits unless the store has a whole copy."""
        try:
            if not self._look_at_copy(number, replace=True):
                source, destination = self._paths(number)
                text, remedy = "another step of this number is in the store", f"delete it, or {source}"
                self._refuse(number, DestinationExistsError(text, path=destination, remedy=remedy))
        except NotACheckpointError:
            with self._lock:
                self._waiting.setdefault(number, False)
        except (CorruptCheckpointError, UnsupportedError) as error:
            self._refuse(number, error)

    def _look_at_copy(self, number: int, *, replace: bool) -> bool:
        """Record the copy in the store, or replace a damaged one; False for another step, or one that stays damaged."""
        source, destination = self._paths(number)
        copy = find_copy(source, destination)
        if copy is None:
            return False
        try:
            summarise(destination)
        except CorruptCheckpointError as error:
            if not replace:
                return False
            logger.warning("step %d of %s is uploaded again: %s", number, self._root, first_line(error))
            with self._lock:
                self._waiting.setdefault(number, True)
        else:
            self._record_copy(number, copy)
        return True

    def _run(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._thread is not thread:
                return  # its start was interrupted
        try:
            if not self._looked:
                self._backend.find_left()
                self._looked = True
            while (found := self._next()) is not None:
                self._upload(*found)
        except Cancelled:
            pass
        except BaseException as error:
            logger.info("steps of %s are not uploaded: %s", self._root, first_line(error))
            with self._lock:
                self._failure = _unreported[self] = error
        finally:
            with self._lock:
                if self._thread is thread:
                    self._current = self._thread = None
                self._changed.notify_all()

    def _next(self) -> tuple[int, bool] | None:
        """Return the next step, and whether it replaces another one; None ends the thread."""
        with self._lock:
            waiting = sorted(self._waiting)
        wanted = self._backend.still_wanted(waiting) if len(waiting) > 1 else waiting
        with self._lock:
            self._current = None
            for number in {*waiting} - {*wanted}:
                self._waiting.pop(number, None)
            self._changed.notify_all()
            if not self._waiting:
                # While the lock is held: a step that is added after this starts a new thread.
                self._thread = None
                return None
            number = min(self._waiting)
            self._current = UploadStatus(number, "uploading")
            return number, self._waiting.pop(number)

    def _upload(self, number: int, overwrite: bool) -> None:
        source, destination = self._paths(number)
        started = time.perf_counter()
        try:
            self._record_copy(number, self._copy(number, overwrite=overwrite))
        except DestinationExistsError as error:
            # Another process may have uploaded the same step. A damaged copy that could not be replaced stays.
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
                # Deleted by somebody else: `forget` waits for the upload to end.
                self._refuse(number, NotFoundError("was deleted before it was uploaded", path=source))
                return
            # The store has failed: the step waits for the next thread, or waits already if it was saved again.
            with self._lock:
                self._waiting.setdefault(number, overwrite)
            raise
        sent = self._current.bytes_total if self._current else 0
        logger.info("uploaded %s to %s: %s", source, destination, format_speed(sent, time.perf_counter() - started))
        self._backend.clean_up(number)

    def _copy(self, number: int, *, overwrite: bool) -> StoredCopy:
        source, destination = self._paths(number)
        transfer = Transfer(self._throttle, self._cancellation, partial(self._note_progress, number))
        with self._lock:
            earlier = list(self._copies.values())
        try:
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)
        except StoreError as error:
            # Once more, because not every request is repeated by itself.
            logger.info("step %d of %s is uploaded again: %s", number, self._root, first_line(error))
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)

    def _paths(self, number: int) -> tuple[Path, StorePath]:
        source = step_path(self._root, number)
        return source, self._store / source.name

    def _note_progress(self, number: int, done: int, total: int) -> None:
        with self._lock:
            self._current = UploadStatus(number, "uploading", done, total)

    def _record_copy(self, number: int, copy: StoredCopy) -> None:
        with self._lock:
            # A step that waits was saved again since it was copied.
            if number not in self._waiting:
                self._copies[number] = copy

    def _refuse(self, number: int, error: TensorkeepError) -> None:
        logger.info("step %d of %s cannot be uploaded: %s", number, self._root, first_line(error))
        with self._lock:
            _unreported[self] = error
            if number not in self._waiting:
                self._refused[number] = error


# The last failures that no method has returned or raised yet. They are logged at exit.
_unreported: dict[Uploader, BaseException] = {}


def _log_unreported() -> None:
    for uploader, error in list(_unreported.items()):
        if uploader._process == os.getpid():  # a forked child exits as well
            logger.error("NOT UPLOADED: steps of %s: %s", uploader._root, first_line(error))


atexit.register(_log_unreported)
