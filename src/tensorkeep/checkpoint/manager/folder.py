"""The folder of a training run: its complete steps, and deleting others; uses the lock of ``io/lock.py``."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from tensorkeep.checkpoint.forking import reset_in_child
from tensorkeep.checkpoint.manager.retention import Keep, KeepAll, unwanted
from tensorkeep.checkpoint.manager.steps import (
    Step,
    checked_metrics,
    existing_step,
    list_steps,
    numbers_in,
    remove_step,
    step_path,
)
from tensorkeep.checkpoint.ranks.group import Ranks, reported_to_others, together
from tensorkeep.errors import DestinationExistsError, TensorkeepError
from tensorkeep.formats.native.pieces.recovery import finish_saves
from tensorkeep.formats.write import StepRecord
from tensorkeep.io.lock import FolderLock
from tensorkeep.io.temporaries import remove_abandoned

logger = logging.getLogger(__name__)


class StepFolder:
    """A folder of steps that one process at a time may change; it uses the lock of ``io/lock.py``.

    Of many ranks, the coordinator changes it for all of them.
    """

    def __init__(self, root: Path, ranks: Ranks | None = None) -> None:
        self.root = root
        self._ranks = ranks
        self._changes = ranks is None or ranks.is_coordinator
        self._reset()
        # A forked child does not have the lock of its parent.
        reset_in_child(self, StepFolder._reset)

    def _reset(self) -> None:
        self._lock: FolderLock | None = None
        self._mutex = threading.RLock()
        self._not_deleted: TensorkeepError | None = None

    def claim(self) -> None:
        """Lock the folder for writing, and finish or remove what a killed writer has left."""
        with self._mutex:
            if self._changes and (self._lock is None or not self._lock.is_valid()):
                self._lock = FolderLock(self.root)
                finish_saves(self.root)
                remove_abandoned(self.root)

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

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
                finish_saves(self.root)
                own = self._newest_first(stacklevel=stacklevel + 1)
        received = [(s.number, s.path, s.saved_at, dict(s.metrics), s.nbytes, s.own_bytes) for s in own]
        return [Step(*each) for each in self._ranks.caller.exchange(received, "listing the steps")[0]]

    def _newest_first(self, *, stacklevel: int) -> list[Step]:
        found = list_steps(self.root)
        last = found.steps[-1].number if found.steps else -1
        for number, error in found.broken.items():
            if number > last:
                logger.info("step %d of %s is skipped: %s", number, self.root, error)
                warnings.warn(f"step {number} is skipped: {error}", stacklevel=stacklevel + 1)
        return found.steps[::-1]

    def check_free(self, step: int, *, overwrite: bool, stacklevel: int) -> None:
        """Check that a step can be saved; warn if there are later ones."""
        if not self._changes:
            return
        path = step_path(self.root, step)
        if not overwrite and os.path.lexists(path):
            raise DestinationExistsError(
                "this step was saved already", path=path, remedy="give overwrite=True, or delete it first"
            )
        later = [number for number in numbers_in(self.root) if number > step]
        if later:
            warnings.warn(
                f"step {step} is saved although there are later ones, up to step {later[-1]}, from which latest() and "
                "restore() continue: delete() them if this run replaces them",
                stacklevel=stacklevel + 1,
            )

    def record(self, step: int, metrics: Mapping[str, float] | None, keep: Keep) -> StepRecord:
        """Return what is stored with a step; its metrics are those of the coordinator, which alone checks them."""
        record = StepRecord(step, time.time(), checked_metrics(metrics if self._changes else None))
        if self._changes:
            keep.check(record.metrics)
        return record

    def path_of(self, step: int | Step, *, exists: bool = False) -> Path:
        """Return the path of a step; with ``exists``, NotFoundError if it does not exist."""
        return (existing_step if exists else step_path)(self.root, step.number if isinstance(step, Step) else step)

    def delete(self, step: int | Step) -> None:
        """Delete a step; NotFoundError if it does not exist."""
        with together(self._ranks, "deleting a step"), self._mutex:
            self.claim()
            if self._changes:
                remove_step(self.path_of(step, exists=True))

    def delete_unwanted(self, rule: Keep, protect: Collection[int] = ()) -> list[Step]:
        """Delete the steps that a rule does not keep, except for some; return them.

        A step that cannot be deleted does not prevent the deletion of others; `warn_of_undeleted` reports it.
        """
        deleted: list[Step] = []
        # If all are kept, the folder need not be read.
        if isinstance(rule, KeepAll) or not self._changes:
            return deleted
        with self._mutex:
            for step in unwanted(rule, list_steps(self.root).steps, protect):
                try:
                    remove_step(Path(step.path))
                    deleted.append(step)
                except TensorkeepError as error:
                    self._not_deleted = error
        return deleted

    def delete_after_save(self, rule: Keep, saved: int) -> None:
        """Delete the steps that a rule does not keep; an error is reported by `warn_of_undeleted`."""
        try:
            self.delete_unwanted(rule, protect=(saved,))
        except TensorkeepError as error:
            self._not_deleted = error

    def warn_of_undeleted(self, *, stacklevel: int) -> None:
        """Warn if a step could not be deleted since the last call."""
        error, self._not_deleted = self._not_deleted, None
        if error is not None:
            warnings.warn(f"an old step was not deleted: {error}", stacklevel=stacklevel + 1)
