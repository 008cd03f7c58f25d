"""Where the steps of a run are stored: the interface of all backends, and a folder of a disk."""

import logging
import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self, SupportsIndex, TypeVar

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.native.directory import CheckpointSummary, freed_bytes, step_record, summarise
from tensorkeep.formats.native.sharded import finish_saves
from tensorkeep.paths import as_path
from tensorkeep.runs.pruned import PrunedStep, PrunedSteps
from tensorkeep.runs.retention import Keep, KeepAll, unwanted
from tensorkeep.runs.steps import Step, StepListing, UploadStatus, check_is_step, step_numbers, step_of, step_path
from tensorkeep.storage import exists, names_in
from tensorkeep.storage.commit import FolderLock, remove_abandoned, remove_checkpoint
from tensorkeep.storage.parallel import shielded
from tensorkeep.storage.system_errors import store_errors

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The most steps that an error suggests instead of a missing one.
_NEAREST = 4


class StepBackend(ABC):
    """The steps of a run as a `CheckpointManager` needs them: found, reserved for one writer, and deleted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Two threads delete steps: the user's, and the thread that has saved a step.
        self._deleting = threading.RLock()
        self._undeleted: TensorkeepError | None = None

    # Finding steps

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the numbers of all steps in order, complete or not."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Return whether a step is at a path, complete or not."""

    @abstractmethod
    def listing(self) -> StepListing:
        """Check the manifest and the file sizes of every step; no tensor is read."""

    def path_of(self, number: SupportsIndex) -> Path:
        return step_path(self.root, number)

    def find(self, number: SupportsIndex) -> Path:
        """Return the path of an existing step, complete or not; NotFoundError names the nearest steps."""
        path = self.path_of(number)
        if self.exists(path):
            return path
        found = sorted(sorted(self.numbers(), key=lambda other: abs(other - operator.index(number)))[:_NEAREST])
        remedy = "it has no steps: check the folder"
        if found:
            remedy = f"the nearest step{'s are' if len(found) > 1 else ' is'} {', '.join(map(str, found))}"
        raise NotFoundError(f"has no step {number}", path=self.root, remedy=remedy)

    @abstractmethod
    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        """Yield each step number, the last one first, with the step, read only now, or what is wrong with it."""

    def read_nearest(self, path: Path, read: Callable[[Path], T]) -> T:
        """Call ``read`` with the path of the nearest undamaged copy of a step."""
        return read(path)

    # Saving steps

    def claim(self) -> None:
        """Reserve the run, and finish or remove what a killed writer has left. BusyError if another process has it."""
        return

    def release(self) -> None:
        return

    def finish_saves(self) -> None:
        """Publish the saves of many ranks that were killed after all ranks had written their parts."""
        return

    def before_save(self, number: int, *, overwrite: bool) -> None:
        return

    @abstractmethod
    def after_save(self, number: int, rule: Keep) -> None:
        """Apply the rule, once a step is durable."""

    def apply_rule(self, rule: Keep, number: int) -> None:
        """Delete the steps that a rule does not keep, but not this one; `take_warnings` reports errors."""
        try:
            # If all steps are kept, a save need not look at them.
            if not isinstance(rule, KeepAll):
                self.delete_unwanted(rule, protect=(number,))
        except TensorkeepError as error:
            # The save has succeeded: its caller must not get an error about another step.
            self._undeleted = error

    def wait_for_uploads(self) -> None:
        """Wait until all saved steps are in the store; StoreError if an upload fails."""
        return

    def uploads(self) -> list[UploadStatus]:
        """Return the steps that wait for their upload, or fail."""
        return []

    def take_warnings(self) -> list[str]:
        """Return what has failed in the background since the last call."""
        error, self._undeleted = self._undeleted, None
        return [] if error is None else [f"an old step was not deleted: {error}"]

    # Deleting steps

    @abstractmethod
    def record(self, steps: Iterable[Step | PrunedStep]) -> None:
        """Keep the metrics of steps that will be deleted, and of steps that a full disk refused before."""

    def _record_paths(self, paths: Sequence[Path], snapshot: "StepBackend | None") -> None:
        complete = {step.number: step for step in snapshot.listing().steps} if snapshot else {}
        found: list[Step | PrunedStep] = []
        for path in paths:
            (number,) = step_numbers([path.name])
            if number in complete:
                found.append(complete[number])
                continue
            # Also of a step that lacks files: its manifest has the metrics.
            with suppress(CorruptCheckpointError, NotACheckpointError, UnsupportedError):
                if (record := step_record(path)) is not None:
                    metrics = {name: float(value) for name, value in record.metrics.items()}
                    found.append(PrunedStep(number, record.saved_at, metrics))
        self.record(found)

    @abstractmethod
    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        """Delete steps that exist; return the steps that could not be deleted, with the errors."""

    def snapshot(self) -> Self:
        """Return a backend that looks at the steps once, for a deletion that is first planned and then done."""
        return self

    def sweep(self) -> None:
        """Delete what no step uses and nobody reads any more."""
        return

    def delete(self, paths: Sequence[Path], *, snapshot: "StepBackend | None" = None) -> None:
        """Delete steps and raise the first error; ``snapshot`` is the backend that has chosen them."""
        with self._deleting:
            self.claim()
            # Steps of a snapshot were checked when they were chosen; a step that was saved meanwhile is not in it.
            self._record_paths(paths, snapshot)
            failures = (snapshot or self).remove_all(paths)
            self.record(())
            self._sweep()
        for error in failures.values():
            raise error

    def delete_unwanted(self, rule: Keep, protect: Collection[int] = ()) -> list[Step]:
        """Delete the steps that a rule does not keep, as far as possible, and return them; see `take_warnings`."""
        with self._deleting:
            seen = self.snapshot()
            steps = unwanted(rule, seen.listing().steps, protect)
            self.record(steps)
            failures = seen.remove_all([as_path(step.path) for step in steps])
            self.record(())
            # Reported later: the save has succeeded, and the next one deletes the step again.
            self._undeleted = next(iter(failures.values()), self._undeleted)
            self._sweep()
        return [step for step in steps if as_path(step.path) not in failures]

    def _sweep(self) -> None:
        try:
            self.sweep()
        # What is not swept now is swept after the next save.
        except TensorkeepError as error:
            self._undeleted = error


@dataclass(frozen=True, slots=True)
class Garbage:
    # Can be deleted now.
    removable: dict[str, int] = field(default_factory=dict)
    # Of steps that were deleted within the grace period: someone may still read them.
    waiting: dict[str, int] = field(default_factory=dict)
    # Of saves that run or failed less than a day ago.
    unfinished: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.removable or self.waiting or self.unfinished)


class SingleTierBackend(StepBackend):
    """Steps in one storage. `tensorkeep.log` and ``prune`` also look at the files of its steps."""

    # How long the files of a deleted step remain for readers that have opened the step.
    grace_seconds = 0.0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.pruned = PrunedSteps(root)

    def after_save(self, number: int, rule: Keep) -> None:
        self.pruned.saved(number, self.numbers)
        self.apply_rule(rule, number)

    def record(self, steps: Iterable[Step | PrunedStep]) -> None:
        self.pruned.add(steps)

    def take_warnings(self) -> list[str]:
        return [*super().take_warnings(), *self.pruned.take_warnings()]

    @abstractmethod
    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        """Yield each step number, in order, with the step's summary or what is wrong with it."""

    @abstractmethod
    def files_of(self, path: Path) -> list[os.stat_result]:
        """Return the status of a damaged step's files; an empty list if they cannot be listed."""

    @abstractmethod
    def not_removable(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        """Return the paths that are not steps, have lost their manifest or contain foreign files, with the reasons."""

    def remove(self, path: Path) -> None:
        """Delete a step; raises the errors of `not_removable`. A step that is gone already is not an error."""
        for error in self.remove_all([path]).values():
            raise error

    @abstractmethod
    def freed_bytes(self, paths: Iterable[Path]) -> int:
        """Return the bytes that deleting all given steps frees, once the grace period is over."""

    def garbage(self) -> Garbage:
        """Return what deleted steps and failed saves have left, and `sweep` deletes."""
        return Garbage()

    def read(self, number: int) -> Step:
        path = self.path_of(number)
        return step_of(path, number, summarise(path))

    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        return self._read_each(reversed(self.numbers()), self.read)

    def _read_each(self, numbers: Iterable[int], read: Callable[[int], T]) -> Iterator[tuple[int, T | TensorkeepError]]:
        for number in numbers:
            try:
                yield number, read(number)
            except TensorkeepError as error:
                if self.is_broken(number, error):
                    yield number, error

    def is_broken(self, number: int, error: TensorkeepError) -> bool:
        # Another process may have deleted the step since it was listed: then it is not broken, but gone.
        return not isinstance(error, NotACheckpointError) or self.exists(self.path_of(number))

    def listing(self) -> StepListing:
        steps: list[Step] = []
        broken: dict[int, TensorkeepError] = {}
        for number, found in self.summaries():
            if isinstance(found, TensorkeepError):
                broken[number] = found
            else:
                steps.append(step_of(self.path_of(number), number, found))
        return StepListing(steps, MappingProxyType(broken))


class LocalBackend(SingleTierBackend):
    """A folder of steps on a disk, which one process at a time may change."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock: FolderLock | None = None

    def numbers(self) -> list[int]:
        return step_numbers(names_in(self.root))

    def exists(self, path: Path) -> bool:
        return exists(path)

    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        return self._read_each(self.numbers(), lambda number: summarise(self.path_of(number)))

    def files_of(self, path: Path) -> list[os.stat_result]:
        try:
            # Without its subfolders, which do not belong to a step.
            with os.scandir(path) as found:
                return [file.stat(follow_symlinks=False) for file in found if not file.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def claim(self) -> None:
        with self._deleting:
            # In another thread: Ctrl-C between taking the lock and storing it would leave the folder locked.
            shielded(self._claim)

    def _claim(self) -> None:
        if self._lock is None or not self._lock.is_valid():
            self._lock = FolderLock(self.root)
            # A killed writer leaves staging folders. Many ranks may have completed one: it is published, not removed.
            finish_saves(self.root)
            remove_abandoned(self.root)

    def release(self) -> None:
        try:
            shielded(self._release)
        except BaseException:  # an interrupt, perhaps before `_release` began
            shielded(self._release)
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def finish_saves(self) -> None:
        finish_saves(self.root)

    def not_removable(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        return collect_failures(_check_removable, paths, UsageError, NotACheckpointError)

    def remove(self, path: Path) -> None:
        if not exists(path):
            return
        _check_removable(path)
        with store_errors(path, "delete the step"):
            try:
                remove_checkpoint(path)
            except FileNotFoundError:
                # Another process was faster.
                return
        logger.info("deleted %s", path)

    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        return collect_failures(self.remove, paths, TensorkeepError)

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        return freed_bytes(paths)


def _check_removable(path: Path) -> None:
    with store_errors(path, "look at the step"):
        if path.is_symlink():
            # Deleting the link would not delete the step, and its target may be the only copy of something else.
            raise NotACheckpointError("is a link, so it is not deleted", path=path, remedy="remove it yourself")
        check_is_step(path)


def collect_failures(
    call: Callable[[Path], None], paths: Iterable[Path], *kinds: type[TensorkeepError]
) -> dict[Path, TensorkeepError]:
    failures: dict[Path, TensorkeepError] = {}
    for path in paths:
        try:
            call(path)
        except kinds as error:
            failures[path] = error
    return failures
