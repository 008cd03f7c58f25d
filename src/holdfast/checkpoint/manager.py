"""The checkpoints of a training run: saved in the background, found again, thinned out, and restored."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast.checkpoint.arguments import MemorySize, checked_path
from holdfast.checkpoint.background import PendingSave, begin_save
from holdfast.checkpoint.queue import SaveQueue, WhenBusy
from holdfast.checkpoint.restore import restore_state
from holdfast.checkpoint.retention import Keep, KeepBest, keep_rule, to_delete
from holdfast.checkpoint.save_memory import SaveMemory
from holdfast.checkpoint.stateful import expand
from holdfast.checkpoint.steps import Step, Survey, step_path, survey
from holdfast.checkpoint.triggers import SaveWhen
from holdfast.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    HoldfastError,
    NotACheckpointError,
    PathLike,
    UsageError,
)
from holdfast.formats.base import StepRecord
from holdfast.io.commit import withdraw
from holdfast.io.files import store_error
from holdfast.io.ownership import Ownership
from holdfast.io.parallel import Progress
from holdfast.io.temporaries import remove_abandoned

if TYPE_CHECKING:
    import torch


class CheckpointManager:
    """The checkpoints of one training run, in one folder; a context manager.

    Any number of processes may read the folder. One may write: the first call that changes something takes the folder,
    until `close`, or until the process ends, however it ends.

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
        As for `holdfast.save`.
    incremental : bool or "delta"
        Write only the blocks that have changed since the step before, and link the files of the others; with
        ``"delta"`` store differences of what has changed, too, where that is smaller (``compression="lossless"``).
    asynchronous : bool
        Let the caller wait only while the state is copied.
    when_busy : str
        What a save does while another one is being written: ``"wait"`` for it, or be queued and ``"replace"`` what is
        in the queue already, which takes memory for a second copy.
    memory_budget : int or str, optional
        Bytes that all copies and buffers together may take; see `holdfast.save_async`. It is kept between saves.
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
        self.root = Path(os.path.abspath(checked_path(root)))
        self.keep = keep_rule(keep_last, keep_every, keep_best, keep)
        self.save_when = save_when
        self._best_rule = keep_best if isinstance(keep_best, KeepBest) else KeepBest()
        self._compression = "lossless" if incremental == "delta" else compression
        self._incremental = incremental
        self._asynchronous = asynchronous
        self._threads = threads
        self._progress = progress
        self._queue = SaveQueue(when_busy, memory_budget)
        self._ownership: Ownership | None = None
        self._base: Path | None = None
        self._mutex = threading.RLock()

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
            As for `holdfast.save`; objects with a ``state_dict()`` (modules, optimizers, schedulers, scalers,
            `holdfast.RandomState`) stand for what it returns.
        metrics : mapping of str to float, optional
            Kept with the step, for `best` and the rules.
        overwrite : bool
            Replace a step of that number.

        Returns
        -------
        PendingSave
            Over already, where the manager is not asynchronous.

        Raises
        ------
        HoldfastError
            What is wrong with this save, or the error of an earlier one that nobody has waited for; then this one was
            not begun.
        """
        begin = time.perf_counter()
        path = step_path(self.root, step)
        record = StepRecord(step, time.time(), _checked_metrics(metrics))
        self._own()
        self._queue.make_room()
        self._queue.raise_failure()
        if not overwrite and os.path.lexists(path):
            raise DestinationExistsError(
                "this step was saved already", path=path, remedy="give overwrite=True, or delete it first"
            )
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
        pending = begun(prepare, lambda: self._after(path))
        if not self._asynchronous:
            pending.wait()
        if self.save_when is not None:
            self.save_when.saved(step)
        return pending

    def _options(self) -> dict[str, Any]:
        if not self._incremental:
            return {}
        return {"incremental": True, "base": self._find_base, "delta": self._incremental == "delta"}

    def _find_base(self) -> Path | None:
        """Return the step to build on, when the writing begins: what was saved before is durable then."""
        if self._base is not None and self._base.exists():
            return self._base
        steps = self.steps()
        return Path(steps[-1].path) if steps else None

    def _after(self, path: Path) -> None:
        """What is left to do in the background once a step is durable."""
        self._base = path
        self.prune()

    def wait(self) -> None:
        """Wait until everything that was saved is durable.

        Raises
        ------
        HoldfastError
            If a save has failed that nobody has waited for.
        """
        self._queue.drain()
        self._queue.raise_failure()

    # Finding

    def survey(self) -> Survey:
        """Look at all steps: those that are whole, and what is wrong with the others."""
        return survey(self.root)

    def steps(self) -> list[Step]:
        """Return the steps that are whole, by number; what is being saved is not among them yet."""
        return self.survey().steps

    def latest(self) -> Step | None:
        """Return the last step that is whole, or None; steps that are not are passed over with a warning."""
        found = self.survey()
        _say_passed_over(found, stacklevel=3)
        return found.steps[-1] if found.steps else None

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """Return the best step that is whole, by a metric, or None if no step has it.

        Parameters
        ----------
        metric : str, optional
            As the manager's ``keep_best`` says, or the only one that the steps have, unless given.
        mode : str, optional
            ``"min"`` or ``"max"``; as the manager's ``keep_best`` says, or ``"min"``.
        """
        rule = replace(
            self._best_rule,
            metric=self._best_rule.metric if metric is None else metric,
            mode=self._best_rule.mode if mode is None else mode,
        )
        return next(iter(rule.ranked(self.steps())), None)

    # Restoring

    def restore(
        self,
        step: int | Step | None = None,
        into: Any = None,
        *,
        device: torch.device | str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Load a step, by default the last one that is whole and undamaged.

        Parameters
        ----------
        step : int or Step, optional
            Which one. If it is not given, a step that turns out to be damaged is passed over with a warning.
        into : nested state, optional
            As for `holdfast.load`, and objects with a ``load_state_dict()`` are given theirs. What is missing, extra or
            of another shape is named before anything is touched.
        device : torch.device or str, optional
            Where new tensors go.
        threads : int, optional
            Reading threads.
        progress : callable, optional
            Called with (bytes done, bytes in all).

        Returns
        -------
        state
            The state; with ``into``, with the very objects that were given.

        Raises
        ------
        NotACheckpointError
            If there is no such step, or none at all.
        CorruptCheckpointError
            If the step that was asked for is damaged, or all are.
        StateMismatchError
            If ``into`` does not fit; nothing was touched.
        """
        self._queue.drain()
        if step is not None:
            path = step_path(self.root, step.number if isinstance(step, Step) else step)
            return restore_state(path, into=into, device=device, threads=threads, progress=progress)
        damaged: CorruptCheckpointError | None = None
        for path in self._newest_first():
            try:
                return restore_state(path, into=into, device=device, threads=threads, progress=progress)
            except CorruptCheckpointError as error:
                damaged = damaged or error
                warnings.warn(f"{path.name} is passed over: {error}", stacklevel=2)
            except NotACheckpointError:
                continue  # its writer has deleted it since
        raise damaged or NotACheckpointError(
            "holds no step", path=self.root, remedy="check the folder, or start from the beginning"
        )

    def _newest_first(self) -> list[Path]:
        found = self.survey()
        _say_passed_over(found, stacklevel=4)
        return [Path(each.path) for each in reversed(found.steps)]

    # Deleting

    def delete(self, step: int | Step) -> None:
        """Delete a step, whole or broken; others that share its files keep them.

        Raises
        ------
        NotACheckpointError
            If there is none of that number.
        """
        path = step_path(self.root, step.number if isinstance(step, Step) else step)
        self._own()
        if not os.path.lexists(path):
            raise NotACheckpointError("there is no such step", path=path, remedy="see steps()")
        with self._mutex:
            self._remove(path)

    def prune(self, *, dry_run: bool = False) -> list[Step]:
        """Delete the steps that no rule wants; return them.

        Broken steps are neither counted nor deleted.

        Parameters
        ----------
        dry_run : bool
            Delete nothing.
        """
        with self._mutex:
            if not dry_run:
                self._own()
            gone = to_delete(self.keep, self.steps())
            if not dry_run:
                for step in gone:
                    self._remove(Path(step.path))
            return gone

    def _remove(self, path: Path) -> None:
        try:
            withdraw(path)
        except OSError as error:
            raise store_error(error, path, "delete the step") from error

    # The folder

    def _own(self) -> None:
        with self._mutex:
            if self._ownership is None:
                self._ownership = Ownership(self.root)
                remove_abandoned(self.root)

    def close(self) -> None:
        """Wait for what is being saved, and let others write; the manager can still be used.

        Raises
        ------
        HoldfastError
            If a save has failed that nobody has waited for.
        """
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
        except HoldfastError as failure:
            # What ended the block matters more; the save's error is not lost either.
            if error is None:
                raise
            error.add_note(f"a checkpoint was not saved: {failure}")


def _say_passed_over(found: Survey, *, stacklevel: int) -> None:
    """Warn of steps that are not whole and later than the last one that is."""
    last = found.steps[-1].number if found.steps else -1
    for number, error in found.broken.items():
        if number > last:
            warnings.warn(f"step {number} is passed over: {error}", stacklevel=stacklevel)


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
            found[str(name)] = number if math.isfinite(number) else str(number)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the metric {name!r} is {value!r:.80}", remedy="give a number") from error
    return found
