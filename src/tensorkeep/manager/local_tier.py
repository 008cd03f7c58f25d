"""The steps of a run on a disk and in an object store: the place of a `CheckpointManager` with ``local=``."""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import SupportsIndex, TypeVar

from tensorkeep.checkpoint.saving import check_store
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PathLike,
    StoreError,
    TensorkeepError,
    UsageError,
    stack_level_of_caller,
)
from tensorkeep.formats.native.directory import CheckpointSummary
from tensorkeep.manager.uploader import Uploader, in_short
from tensorkeep.paths import StorePath, as_path, checked_path
from tensorkeep.ranks.group import Ranks
from tensorkeep.runs.backends import DiskPlace
from tensorkeep.runs.folder import StepFolder
from tensorkeep.runs.retention import Keep, unwanted
from tensorkeep.runs.steps import (
    Garbage,
    Step,
    StepListing,
    StepPlace,
    UploadStatus,
    manifest_digest,
    step_numbers,
)
from tensorkeep.storage import storage_of
from tensorkeep.storage.parallel import answer_within
from tensorkeep.units import check_count, parse_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE_SECONDS = 1.0
"""For so long the first save waits for the store; see `TieredPlace.claim`."""


def local_tier(
    root: PathLike,
    keep: Keep,
    keep_local: int | None,
    bytes_per_second: int | str | None,
    ranks: Ranks | None,
) -> Callable[[Path], StepPlace]:
    """Return what makes the place of the steps of a manager with ``local=``, given that folder.

    Raises UsageError if the root is not in an object store, for many ranks, or if a number is not positive;
    UnsupportedError if the store is only read from.
    """
    store = as_path(checked_path(root, stores=True))
    if not isinstance(store, StorePath):
        raise UsageError(
            "local= is for a run in an object store",
            path=root,
            remedy="give a URL such as s3://bucket/run, or no local=",
        )
    check_store(store, "native")
    if ranks is not None:
        raise UsageError("local= and group= exclude each other", remedy="leave one out: ranks save into the store")
    if keep_local is not None:
        check_count("keep_local", keep_local)
    speed = None if bytes_per_second is None else parse_bytes(bytes_per_second)
    if speed is not None:
        check_count("upload_bytes_per_second", speed)

    def make(local: Path) -> StepPlace:
        if storage_of(local).remote:
            raise UsageError("is a URL, and local= is for a folder of a disk", path=local, remedy="give a path")
        return TieredPlace(local, store, keep, keep_local=keep_local, bytes_per_second=speed)

    return make


class TieredPlace(StepPlace):
    """A folder of steps on a disk, which are uploaded to an object store after they were saved.

    Steps are saved to the disk, and read from there if it has them. After each upload, ``keep`` chooses which steps
    remain in the store. On the disk remain the ``keep_local`` steps that were saved last, or those that ``keep``
    chooses if it is None; those that are still to be uploaded; and the last one that was, whose files the next
    incremental step shares.
    """

    def __init__(
        self, local: Path, store: StorePath, keep: Keep, *, keep_local: int | None, bytes_per_second: int | None
    ) -> None:
        super().__init__(local)
        self._disk = DiskPlace(local)
        self._run_in_store = StepFolder(store)
        self._store = self._run_in_store.place
        self._keep = keep
        self._keep_local = keep_local
        self._uploader = Uploader(
            local, store, bytes_per_second, prepare=self._find_left, choose=self._choose, uploaded=self._clean_up
        )
        self._claimed = False
        self._known: set[int] = set()  # the steps in the store, when it was looked at last
        self._broken: set[int] = set()  # those of them whose copy in the store is not whole
        self._damaged: dict[int, str | None] = {}  # with the digests of the manifests in the store
        self._saving: dict[int, bool] = {}  # the steps that are being saved, with whether each replaces another one
        self._saved_last: int | None = None
        self._not_deleted: TensorkeepError | None = None
        self._mutex = threading.RLock()

    # Finding steps

    def numbers(self) -> list[int]:
        if not self._claimed:
            self._known = set(self._store.numbers())
        return sorted({*self._disk.numbers(), *(self._known - self._damaged.keys())})

    def exists(self, path: Path) -> bool:
        """Return whether the disk or the store has a step; a writer relies on what it knows of the store."""
        if self._disk.exists(self._on_disk(path)):
            return True
        return _number(path) in self._known if self._claimed else self._store.exists(path)

    def existing(self, number: SupportsIndex) -> Path:
        for place in (self._disk, self._store):
            path = place.path_of(number)
            if place.exists(path):
                return path
        return super().existing(number)

    def listing(self) -> StepListing:
        """Return the steps of the disk, and of the store those that the disk does not have.

        If the store cannot be reached, a warning says so, unless the disk has no step.
        """
        disk = self._disk.listing()
        try:
            return self._joined(disk)
        except StoreError as error:
            if not disk.steps:
                raise
            message = f"only the steps of {self.root} are found: {in_short(error)}"
            logger.info("%s", message)
            warnings.warn(message, stacklevel=stack_level_of_caller())
            return disk

    def _joined(self, disk: StepListing) -> StepListing:
        store = self._store.listing()
        self._broken = set(store.broken)
        self._known = {step.number for step in store.steps} | self._broken
        steps = {step.number: step for step in (*store.steps, *disk.steps)}
        broken = {number: error for number, error in {**store.broken, **disk.broken}.items() if number not in steps}
        return StepListing([steps[number] for number in sorted(steps)], MappingProxyType(broken))

    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        found = dict(self._store.summaries()) | dict(self._disk.summaries())
        yield from sorted(found.items(), key=lambda each: each[0])

    def files_of(self, path: Path) -> list[os.stat_result]:
        return self._disk.files_of(self._on_disk(path)) or self._store.files_of(path)

    def read_nearest(self, path: Path, read: Callable[[Path], T]) -> T:
        """Read a step from the disk, or from the store if the disk does not have all of it."""
        errors: list[TensorkeepError] = []
        for copy in (self._on_disk(path), self._store.root / path.name):
            try:
                found = read(copy)
            except (CorruptCheckpointError, NotACheckpointError, StoreError) as error:
                if isinstance(error, CorruptCheckpointError):
                    logger.warning("%s is damaged: %s", copy, in_short(error))
                errors.append(error)
            else:
                logger.info("read %s", copy)
                return found
        # A store that cannot be reached may have the step: an earlier one must not be taken for the last good one.
        errors.sort(key=lambda error: (isinstance(error, StoreError), isinstance(error, CorruptCheckpointError)))
        if isinstance(errors[-1], CorruptCheckpointError):
            self._damaged[_number(path)] = manifest_digest(self._store.root / path.name)
        raise errors[-1]

    # Saving

    def claim(self) -> None:
        self._disk.claim()
        if self._claimed:
            return
        try:
            # A save depends on the disk alone, and does not wait for as long as requests are repeated.
            self._known = {*answer_within(_PATIENCE_SECONDS, self._store.numbers)}
        except (StoreError, TimeoutError) as error:
            message = f"steps are saved to {self.root}, and uploaded later: {in_short(error)}"
            logger.info("%s", message)
            warnings.warn(message, stacklevel=stack_level_of_caller())
        self._claimed = True
        self._uploader.start(look=True)

    def expect(self, number: int, *, overwrite: bool) -> None:
        with self._mutex:
            self._saving[number] = overwrite
            self._saved_last = number
            self._uploader.drop_copy(number)

    def saved(self, number: int) -> bool:
        damaged, overwrite = self._damaged.pop(number, None), self._saving.get(number, False)
        # Unless another process has replaced the damaged one.
        overwrite = overwrite or (damaged is not None and damaged == manifest_digest(self._store.path_of(number)))
        self._uploader.add(number, overwrite=overwrite)
        # Only now: `_clean_up` removes no step that is being saved, and none that is still to be uploaded.
        self._saving.pop(number, None)
        return False

    def settle(self) -> None:
        if self._claimed:
            self._uploader.drain()
            self._uploader.raise_failure()

    def uploads(self) -> list[UploadStatus]:
        return self._uploader.statuses()

    def warn(self, *, stacklevel: int) -> None:
        failure = self._uploader.take_failure()
        if failure is not None:
            warnings.warn(
                f"steps are on the disk, and not in the store yet: {in_short(failure)}", stacklevel=stacklevel + 1
            )
        self._run_in_store.warn_of_undeleted(stacklevel=stacklevel + 1)
        error, self._not_deleted = self._not_deleted, None
        if error is not None:
            warnings.warn(f"an old step was not deleted from the disk: {error}", stacklevel=stacklevel + 1)

    def release(self) -> None:
        self._disk.release()
        self._claimed = False
        self._saving.clear()  # of saves that have failed

    # In the thread that uploads

    def _find_left(self) -> None:
        """Find the steps that an earlier process has saved and not uploaded."""
        disk = self._disk.listing()
        found = self._joined(disk).steps
        # Steps that were deleted from the store, or would be, while they remain among the last ones on the disk.
        needless = {step.number for step in self._unwanted(found)} - self._known
        noted = self._uploader.pending() | self._uploader.stored() | {self._saved_last}
        for step in disk.steps:
            if step.number not in needless | noted:
                self._uploader.add_found(step.number)

    def _choose(self, waiting: list[int]) -> list[int]:
        """Return those of several steps that are still wanted: others were saved faster than they are uploaded."""
        needless = {step.number for step in self._unwanted(self._joined(self._disk.listing()).steps)}
        return [number for number in waiting if number not in needless]

    def _unwanted(self, steps: list[Step]) -> list[Step]:
        try:
            return unwanted(self._keep, steps, () if self._saved_last is None else (self._saved_last,))
        except TensorkeepError as error:
            self._not_deleted = error  # the rule needs a metric that no step has
            return []

    def _clean_up(self, uploaded: int) -> None:
        """Delete the steps that are kept neither in the store nor on the disk, after an upload.

        From the disk go steps that are whole in the store, or that no rule keeps; not the one that was uploaded last,
        whose files the next incremental step shares.
        """
        self._known.add(uploaded)
        self._run_in_store.delete_after_save(self._keep, uploaded)
        try:
            disk = self._disk.listing()
            needless = {step.number for step in self._unwanted(self._joined(disk).steps)}
            kept = self._kept_on_disk(disk.steps) | {uploaded}
            for number in ((self._uploader.stored() - self._broken) | needless) - kept:
                self._remove_from_disk(number)
        except TensorkeepError as error:
            self._not_deleted = error

    def _remove_from_disk(self, number: int) -> None:
        """Delete a step from the disk, unless it is saved again meanwhile."""
        with self._mutex:
            if number not in {*self._saving, *self._uploader.pending(), self._saved_last}:
                self._disk.remove(self._disk.path_of(number))
                self._uploader.drop_copy(number)

    def _kept_on_disk(self, steps: list[Step]) -> set[int | None]:
        """Return the steps that stay on the disk, and some that it does not have."""
        kept = {*self._uploader.pending(), self._saved_last}
        if self._keep_local is None:
            needless = {step.number for step in self._unwanted(steps)}
            return kept.union(step.number for step in steps if step.number not in needless)
        by_age = sorted(steps, key=lambda step: (step.saved_at, step.number))
        return kept.union(step.number for step in by_age[-self._keep_local :])

    # Deleting steps

    def check_removable(self, path: Path) -> None:
        if self._disk.exists(self._on_disk(path)):
            self._disk.check_removable(self._on_disk(path))
        if self._store.exists(path):
            self._store.check_removable(self._store.root / path.name)

    def remove(self, path: Path) -> None:
        self.check_removable(path)
        self._uploader.forget(_number(path))
        with self._mutex:
            self._disk.remove(self._on_disk(path))
        self._store.remove(self._store.root / path.name)
        self._known.discard(_number(path))

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        """Return the bytes that are freed on the disk and in the store together."""
        found = list(paths)
        on_disk = [path for path in map(self._on_disk, found) if self._disk.exists(path)]
        return self._disk.freed_bytes(on_disk) + self._store.freed_bytes(found)

    def garbage(self) -> Garbage:
        return self._store.garbage()

    def sweep(self) -> None:
        self._store.sweep()

    def _on_disk(self, path: Path) -> Path:
        return self.root / path.name


def _number(path: Path) -> int:
    return step_numbers([path.name])[0]
