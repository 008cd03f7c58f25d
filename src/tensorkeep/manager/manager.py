"""`tensorkeep.CheckpointManager`: saves the steps of a training run, deletes old ones, restores the last good one."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool
from tensorkeep.checkpoint.background import PendingSave, SaveQueue, WhenBusy, copies_of
from tensorkeep.checkpoint.into import LoadRequest, load_path
from tensorkeep.checkpoint.memory import checked_budget
from tensorkeep.checkpoint.progress import ProgressOption, callback_only
from tensorkeep.checkpoint.saving import begin_save, check_request, flat_state
from tensorkeep.checkpoint.settings import SettingsSource, read_settings
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.manager.local_tier import local_tier
from tensorkeep.manager.triggers import SaveWhen
from tensorkeep.paths import as_path
from tensorkeep.ranks.collective import PREPARING
from tensorkeep.ranks.group import ranks_of, reported_to_others, together
from tensorkeep.runs.backends import place_of
from tensorkeep.runs.folder import StepFolder, StepQueries, restore_newest
from tensorkeep.runs.retention import Keep, KeepBest, best_rule, keep_rule, unwanted
from tensorkeep.runs.steps import Step, step_number
from tensorkeep.state.leaf import Device
from tensorkeep.storage.buffers import DEFAULT_BUDGET

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CheckpointManager(StepQueries):
    """The checkpoints of one training run, in one folder: ``step-000100``, ``step-000200``, ... A context manager.

    Many processes may read the folder, one may write: the first call that changes something locks it until `close`, or
    until the process ends, however it ends. A prefix of an object store has no lock: of two that save one step, one
    gets an error. Threads may share a manager.

    Parameters
    ----------
    root : path-like
        The folder, or the URL of a prefix in an object store; it need not exist.
    local : path-like, optional
        A folder of a disk, if ``root`` is in an object store. A step is saved there, and uploaded in the background
        once it is durable. It is restored from there, or from the store if the disk does not have it whole. `wait` and
        `close` wait for the uploads. What a killed process has left there is uploaded by the next one.
    keep_local : int or None
        How many of the last steps stay in ``local``, besides those that are not uploaded yet. None: those that the
        rules below keep, which otherwise apply to the store.
    upload_bytes_per_second : int or str, optional
        Limit of the uploads, also as ``"100MB"``.
    keep_last, keep_every : int, optional
        Keep the last N steps; keep the steps whose number is a multiple of N.
    keep_best : int or KeepBest, optional
        Keep the N best steps by ``metric``; all steps until one has metrics. See `KeepBest`.
    metric : str, optional
        The metric of ``keep_best`` and of `best`; may be omitted if the steps have only one.
    mode : {"min", "max"}, optional
        Which of its values is best. By default known from its name: small for ``val_loss``, large for ``accuracy``.
    keep : Keep, optional
        Any other rule. A step is kept if any rule keeps it; without rules, all are. Steps are deleted after a later one
        is durable; the last one never is.
    save_when : SaveWhen, optional
        The rule that `due` asks.
    incremental : bool or "delta"
        Write only the blocks that have changed since the previous step and share the files of the others with it; with
        ``"delta"`` also store changed blocks as differences where that is smaller (``compression="lossless"``).
    asynchronous : bool
        Block the caller only while the state is copied.
    when_busy : {"wait", "replace"}
        What a save does while another one is being written: wait, or be queued, in place of the one that is queued
        already. ``"replace"`` takes memory for a second copy.
    memory_budget : int or str, optional
        Limit in bytes for all copies and buffers together, which are kept between saves; see `tensorkeep.save_async`.
    compression, threads, progress, settings, group, timeout : optional
        The same as those of `tensorkeep.save`. A settings file is read once. With ``group`` all ranks make a manager
        and call its methods together, also `latest` and `due`; metrics are those of rank 0.

    Raises
    ------
    UsageError
        If an argument or a setting is wrong, or arguments exclude each other.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder, model = tempfile.TemporaryDirectory(), torch.nn.Linear(2, 2)
    >>> with tensorkeep.CheckpointManager(folder.name, keep_last=2) as manager:
    ...     for step in (100, 200, 300):
    ...         pending = manager.save(step, {"model": model, "step": step}, metrics={"loss": 1 / step})
    >>> [step.number for step in manager.steps()]
    [200, 300]
    >>> manager.restore(into={"model": model, "step": 0})["step"]
    300
    >>> folder.cleanup()
    """

    def __init__(
        self,
        root: PathLike,
        *,
        local: PathLike | None = None,
        keep_local: int | None = 2,
        upload_bytes_per_second: int | str | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | KeepBest | None = None,
        metric: str | None = None,
        mode: str | None = None,
        keep: Keep | None = None,
        save_when: SaveWhen | None = None,
        compression: str | None = None,
        incremental: bool | Literal["delta"] = False,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
        memory_budget: MemorySize | None = None,
        threads: int | None = None,
        progress: ProgressOption = None,
        settings: SettingsSource | None = None,
        group: "ProcessGroup | None" = None,
        timeout: float | None = None,
    ) -> None:
        delta = incremental == "delta"
        if incremental not in (False, True, "delta"):
            raise UsageError(f"incremental is {incremental!r}", remedy='give True, False or "delta"')
        if delta and compression not in (None, "lossless"):
            raise UsageError(
                f'incremental="delta" needs compression="lossless", not {compression!r}', remedy="leave one of them out"
            )
        self._best_rule = best_rule(keep_best, metric, mode)
        self.keep = keep_rule(keep_last, keep_every, self._best_rule if keep_best is not None else None, keep)
        self._ranks = ranks_of(group, timeout)
        tier = None if local is None else local_tier(root, self.keep, keep_local, upload_bytes_per_second, self._ranks)
        self._folder = StepFolder(root if local is None else local, self._ranks, make_place=tier or place_of)
        self.root = self._folder.root if tier is None else as_path(root)
        self.restored_from: Path | None = None
        self.save_when = save_when
        self._asynchronous = asynchronous
        copies = copies_of(when_busy, ranks=group is not None)
        self._budget = checked_budget(memory_budget, copies=copies, delta=delta, background=asynchronous)
        self._queue = SaveQueue(when_busy, self._budget, alone=group is None)
        self._request = partial(
            check_request,
            format="native",
            compression="lossless" if delta else compression,
            threads=threads,
            progress=callback_only(progress),
            settings=read_settings(settings),
            options={"incremental": True, "base": self._find_base, "delta": delta} if incremental else {},
            copy=True,
        )
        self._base: Path | None = None  # the step that the next incremental save builds on
        self._damaged: dict[Path, str | None] = {}

    def due(self, step: int) -> bool:
        """Return whether to save after this step, by ``save_when``; UsageError if the manager has no such rule."""
        if self.save_when is None:
            raise UsageError("this manager has no rule for when to save", remedy="give it save_when=EverySteps(100)")
        due = self.save_when.due(step)
        if self._ranks is None or self.save_when.is_by_number:
            return due
        return any(self._ranks.caller.exchange(due, "asking whether to save"))

    def save(
        self, step: int, state: object, metrics: Mapping[str, float] | None = None, *, overwrite: bool = False
    ) -> PendingSave:
        """Save a step; by default the caller is blocked only while the state is copied, otherwise until it is durable.

        Parameters
        ----------
        step : int
            Its number, 0 or more.
        state : nested dict, list, tuple of tensors, arrays, plain values and objects
            Objects with a ``state_dict()`` (modules, optimizers, schedulers, scalers, `tensorkeep.RandomState`) are
            replaced by what it returns.
        metrics : mapping of str to float, optional
            Stored with the step, for `best` and the rules.
        overwrite : bool
            Replace a step of that number. A damaged one is always replaced, so that a run that resumed from an
            earlier step can save it again.

        Raises
        ------
        UnsupportedLeafError, UsageError
            If the state or an argument cannot be saved. Nothing is written, and no queued save is replaced.
        DestinationExistsError, BusyError
            If the step exists and is not damaged; if another process writes in the folder.
        TensorkeepError
            The error of an earlier save that was not waited for; this save is then not begun.
        """
        started = time.perf_counter()
        with self._queue.one_at_a_time():
            with reported_to_others(self._ranks, PREPARING):
                step = step_number(step, self.root)
                path = self._folder.path_of(step)
                record = self._folder.record(step, metrics, self.keep)
                self._folder.claim()
                self._queue.wait_for_place()
                self._queue.raise_failure()
                self._folder.warn_of_undeleted(stacklevel=2)
                overwrite = self._folder.check_free(step, overwrite=overwrite, damaged=self._damaged, stacklevel=2)
                request = self._request(path, overwrite=overwrite, step=record, started=started)
                flat = flat_state(state, self._ranks)
            then = partial(self._note_saved, path, step)
            prepare = partial(begin_save, flat, request, copy=self._asynchronous, on_durable=then, ranks=self._ranks)
            pending = PendingSave((self._queue.add if self._asynchronous else self._queue.run)(prepare))
        if not self._asynchronous:
            pending.wait()
            self._folder.warn_of_undeleted(stacklevel=2)
        if self.save_when is not None:
            self.save_when.saved(step)
        return pending

    def _find_base(self) -> Path | None:
        """Return the step to build on: one that was saved or restored here, since others may be damaged."""
        return self._base if self._base is not None and self._folder.place.exists(self._base) else None

    def _note_saved(self, path: Path, step: int) -> None:
        """Finish a save, in the thread that wrote it, once the step is durable."""
        self._base = path
        self._damaged.pop(path, None)
        self._folder.delete_after_save(self.keep, step)

    def wait(self) -> None:
        """Wait until everything that was saved is durable; raise the error of a save that was not waited for.

        With ``local``, wait until it is in the store as well. StoreError names the steps that could not be uploaded.
        """
        self._queue.drain()
        try:
            self._folder.place.settle()
        finally:
            self._folder.warn_of_undeleted(stacklevel=2)
            self._queue.raise_failure()

    def restore(
        self,
        step: int | Step | None = None,
        into: Any = None,
        *,
        select: str | Iterable[str] | None = None,
        device: Device = None,
        strict: bool = True,
        threads: int | None = None,
        progress: ProgressOption = None,
    ) -> Any:
        """Load a step, by default the last one that is complete and undamaged; return the state as it was saved.

        Parameters
        ----------
        step : int or Step, optional
            Which one. By default the last; if that turns out to be damaged, a warning names it and the one before is
            loaded.
        into : nested state, optional
            Tensors and arrays to fill in place, and objects with a ``load_state_dict()``. What is missing, extra or of
            another shape is named before anything is changed. An object with a ``check_state_dict()`` is asked then.
            Saved entries that are not given are not loaded. The returned state contains what was given.
        select : str or list of str, optional
            Names, or globs, of what is restored; with ``into`` all else is left as it is. Of objects other
            than modules, all tensors or none are selected.
        device, strict, threads, progress : optional
            The same as those of `tensorkeep.load`.

        Raises
        ------
        NotACheckpointError
            If the step does not exist, or the folder has none.
        CorruptCheckpointError
            If the given step, or every one, is damaged; tensors in ``into`` may be partly overwritten.
        StateMismatchError
            If ``into`` does not fit. Usually nothing was changed; the message names the cases in which an object
            refuses its state later.
        """
        self._queue.drain()
        request = LoadRequest(into, select, device, strict, progress=progress, threads=threads, ranks=self._ranks)
        if step is not None:
            with reported_to_others(self._ranks, "loading"):
                return self._restore(self._folder.path_of(step, exists=True), request)
        restore = partial(self._restore, request=request)
        return restore_newest(self._folder, restore, self._damaged, self._ranks, stacklevel=2)

    def _restore(self, path: Path, request: LoadRequest) -> Any:
        return self._folder.place.read_nearest(path, partial(self._load, request=request))

    def _load(self, path: Path, request: LoadRequest) -> Any:
        settings = OpenSettings(pool=budget_pool(self._budget or DEFAULT_BUDGET), page_cache=self._ranks is not None)
        state = load_path(path, settings, request, "native")
        self.restored_from = path
        if request.select is None:
            self._base = path if path.parent == self._folder.root else None
        return state

    def delete(self, step: int | Step) -> None:
        """Delete a step, complete or damaged; other steps keep the files that they share with it.

        Raises
        ------
        NotFoundError, NotACheckpointError, UsageError, BusyError, StoreError
            If the step does not exist, has lost its manifest, or holds files that do not belong to it; if another
            process writes in the folder, or the disk failed.
        """
        self._folder.delete(step)

    def prune(self, *, dry_run: bool = False) -> list[Step]:
        """Delete the steps that no rule keeps, and return them; with ``dry_run``, only return them.

        Damaged steps are neither counted nor deleted. A warning names a step that cannot be deleted. In a store, what
        deleted steps and failed saves have left is deleted as well, when it is old enough. With ``local``, what is on
        the disk is uploaded first.
        """
        if dry_run:
            return unwanted(self.keep, self.steps())
        self.claim()
        self._folder.place.settle()
        with together(self._ranks, "deleting steps"):
            deleted = self._folder.delete_unwanted(self.keep)
        self._folder.warn_of_undeleted(stacklevel=2)
        return deleted

    def claim(self) -> None:
        """Lock the folder, as the first call that changes something does; BusyError if another process writes there."""
        with together(self._ranks, "locking the folder"):
            self._folder.claim()

    def close(self) -> None:
        """Wait for saves, unlock the folder and free the buffers; raise as `wait`. The manager can still be used."""
        try:
            self.wait()
        finally:
            # Ctrl-C ends the waiting only: a save that runs continues, and the folder stays locked until it is over.
            if not self._queue.is_busy():
                self._folder.release()  # first, as an interrupt of the other call must not leave it locked
                self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failure:
            # The error that ended the block comes first.
            if error is None:
                raise
            error.add_note(f"a checkpoint was not saved, or not uploaded: {failure}")
