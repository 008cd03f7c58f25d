"""What a manager does with the place of its steps: complete ones are found, others deleted, for all ranks."""

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    PathLike,
    RanksDisagreeError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats.base import StepRecord
from tensorkeep.paths import absolute, as_path, checked_path
from tensorkeep.ranks.group import Ranks, reported_to_others, together
from tensorkeep.runs.backends import place_of
from tensorkeep.runs.metrics import checked_metrics
from tensorkeep.runs.retention import Keep, KeepAll, KeepBest, best_step, unwanted
from tensorkeep.runs.steps import Step, StepListing, StepPlace, UploadStatus, is_damaged, manifest_digest
from tensorkeep.storage.clock import clock
from tensorkeep.storage.parallel import reset_in_child, shielded
from tensorkeep.structs import prepared

# What a manager does with the place of its steps: complete ones are found, others deleted, for all ranks.

logger = logging.getLogger(__name__)


class StepFolder:
    """The steps of a manager, in their `place`. Of many ranks, the coordinator changes it for all of them."""

    def __init__(
        self,
        root: PathLike,
        ranks: Ranks | None = None,
        *,
        make_place: Callable[[Path], StepPlace] = place_of,
    ) -> None:
        given = checked_path(root, stores=True)
        self.root = absolute(given)
        self._make_place = make_place
        self._ranks = ranks
        self._changes = ranks is None or ranks.is_coordinator
        self._reset()
        # A forked child has neither the lock nor the connections of its parent.
        reset_in_child(self, StepFolder._reset)

    def _reset(self) -> None:
        self.place = self._make_place(self.root)
        self._mutex = threading.RLock()
        self._not_deleted: TensorkeepError | None = None

    def claim(self) -> None:
        """Reserve the place for this manager, and finish or remove what a killed writer has left."""
        with self._mutex:
            if self._changes:
                self.place.claim()

    def release(self) -> None:
        """Let others write."""
        self.place.release()

    def newest_first(self, *, stacklevel: int) -> Iterable[Step]:
        """Return the complete steps, the last one first; warn of later ones that are not complete.

        A step is looked at when it is asked for. All ranks return those that the coordinator has found.
        """
        if self._ranks is None:
            return self._newest_first(stacklevel=stacklevel)  # by the caller's frame
        with reported_to_others(self._ranks, "listing the steps"):
            own: list[Step] = []
            if self._changes:
                # The ranks may be starting again after they were killed when all but the last rename was done.
                self.place.finish_saves()
                own = [*self._newest_first(stacklevel=stacklevel + 1)]
        received = [(s.number, s.path, s.saved_at, dict(s.metrics), s.nbytes, s.own_bytes) for s in own]
        return [Step(*each) for each in self._ranks.caller.exchange(received, "listing the steps")[0]]

    def _newest_first(self, *, stacklevel: int) -> Iterator[Step]:
        broken: list[tuple[int, TensorkeepError]] = []
        steps = self.place.newest_first()
        last: Step | None = None
        while last is None and (found := next(steps, None)) is not None:
            if isinstance(found[1], Step):
                last = found[1]
            else:
                broken.append((found[0], found[1]))
        for number, error in reversed(broken):
            logger.info("step %d of %s is skipped: %s", number, self.root, error)
            warnings.warn(f"step {number} is skipped: {error}", stacklevel=stacklevel + 1)
        if last is not None:
            yield last
            yield from (step for _, step in steps if isinstance(step, Step))

    def check_free(self, step: int, *, overwrite: bool, damaged: Mapping[Path, str | None], stacklevel: int) -> bool:
        """Check that a step can be saved, and return whether to replace what is there; warn if there are later steps.

        A damaged step is always replaced: one that is found to be, or whose manifest is still that of a step that was
        found to be; ``damaged`` has the digests of those.
        """
        if not self._changes:
            return overwrite
        replaces, later = shielded(partial(self._look_at, step, overwrite=overwrite, damaged=damaged))
        if later:
            warnings.warn(
                f"step {step} is saved although there are later ones, up to step {later[-1]}, from which latest() and "
                "restore() continue: delete() them if this run replaces them",
                stacklevel=stacklevel + 1,
            )
        self.place.expect(step, overwrite=overwrite)
        return replaces

    def _look_at(self, step: int, *, overwrite: bool, damaged: Mapping[Path, str | None]) -> tuple[bool, list[int]]:
        """Return whether to replace a step, and the numbers of later ones; see `check_free`."""
        path, numbers = self.path_of(step), self.place.numbers()
        replaces = overwrite
        if step in numbers and not overwrite:
            known = damaged.get(path)
            replaces = is_damaged(path) or (known is not None and known == manifest_digest(path))
            if not replaces:
                raise DestinationExistsError(
                    "this step was saved already", path=path, remedy="give overwrite=True, or delete it first"
                )
        return replaces, [number for number in numbers if number > step]

    def record(self, step: int, metrics: Mapping[str, float] | None, keep: Keep) -> StepRecord:
        """Return what is stored with a step; its metrics are those of the coordinator, which alone checks them."""
        record = StepRecord(step, clock().time(), checked_metrics(metrics if self._changes else None))
        try:
            # As a reader will.
            msgspec.json.decode(msgspec.json.encode(record), type=prepared(StepRecord))
        except (msgspec.ValidationError, OverflowError) as error:
            raise UnsupportedError(
                f"step {step}, saved {record.saved_at:.0f} seconds after 1970, cannot be stored ({error})",
                path=self.root,
                remedy="look at the number of the step and at the clock of this machine",
            ) from error
        if self._changes:
            keep.check(record.metrics)
        return record

    def path_of(self, step: int | Step, *, exists: bool = False) -> Path:
        """Return the path of a step; with ``exists``, NotFoundError if it does not exist."""
        return (self.place.existing if exists else self.place.path_of)(step.number if isinstance(step, Step) else step)

    def delete(self, *steps: int | Step, seen: StepPlace | None = None) -> None:
        """Delete steps; NotFoundError if one does not exist. ``seen`` is the snapshot of the place that chose them."""
        with together(self._ranks, "deleting a step"), self._mutex:
            self.claim()
            if self._changes:
                failures = (seen or self.place).remove_all([self.path_of(step, exists=not seen) for step in steps])
                self._sweep()
                for error in failures.values():
                    raise error

    def delete_unwanted(self, rule: Keep, protect: Collection[int] = ()) -> list[Step]:
        """Delete the steps that a rule does not keep, except for some; return them.

        A step that cannot be deleted does not prevent the deletion of others; `warn_of_undeleted` reports it.
        """
        deleted: list[Step] = []
        if not self._changes:
            return deleted
        with self._mutex:
            place = self.place.snapshot()
            steps = unwanted(rule, place.listing().steps, protect)
            failures = place.remove_all([as_path(step.path) for step in steps])
            self._not_deleted = next(iter(failures.values()), self._not_deleted)
            deleted = [step for step in steps if as_path(step.path) not in failures]
            self._sweep()
        return deleted

    def _sweep(self) -> None:
        """Delete what deleted steps have left; `warn_of_undeleted` reports an error."""
        try:
            self.place.sweep()
        except TensorkeepError as error:
            self._not_deleted = error

    def delete_after_save(self, rule: Keep, saved: int) -> None:
        """Delete the steps that a rule does not keep; an error is reported by `warn_of_undeleted`."""
        try:
            # If all are kept, they need not be looked at.
            if self.place.saved(saved) and not isinstance(rule, KeepAll):
                self.delete_unwanted(rule, protect=(saved,))
        except TensorkeepError as error:
            self._not_deleted = error

    def warn_of_undeleted(self, *, stacklevel: int) -> None:
        """Warn if a step could not be deleted since the last call, or of what else has failed in the background."""
        self.place.warn(stacklevel=stacklevel + 1)
        error, self._not_deleted = self._not_deleted, None
        if error is not None:
            warnings.warn(f"an old step was not deleted: {error}", stacklevel=stacklevel + 1)


# Restoring the newest step of a run that is not damaged.

logger = logging.getLogger(__name__)
T = TypeVar("T")


def restore_newest(
    folder: StepFolder,
    restore: Callable[[Path], T],
    damaged: dict[Path, str | None],
    ranks: Ranks | None,
    *,
    stacklevel: int,
) -> T:
    """Return what ``restore`` returns for the newest step that is not damaged; warn of later ones.

    ``damaged`` receives their paths, with the digests of their manifests.

    Raises CorruptCheckpointError if every step is damaged; NotACheckpointError if no step exists; and what ``restore``
    raises for other reasons.
    """
    first_error: TensorkeepError | None = None
    for found in folder.newest_first(stacklevel=stacklevel + 1):
        path = as_path(found.path)
        error: BaseException | None = None
        lost = ranks.caller.lost if ranks else None
        try:
            state = restore(path)
        except BaseException as caught:
            error = caught
            if ranks is not None and ranks.caller.lost is not lost:
                raise  # no rank can exchange anything now
        verdict = _verdict(error, folder.place.exists, path)
        verdicts = ranks.caller.exchange(verdict, "restoring") if ranks else [verdict]
        if error is None and {*verdicts} == {"restored"}:
            return state
        if {*verdicts} <= {"damaged", "missing", "informed"} and isinstance(error, TensorkeepError):
            if "damaged" in verdicts:
                first_error = first_error or error
                damaged[path] = manifest_digest(path)
                logger.info("%s is damaged and skipped: %s", path, error)
                warnings.warn(f"{path.name} is skipped: {error}", stacklevel=stacklevel + 1)
                continue
            if verdicts[0] == "missing":
                continue  # its writer has deleted it meanwhile
        if verdict == "missing":
            raise RanksDisagreeError(
                "this rank does not find a step that rank 0 has found",
                path=path,
                remedy="give a folder that all ranks share",
            ) from error
        raise error or RanksDisagreeError("other ranks could not restore it", path=path, remedy="see their errors")
    raise first_error or NotACheckpointError(
        "contains no steps", path=folder.root, remedy="check the folder, or start from the beginning"
    )


def _verdict(error: BaseException | None, exists: Callable[[Path], bool], path: Path) -> str:
    """Return in one word how this rank's attempt ended, from which all ranks decide alike."""
    if error is None:
        return "restored"
    if isinstance(error, CorruptCheckpointError):
        return "damaged"
    if isinstance(error, NotACheckpointError):
        return "missing"
    if isinstance(error, RanksDisagreeError):  # about the error of another rank
        return "informed" if exists(path) else "missing"
    return "failed"


# What a manager answers about its steps: which there are, the last one, the best one, those to upload.


class StepQueries:
    """The methods of `CheckpointManager` that only read what is known of its steps, and no tensor."""

    _folder: StepFolder
    _best_rule: KeepBest

    def listing(self) -> StepListing:
        """Return the complete steps, and what is wrong with the others."""
        return self._folder.place.listing()

    def steps(self) -> list[Step]:
        """Return the complete steps, by number; a step that is being saved is not among them yet."""
        return self.listing().steps

    def latest(self) -> Step | None:
        """Return the last complete step, or None; a warning names later ones that are incomplete."""
        return next(iter(self._folder.newest_first(stacklevel=2)), None)

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """Return the best complete step by a metric, or None if no step has metrics or all values are NaN.

        The metric is by default that of the manager or of ``keep_best``, else the only one that the steps have, or
        their validation loss, or their loss; the mode is that of the manager, or known from the name.

        Raises UsageError if no step has the metric although some have others, if several may be meant, or if the mode
        is not known.
        """
        rule = self._best_rule
        if metric in (None, rule.metric):
            mode = mode or rule.mode
        return best_step(self.steps(), metric or rule.metric, mode)

    def uploads(self) -> list[UploadStatus]:
        """Return the steps that are in ``local`` and not in the store yet, by number.

        What an earlier process has left is among them from the first call on that changes something; see `claim`.
        """
        return self._folder.place.uploads()
