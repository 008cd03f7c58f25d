"""The checkpoints of a training run: saved in the background, found again, thinned out, and restored."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.checkpoint.manager.retention import Keep, KeepAll, KeepBest, keep_rule, to_delete
from tensorkeep.checkpoint.manager.step_folder import StepFolder
from tensorkeep.checkpoint.manager.steps import Step, numbers_in, read_step, remove_step, step_number, step_path
from tensorkeep.checkpoint.manager.triggers import SaveWhen
from tensorkeep.checkpoint.restore.stateful import expand
from tensorkeep.checkpoint.save.background import begin_save
from tensorkeep.checkpoint.save.memory import SaveMemory, checked_budget
from tensorkeep.checkpoint.save.pending import PendingSave
from tensorkeep.checkpoint.save.queue import SaveQueue, WhenBusy, copies_of
from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UsageError,
)
from tensorkeep.formats.base import StepRecord
from tensorkeep.io.lock import FolderLock
from tensorkeep.io.parallel import Progress
from tensorkeep.io.temporaries import remove_abandoned


class CheckpointManager(StepFolder):
    """The checkpoints of one training run, in one folder; a context manager.

    Any number of processes may read the folder. One may write: the first call that changes something takes the folder,
    until `close`, or until the process ends, however it ends. Threads may share a manager; their saves are made one
    after another.

    Parameters
    ----------
    root : path-like
        The folder. It need not exist.
    keep_last : int, optional
        Keep the last so many steps.
    keep_every : int, optional
        Keep the steps whose number is a multiple of it.
    keep_best : int or KeepBest, optional
        Keep the so many best steps by their metric; see `KeepBest` for which metric.
    keep : Keep, optional
        Any other rule. A step is kept if any rule wants it, and all are where there is no rule. Nothing is deleted
        before a later step is durable, and the last one never.
    save_when : SaveWhen, optional
        When `due` says that it is time to save.
    compression : str, optional
        As for `tensorkeep.save`.
    incremental : bool or "delta"
        Write only the blocks that have changed since the step before, and link the files of the others; with
        ``"delta"`` store differences of what has changed, too, where that is smaller (``compression="lossless"``).
    asynchronous : bool
        Let the caller wait only while the state is copied.
    when_busy : str
        What a save does while another one is being written: ``"wait"`` for it, or be queued and ``"replace"`` what is
        in the queue already, which takes memory for a second copy.
    memory_budget : int or str, optional
        Bytes that all copies and buffers together may take; see `tensorkeep.save_async`. It is kept between saves.
    threads : int, optional
        Writing threads.
    progress : callable, optional
        Called with (bytes done, bytes in all), from the writing threads, one call at a time.

    Raises
    ------
    UsageError
        If an argument makes no sense.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | KeepBest | None = None,
        keep: Keep | None = None,
        save_when: SaveWhen | None = None,
        compression: str | None = None,
        incremental: bool | Literal["delta"] = False,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
        memory_budget: MemorySize | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if incremental not in (False, True, "delta"):
            raise UsageError(f"incremental is {incremental!r}", remedy='give True, False or "delta"')
        if incremental == "delta" and compression not in (None, "lossless"):
            raise UsageError(
                f'incremental="delta" needs compression="lossless", not {compression!r}', remedy="leave one of them out"
            )
        super().__init__(root, keep_best if isinstance(keep_best, KeepBest) else KeepBest())
        self.keep = keep_rule(keep_last, keep_every, keep_best, keep)
        self.save_when = save_when
        self._compression = "lossless" if incremental == "delta" else compression
        self._incremental = incremental
        self._asynchronous = asynchronous
        self._when_busy: WhenBusy = when_busy
        self._budget = checked_budget(
            memory_budget, copies=copies_of(when_busy), delta=incremental == "delta", background=asynchronous
        )
        self._threads = threads
        self._progress = progress
        self._base: Path | None = None
        self._damaged: set[Path] = set()
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Begin without a save on its way and without the folder; a forked child does, too."""
        self._queue = SaveQueue(self._when_busy, self._budget)
        self._ownership: FolderLock | None = None
        self._mutex = threading.RLock()
        self._saving = threading.RLock()
        self._inside = False
        self._not_deleted: TensorkeepError | None = None

    # Saving

    def due(self, step: int) -> bool:
        """Say whether it is time to save, by ``save_when``.

        Raises
        ------
        UsageError
            If the manager was made without it.
        """
        if self.save_when is None:
            raise UsageError("this manager has no rule for when to save", remedy="give it save_when=EverySteps(100)")
        return self.save_when.due(step)

    def save(
        self, step: int, state: object, metrics: Mapping[str, float] | None = None, *, overwrite: bool = False
    ) -> PendingSave:
        """Save a step; by default the caller waits only while the state is copied.

        Parameters
        ----------
        step : int
            Its number, 0 or more.
        state : nested state
            As for `tensorkeep.save`; objects with a ``state_dict()`` (modules, optimizers, schedulers, scalers,
            `tensorkeep.RandomState`) stand for what it returns.
        metrics : mapping of str to float, optional
            Kept with the step, for `best` and the rules.
        overwrite : bool
            Replace a step of that number. One that is damaged, as its files show or `restore` has found, is replaced
            in any case: a run that has gone on from an earlier one makes it again.

        Returns
        -------
        PendingSave
            Over already, where the manager is not asynchronous.

        Raises
        ------
        TensorkeepError
            What is wrong with this save, or the error of an earlier one that nobody has waited for; then this one was
            not begun.
        """
        begin = time.perf_counter()
        step = step_number(step, self.root)
        path = step_path(self.root, step)
        record = StepRecord(step, time.time(), _checked_metrics(metrics))
        self.keep.check(record.metrics)
        with self._one_save_at_a_time():
            self.claim()
            self._queue.make_room()
            self._queue.raise_failure()
            self._say_what_was_not_deleted(stacklevel=3)
            overwrite = overwrite or (os.path.lexists(path) and self._is_damaged(step, path))
            self._check_number(step, path, overwrite=overwrite)
            plain = expand(state)

            def prepare(memory: SaveMemory) -> PendingSave:
                return begin_save(
                    plain,
                    path,
                    memory,
                    begin=begin,
                    compression=self._compression,
                    format="native",
                    overwrite=overwrite,
                    metadata=None,
                    progress=self._progress,
                    threads=self._threads,
                    options=self._options(),
                    step=record,
                    copy=self._asynchronous,
                )

            begun = self._queue.add if self._asynchronous else self._queue.run
            pending = begun(prepare, lambda: self._saved(path, step))
        if not self._asynchronous:
            pending.wait()
            self._say_what_was_not_deleted(stacklevel=3)
        if self.save_when is not None:
            self.save_when.saved(step)
        return pending

    @contextmanager
    def _one_save_at_a_time(self) -> Iterator[None]:
        with self._saving:
            if self._inside:
                raise UsageError(
                    "save() was called while this thread is in save(), by a signal handler perhaps",
                    path=self.root,
                    remedy="let the handler note the signal, and save after the step: see OnSignal",
                )
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def _is_damaged(self, step: int, path: Path) -> bool:
        if path in self._damaged:
            return True
        try:
            read_step(self.root, step)
        except CorruptCheckpointError:
            return True
        except TensorkeepError:
            return False  # what is there, if anything, is none of ours, or of a later version
        return False

    def _check_number(self, step: int, path: Path, *, overwrite: bool) -> None:
        if not overwrite and os.path.lexists(path):
            raise DestinationExistsError(
                "this step was saved already", path=path, remedy="give overwrite=True, or delete it first"
            )
        later = [number for number in numbers_in(self.root) if number > step]
        if later:
            warnings.warn(
                f"step {step} is saved while later ones are there, up to step {later[-1]}, from which latest() and "
                "restore() go on: delete() them if this run shall take their place",
                stacklevel=3,
            )

    def _options(self) -> dict[str, Any]:
        if not self._incremental:
            return {}
        return {"incremental": True, "base": self._find_base, "delta": self._incremental == "delta"}

    def _find_base(self) -> Path | None:
        """Return the step to build on, when the writing begins: what was saved before is durable then.

        Only what this manager has saved or restored: of other steps nobody knows whether their bytes are still right.
        """
        return self._base if self._base is not None and self._base.exists() else None

    def _saved(self, path: Path, step: int) -> None:
        """What is left to do in the background once a step is durable."""
        self._base = path
        self._damaged.discard(path)
        try:
            self._delete_unwanted(protect=(step,))
        except TensorkeepError as error:
            # The step is there all the same.
            self._not_deleted = error

    def wait(self) -> None:
        """Wait until everything that was saved is durable.

        Raises
        ------
        TensorkeepError
            If a save has failed that nobody has waited for.
        """
        self._queue.drain()
        self._say_what_was_not_deleted(stacklevel=3)
        self._queue.raise_failure()

    def _settle(self) -> None:
        self._queue.drain()

    def _restored(self, step: Path) -> None:
        self._base = step

    def _passed_over(self, step: Path) -> None:
        self._damaged.add(step)

    def _say_what_was_not_deleted(self, *, stacklevel: int) -> None:
        error, self._not_deleted = self._not_deleted, None
        if error is not None:
            warnings.warn(f"a step that no rule wants was not deleted: {error}", stacklevel=stacklevel)

    # Deleting

    def delete(self, step: int | Step) -> None:
        """Delete a step, whole or damaged; others that share its files keep them.

        Raises
        ------
        NotACheckpointError
            If there is none of that number, or what is there is no step, or has lost its manifest.
        UsageError
            If it holds files that are no part of it.
        """
        path = step_path(self.root, step.number if isinstance(step, Step) else step)
        self.claim()
        if not os.path.lexists(path):
            raise NotFoundError("there is no such step", path=path, remedy="see steps()")
        with self._mutex:
            remove_step(path)

    def prune(self, *, dry_run: bool = False) -> list[Step]:
        """Delete the steps that no rule wants; return them.

        Broken steps are neither counted nor deleted; a warning tells of one that cannot be deleted.

        Parameters
        ----------
        dry_run : bool
            Delete nothing.
        """
        if dry_run:
            return to_delete(self.keep, self.steps())
        self.claim()
        gone = self._delete_unwanted()
        self._say_what_was_not_deleted(stacklevel=3)
        return gone

    def _delete_unwanted(self, protect: tuple[int, ...] = ()) -> list[Step]:
        # Where all are kept, there is no need to look at them.
        if isinstance(self.keep, KeepAll):
            return []
        with self._mutex:
            gone = to_delete(self.keep, self.steps(), protect=protect)
            return [step for step in gone if self._removed(step)]

    def _removed(self, step: Step) -> bool:
        """Delete a step; one that cannot be deleted does not keep the others, and is told of by the next call."""
        try:
            remove_step(Path(step.path))
        except TensorkeepError as error:
            self._not_deleted = error
            return False
        return True

    # The folder

    def claim(self) -> None:
        """Take the folder, which the first call that changes something does by itself.

        Raises
        ------
        BusyError
            If another process writes there.
        StoreError
            If the operating system refuses.
        """
        with self._mutex:
            if self._ownership is None or not self._ownership.is_held():
                self._ownership = FolderLock(self.root)
                remove_abandoned(self.root)

    def close(self) -> None:
        """Wait for what is being saved, and let others write; the manager can still be used.

        Raises
        ------
        TensorkeepError
            If a save has failed that nobody has waited for.
        """
        # Ctrl-C ends the waiting only: the save goes on, and until it is over nobody else may write.
        self._queue.drain()
        try:
            self.wait()
        finally:
            self._queue.close()
            if self._ownership is not None:
                self._ownership.release()
                self._ownership = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            # What ended the block matters more; the save's error is not lost either.
            if error is None:
                raise
            error.add_note(f"a checkpoint was not saved: {failure}")


def _checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the metrics as they are stored: see `StepRecord`.

    Raises
    ------
    UsageError
        If one is no number.
    """
    found: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
            str(name).encode()
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"the metric {name!r:.80} is {value!r:.80}", remedy="give a number, under a name that is text"
            ) from error
        found[str(name)] = number if math.isfinite(number) else str(number)
    return found


_all: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _begin_in_child() -> None:
    # A forked child has neither the thread that writes nor the right to: what its parent has begun is not its own.
    for manager in list(_all):
        manager._begin()


os.register_at_fork(after_in_child=_begin_in_child)
