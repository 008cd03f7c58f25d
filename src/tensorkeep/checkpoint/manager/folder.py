"""What a manager does with the place of its steps: complete ones are found, others deleted, for all ranks."""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tensorkeep.checkpoint.forking import reset_in_child
from tensorkeep.checkpoint.manager.place import place_of
from tensorkeep.checkpoint.manager.retention import Keep, KeepAll, unwanted
from tensorkeep.checkpoint.manager.steps import Step, StepPlace, checked_metrics, is_damaged, manifest_digest
from tensorkeep.checkpoint.ranks.group import Ranks, reported_to_others, together
from tensorkeep.errors import DestinationExistsError, PathLike, TensorkeepError
from tensorkeep.formats.write import StepRecord
from tensorkeep.io.clock import clock
from tensorkeep.paths import StorePath, as_path, checked_path

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
        self.root = given if isinstance(given, StorePath) else Path(os.path.abspath(given))
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

    def newest_first(self, *, stacklevel: int) -> list[Step]:
        """Return the complete steps, the last one first; warn of later ones that are not complete.

        All ranks return those that the coordinator has found.
        """
        if self._ranks is None:
            return self._newest_first(stacklevel=stacklevel + 1)
        with reported_to_others(self._ranks, "listing the steps"):
            own: list[Step] = []
            if self._changes:
                # The ranks may be starting again after they were killed when all but the last rename was done.
                self.place.finish_saves()
                own = self._newest_first(stacklevel=stacklevel + 1)
        received = [(s.number, s.path, s.saved_at, dict(s.metrics), s.nbytes, s.own_bytes) for s in own]
        return [Step(*each) for each in self._ranks.caller.exchange(received, "listing the steps")[0]]

    def _newest_first(self, *, stacklevel: int) -> list[Step]:
        found = self.place.listing()
        last = found.steps[-1].number if found.steps else -1
        for number, error in found.broken.items():
            if number > last:
                logger.info("step %d of %s is skipped: %s", number, self.root, error)
                warnings.warn(f"step {number} is skipped: {error}", stacklevel=stacklevel + 1)
        return found.steps[::-1]

    def check_free(self, step: int, *, overwrite: bool, damaged: Mapping[Path, str | None], stacklevel: int) -> bool:
        """Check that a step can be saved, and return whether to replace what is there; warn if there are later steps.

        A damaged step is always replaced: one that is found to be, or whose manifest is still that of a step that was
        found to be; ``damaged`` has the digests of those.
        """
        if not self._changes:
            return overwrite
        path, numbers = self.path_of(step), self.place.numbers()
        replaces = overwrite
        if step in numbers and not overwrite:
            known = damaged.get(path)
            replaces = is_damaged(path) or (known is not None and known == manifest_digest(path))
            if not replaces:
                raise DestinationExistsError(
                    "this step was saved already", path=path, remedy="give overwrite=True, or delete it first"
                )
        later = [number for number in numbers if number > step]
        if later:
            warnings.warn(
                f"step {step} is saved although there are later ones, up to step {later[-1]}, from which latest() and "
                "restore() continue: delete() them if this run replaces them",
                stacklevel=stacklevel + 1,
            )
        self.place.expect(step, overwrite=overwrite)
        return replaces

    def record(self, step: int, metrics: Mapping[str, float] | None, keep: Keep) -> StepRecord:
        """Return what is stored with a step; its metrics are those of the coordinator, which alone checks them."""
        record = StepRecord(step, clock().time(), checked_metrics(metrics if self._changes else None))
        if self._changes:
            keep.check(record.metrics)
        return record

    def path_of(self, step: int | Step, *, exists: bool = False) -> Path:
        """Return the path of a step; with ``exists``, NotFoundError if it does not exist."""
        return (self.place.existing if exists else self.place.path_of)(step.number if isinstance(step, Step) else step)

    def delete(self, *steps: int | Step) -> None:
        """Delete steps; NotFoundError if one does not exist."""
        with together(self._ranks, "deleting a step"), self._mutex:
            self.claim()
            if self._changes:
                for step in steps:
                    self.place.remove(self.path_of(step, exists=True))
                self._sweep()

    def delete_unwanted(self, rule: Keep, protect: Collection[int] = ()) -> list[Step]:
        """Delete the steps that a rule does not keep, except for some; return them.

        A step that cannot be deleted does not prevent the deletion of others; `warn_of_undeleted` reports it.
        """
        deleted: list[Step] = []
        if not self._changes:
            return deleted
        with self._mutex:
            for step in unwanted(rule, self.place.listing().steps, protect):
                try:
                    self.place.remove(as_path(step.path))
                    deleted.append(step)
                except TensorkeepError as error:
                    self._not_deleted = error
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
