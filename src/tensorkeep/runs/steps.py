"""The steps of a training run: checkpoints ``step-000100``, ``step-000200``, ... in one place."""

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, SupportsIndex, TypeVar

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UsageError,
)
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native.directory import CheckpointSummary, foreign_names, is_native, summarise
from tensorkeep.paths import STEP_NAME, as_path
from tensorkeep.storage import open_directory
from tensorkeep.storage.base import MANIFEST_NAME

T = TypeVar("T")

_LARGEST = 10**18 - 1
_NEAREST = 4


@dataclass(frozen=True, slots=True)
class Step:
    """A step with a valid manifest and files of the right sizes; tensors are not read.

    Attributes
    ----------
    number : int
    path : str
    saved_at : float
        Seconds since 1970 (UTC), by the clock of the machine that saved it.
    metrics : mapping of str to float
    nbytes, own_bytes : int
        Bytes of its files, and of those that no other step shares, which deleting it would free.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tensorkeep.CheckpointManager(folder.name) as manager:
    ...     report = manager.save(10, {"w": torch.ones(9)}, metrics={"loss": 2.0}).wait()
    ...     step = manager.latest()
    >>> step.number, step.metrics["loss"], step.path == report.path
    (10, 2.0, True)
    >>> folder.cleanup()
    """

    number: int
    path: str
    saved_at: float
    metrics: Mapping[str, float]
    nbytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class StepListing:
    """The complete steps of a run, by number, and for the others what is wrong with each."""

    steps: list[Step]
    broken: Mapping[int, TensorkeepError]


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """A step that is on the disk and not in the store yet; `CheckpointManager.uploads` returns them.

    Attributes
    ----------
    step : int
    state : {"waiting", "uploading", "failed"}
        A failed step is tried again when the next one is saved, and by `CheckpointManager.wait`; but not one that is
        damaged, or whose number another step in the store has.
    bytes_done, bytes_total : int
        Bytes that were sent, and those to send: without what the store has of earlier steps. 0 before it begins.
    error : str or None
        Why it failed.

    Examples
    --------
    >>> from tensorkeep import UploadStatus
    >>> status = UploadStatus(100, "uploading", bytes_done=50_000_000, bytes_total=200_000_000)
    >>> f"step {status.step}: {status.bytes_done / status.bytes_total:.0%}"
    'step 100: 25%'
    """

    step: int
    state: Literal["waiting", "uploading", "failed"]
    bytes_done: int = 0
    bytes_total: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects in a store that no step names, by their keys, with their bytes.

    ``removable`` can be deleted now. ``waiting`` are of steps that were deleted within the grace period, and may be
    read still. ``unfinished`` are of saves that run or have failed, until they are so old that they must have failed.
    """

    removable: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.removable or self.waiting or self.unfinished)


class StepPlace(ABC):
    """Where the steps of a run are: a folder of a disk, or a prefix of an object store."""

    grace_seconds = 0.0
    """How long the files of a deleted step remain for those who are reading them, if they would miss them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the numbers of the steps, complete or not, in order; none if nothing is there."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Return whether a step, complete or not, is at a path."""

    @abstractmethod
    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        """Yield the number of each step, in order, with its summary or what is wrong with it."""

    @abstractmethod
    def files_of(self, path: Path) -> list[os.stat_result]:
        """Return the status of the files of a damaged step; none if they cannot be listed."""

    def claim(self) -> None:
        """Reserve the place for this writer, and finish or remove what a killed one has left.

        Raises BusyError if another process has it.
        """
        return

    def release(self) -> None:
        """Let others write."""
        return

    def finish_saves(self) -> None:
        """Finish the saves of many ranks that all had written when they were killed."""
        return

    @abstractmethod
    def check_removable(self, path: Path) -> None:
        """Check that deleting a path deletes a step and nothing else.

        Raises UsageError if it holds files that do not belong to the step; NotACheckpointError if it is not a step:
        another file or folder of that name, a link, or a step that has lost its manifest.
        """

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Delete a step, complete or damaged; raise as `check_removable`. Nothing happens if it is gone already."""

    def snapshot(self) -> "StepPlace":
        """Return a place that looks at the steps once, for a deletion that is planned and then done."""
        return self

    def not_removable(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        """Return the paths that `check_removable` refuses, with its errors."""
        return _failures(self.check_removable, paths, (UsageError, NotACheckpointError))

    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        """Delete steps, and return those that could not be deleted, with the errors of `remove`."""
        return _failures(self.remove, paths, TensorkeepError)

    @abstractmethod
    def freed_bytes(self, paths: Iterable[Path]) -> int:
        """Return the bytes that deleting all of these steps would free, once the grace period is over."""

    def expect(self, number: int, *, overwrite: bool) -> None:
        """Prepare for the save of a step, which may replace another one."""
        return

    def saved(self, number: int) -> bool:
        """Note that a step is durable; return whether the steps that no rule keeps can be deleted now."""
        return True

    def settle(self) -> None:
        """Wait until what was saved is where it shall be; StoreError if that fails."""
        return

    def uploads(self) -> list[UploadStatus]:
        """Return the steps that are still to be uploaded."""
        return []

    def warn(self, *, stacklevel: int) -> None:
        """Warn of what has failed in the background since the last call."""
        return

    def read_nearest(self, path: Path, read: Callable[[Path], T]) -> T:
        """Return what a function returns for a step, by the path of its nearest whole copy."""
        return read(path)

    def garbage(self) -> Garbage:
        """Return what deleted steps and failed saves have left and `sweep` deletes."""
        return Garbage()

    def sweep(self) -> None:
        """Delete what no step uses and nobody reads any more."""
        return

    def path_of(self, number: SupportsIndex) -> Path:
        """Return the path of a step; UsageError as `step_number`."""
        return step_path(self.root, number)

    def existing(self, number: SupportsIndex) -> Path:
        """Return the path of a step, complete or not; NotFoundError, with the nearest steps, if it does not exist."""
        path = self.path_of(number)
        if self.exists(path):
            return path
        found = sorted(sorted(self.numbers(), key=lambda other: abs(other - operator.index(number)))[:_NEAREST])
        remedy = "it has no steps: check the folder"
        if found:
            remedy = f"the nearest step{'s are' if len(found) > 1 else ' is'} {', '.join(map(str, found))}"
        raise NotFoundError(f"has no step {number}", path=self.root, remedy=remedy)

    def read(self, number: int) -> Step:
        """Return a step by its manifest, having checked that its files exist and have the right sizes."""
        path = self.path_of(number)
        return step_of(path, number, summarise(path))

    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        """Yield the number of each step, the last one first, with the step or what is wrong with it."""
        found = self.listing()
        steps: dict[int, Step | TensorkeepError] = {step.number: step for step in found.steps}
        yield from sorted((steps | {**found.broken}).items(), key=lambda each: -each[0])

    def listing(self) -> StepListing:
        """Look at every step; no tensor is read."""
        steps: list[Step] = []
        broken: dict[int, TensorkeepError] = {}
        for number, found in self.summaries():
            if isinstance(found, TensorkeepError):
                broken[number] = found
            else:
                steps.append(step_of(self.path_of(number), number, found))
        return StepListing(steps, MappingProxyType(broken))


def _failures(
    call: Callable[[Path], None],
    paths: Iterable[Path],
    kinds: type[TensorkeepError] | tuple[type[TensorkeepError], ...],
) -> dict[Path, TensorkeepError]:
    """Call a function with each path; return the paths for which it failed, with the errors."""
    failures: dict[Path, TensorkeepError] = {}
    for path in paths:
        try:
            call(path)
        except kinds as error:
            failures[path] = error
    return failures


def step_number(number: SupportsIndex, root: PathLike | None = None) -> int:
    """Return the number of a step as an int; integers of numpy and torch are accepted.

    Raises UsageError if it is negative, not an integer, or has more than 18 digits.
    """
    try:
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found <= _LARGEST:
        raise UsageError(f"{number!r} is not the number of a step", path=root, remedy="give an int of 0 or more")
    return found


def step_path(root: PathLike, number: SupportsIndex) -> Path:
    """Return the path of a step; UsageError as `step_number`."""
    return as_path(root) / f"step-{step_number(number, root):06d}"


def step_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of those names that are names of steps, in order."""
    found = (match for name in names if (match := STEP_NAME.fullmatch(name)))
    return sorted(int(match[1]) for match in found if f"step-{int(match[1]):06d}" == match[0])


def step_of(path: Path, number: int, summary: CheckpointSummary) -> Step:
    """Return a step by the summary of its checkpoint."""
    record = summary.outline.step
    # The first file is the manifest, which is written last.
    saved_at = record.saved_at if record else summary.files[0].st_mtime
    metrics = MappingProxyType({name: float(value) for name, value in record.metrics.items()} if record else {})
    return Step(number, os.fspath(path), saved_at, metrics, summary.nbytes, summary.own_bytes)


def check_is_step(path: Path, foreign: Sequence[str] | None = None) -> None:
    """Raise NotACheckpointError if a path is not a native checkpoint, UsageError if other files are beside its own.

    ``foreign`` are those files, if they are known, and the path is a native checkpoint.
    """
    if foreign is None and not is_native(path):
        raise NotACheckpointError(
            "is not a checkpoint of Tensorkeep, or has lost its manifest, so it is not deleted",
            path=path,
            remedy="if it is not needed, remove it yourself",
        )
    foreign = foreign_names(path) if foreign is None else foreign
    if foreign:
        raise UsageError(
            f"holds {foreign[0]!r}, which does not belong to the step, so it is not deleted",
            path=path,
            remedy="move that file elsewhere first",
        )


def is_damaged(path: Path) -> bool:
    """Return whether a path is a step whose manifest is damaged, or whose files are missing or truncated."""
    try:
        summarise(path)
    except CorruptCheckpointError:
        return True
    except TensorkeepError:
        pass  # nothing is there, or it was written by another tool or a later version
    return False


def manifest_digest(path: Path) -> str | None:
    """Return the checksum of the manifest of a step, damaged or not; None if it cannot be read."""
    try:
        with open_directory(path) as directory, directory.open(MANIFEST_NAME) as file:
            return digest(file.read(0, file.size), wide=True)
    except TensorkeepError:
        return None
