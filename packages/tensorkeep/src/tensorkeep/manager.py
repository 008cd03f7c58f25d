"""`tensorkeep.CheckpointManager`: saves the steps of a training run, deletes old steps, restores the last good one."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import msgspec

from tensorkeep.checkpoint.background import PendingSave, SaveQueue, WhenBusy, checked_budget, copies_of
from tensorkeep.checkpoint.loading import LoadRequest, load_path
from tensorkeep.checkpoint.options import (
    MemorySize,
    ProgressOption,
    SettingsSource,
    callback_only,
    open_settings,
    read_settings,
)
from tensorkeep.checkpoint.saving import begin_save, check_request, check_store, flat_state
from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    PathLike,
    RanksDisagreeError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    did_you_mean,
    explains_keywords,
    skipped,
    warn_caller,
)
from tensorkeep.formats.base import StepRecord
from tensorkeep.paths import StorePath, absolute, as_path, checked_path
from tensorkeep.ranks.group import Group, RankCoordinator, ranks_of
from tensorkeep.ranks.merge import PREPARING
from tensorkeep.runs.address import backend_of
from tensorkeep.runs.backends import StepBackend
from tensorkeep.runs.retention import Keep, KeepBest, Retention, unwanted
from tensorkeep.runs.steps import (
    Step,
    StepListing,
    UploadStatus,
    best_step,
    checked_metrics,
    is_damaged,
    manifest_digest,
    step_number,
)
from tensorkeep.runs.tiered import LocalTier, TieredBackend
from tensorkeep.runs.triggers import SaveWhen
from tensorkeep.state.leaf import Device
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.clock import clock
from tensorkeep.storage.parallel import reset_in_child, shielded
from tensorkeep.structs import prepared

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a `CheckpointManager` saves its steps.

    Parameters
    ----------
    compression, threads, progress, settings : optional
        See `tensorkeep.save`; ``progress`` is a function, and a settings file is read once.
    incremental : bool or "delta"
        Write only the blocks that have changed since the previous step, and share the files of the other blocks with
        it. ``"delta"`` also stores changed blocks as differences where that is smaller; it needs
        ``compression="lossless"``.
    asynchronous : bool
        Block the caller only while the state is copied.
    when_busy : {"wait", "replace"}
        What a save does while another one is being written: wait, or replace the save that waits in the queue.
        ``"replace"`` takes memory for a second copy.
    memory_budget : int or str, optional
        Limit in bytes for all copies and buffers together, also as ``"512MiB"``. They are kept between saves. By
        default what the state needs, but at most half of the available memory.

    Raises
    ------
    UsageError
        If ``incremental`` has another value, or ``"delta"`` comes with another compression.

    Examples
    --------
    >>> from tensorkeep import SaveOptions
    >>> SaveOptions(incremental="delta").codec
    'lossless'
    """

    compression: str | None = None
    incremental: bool | Literal["delta"] = False
    asynchronous: bool = True
    when_busy: WhenBusy = "wait"
    memory_budget: MemorySize | None = None
    threads: int | None = None
    progress: ProgressOption = None
    settings: SettingsSource | None = None

    def __post_init__(self) -> None:
        if self.incremental not in (False, True, "delta"):
            raise UsageError(f"incremental is {self.incremental!r}", remedy='give True, False or "delta"')
        if self.delta and self.compression not in (None, "lossless"):
            text = f'incremental="delta" needs compression="lossless", not {self.compression!r}'
            raise UsageError(text, remedy="leave out one argument")

    @property
    def delta(self) -> bool:
        return self.incremental == "delta"

    @property
    def codec(self) -> str | None:
        # A difference takes less space only when it is coded.
        return "lossless" if self.delta else self.compression


class ManagerKeywords(TypedDict, total=False):
    """The fields of `LocalTier`, `Retention` and `SaveOptions` as keywords of `CheckpointManager`."""

    keep_local: int | None
    upload_bytes_per_second: int | str | None
    keep_last: int | None
    keep_every: int | None
    keep_best: int | KeepBest | None
    metric: str | None
    mode: str | None
    keep: Keep | None
    compression: str | None
    incremental: bool | Literal["delta"]
    asynchronous: bool
    when_busy: WhenBusy
    memory_budget: MemorySize | None
    threads: int | None
    progress: ProgressOption
    settings: SettingsSource | None


# Of the managers of Orbax, Trainer and Lightning.
_OTHER_NAMES = {"max_to_keep": "keep_last", "save_total_limit": "keep_last", "save_top_k": "keep_best"}
_OTHER_NAMES |= {"monitor": "metric", "keep_period": "keep_every"}

Options = TypeVar("Options", LocalTier, Retention, SaveOptions)


def _with_keywords(options: Options, keywords: dict[str, Any]) -> Options:
    own = {field.name: keywords.pop(field.name) for field in fields(options) if field.name in keywords}
    return replace(options, **own) if own else options


class CheckpointManager:
    """The checkpoints of one training run, in one folder: ``step-000100``, ``step-000200``, ... A context manager.

    Many processes may read the folder, one may write: the first call that changes something locks it until `close`, or
    until the process ends, however it ends. A prefix of an object store has no lock: if two processes save one step,
    one process gets an error. Threads may share a manager.

    Parameters
    ----------
    root : path-like
        The folder, or the URL of a prefix in an object store; it need not exist.
    local : path-like or LocalTier, optional
        A folder of a disk, if ``root`` is in an object store: steps are saved there, and uploaded in the background.
        `wait` and `close` wait for the uploads. See `LocalTier`.
    retention : Retention, optional
        Which steps to keep; by default all. Steps are deleted after a later one is durable; the last one never is.
    save_when : SaveWhen, optional
        The rule that `due` asks.
    saving : SaveOptions, optional
        Compression, incremental and asynchronous saves, memory.
    group : torch.distributed.ProcessGroup, optional
        The ranks that save and restore together. All ranks make a manager and call its methods together, also `latest`
        and `due`. The metrics of rank 0 count.
    timeout : float, optional
        Seconds that a rank waits for the other ranks; half an hour by default.
    **keywords
        The fields of `LocalTier`, `Retention` and `SaveOptions`, such as ``keep_last=3`` or ``compression="lossless"``.
        A keyword wins over the same field of an options object.

    Raises
    ------
    UsageError
        If an argument or a setting is wrong, or arguments exclude each other.
    UnsupportedError
        If the store of ``root`` can only be read.

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
        local: PathLike | LocalTier | None = None,
        retention: Retention | None = None,
        save_when: SaveWhen | None = None,
        saving: SaveOptions | None = None,
        group: Group = None,
        timeout: float | None = None,
        **keywords: Unpack[ManagerKeywords],
    ) -> None:
        given: dict[str, Any] = {**keywords}
        options = _with_keywords(saving or SaveOptions(), given)
        retention = _with_keywords(retention or Retention(), given)
        self._best_rule, self.keep = retention.best_rule, retention.rule
        self._ranks = ranks_of(group, timeout)
        path = checked_path(root, stores=True)
        self.root = absolute(path)
        self._tier = None if local is None else _checked_tier(self.root, local, given, self._ranks)
        for name, value in given.items():
            if name not in ("keep_local", "upload_bytes_per_second"):
                known = (
                    "local",
                    "retention",
                    "save_when",
                    "saving",
                    "group",
                    "timeout",
                    *ManagerKeywords.__annotations__,
                )
                remedy = did_you_mean(name, known, "its arguments", aliases=_OTHER_NAMES)
                raise TypeError(f"CheckpointManager() got an unexpected keyword argument {name!r}: {remedy}")
            # None is the absence of a limit, which a manager without `local` has, too.
            if value is not None:
                raise UsageError(f"{name} has no effect without local=", remedy="give local=FOLDER, or leave it out")
        self._connect()
        # A forked child has neither the lock nor the connections of its parent.
        reset_in_child(self, CheckpointManager._connect)
        self.restored_from: Path | None = None
        self.save_when = save_when
        self._asynchronous = options.asynchronous
        copies = copies_of(options.when_busy, ranks=self._ranks.is_distributed)
        self._budget = checked_budget(
            options.memory_budget, copies=copies, delta=options.delta, background=options.asynchronous
        )
        self._queue = SaveQueue(options.when_busy, self._budget, alone=not self._ranks.is_distributed)
        incremental = {"incremental": True, "base": self._find_base, "delta": options.delta}
        self._request = partial(
            check_request,
            format="native",
            compression=options.codec,
            threads=options.threads,
            progress=callback_only(options.progress),
            settings=read_settings(options.settings),
            copy=True,
        )
        self._incremental = incremental if options.incremental else {}
        self._base: Path | None = None  # the step that the next incremental save builds on
        self._warns_of_later = True  # TensorkeepTrainer warns once, before it trains
        self._damaged: dict[Path, str | None] = {}  # steps that a restore found damaged, with their manifests' digests

    def __repr__(self) -> str:
        local = "" if self._tier is None else f", local={self._tier.folder!r}"
        rules = "".join(
            f", {name}={rule!r}" for name, rule in (("keep", self.keep), ("save_when", self.save_when)) if rule
        )
        return f"CheckpointManager({os.fspath(self.root)!r}{local}{rules})"

    def _connect(self) -> None:
        self._backend: StepBackend = backend_of(self.root)
        if self._tier is not None:
            assert isinstance(self.root, StorePath)
            self._backend = TieredBackend(self._tier, self.root, self.keep)

    # Finding steps

    def listing(self) -> StepListing:
        """Return the complete steps, and what is wrong with the others."""
        return self._backend.listing()

    def steps(self) -> list[Step]:
        """Return the complete steps, by number; a step that is being saved is not among them yet."""
        return self.listing().steps

    def latest(self) -> Step | None:
        """Return the last complete step, or None; a warning names later steps that are incomplete."""
        return next(iter(self._newest_first()), None)

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """Return the best complete step by a metric; None if no step has metrics, or all values are NaN.

        By default ``metric`` and ``mode`` are the manager's. Else the metric is the only one of the steps, their
        validation loss or their loss, and its name says whether its ``"min"`` or ``"max"`` is best. UsageError is
        raised if that is not clear, or if no step has the metric although some have others.
        """
        rule = self._best_rule
        if metric in (None, rule.metric):
            mode = mode or rule.mode
        return best_step(self.steps(), metric or rule.metric, mode)

    def uploads(self) -> list[UploadStatus]:
        """Return the steps that are in ``local`` and not in the store yet, by number.

        What an earlier process has left is included after the first call that changes something; see `claim`.
        """
        return self._backend.uploads()

    def _newest_first(self) -> Iterable[Step]:
        """Return the complete steps, the last one first; all ranks return the steps that rank 0 has found."""
        if not self._ranks.is_distributed:
            # An iterator: a step is looked at when it is asked for.
            return self._complete_steps()
        what = "listing the steps"
        found: list[tuple[Any, ...]] = []
        with self._ranks.reporting_errors(what):
            if self._ranks.is_main:
                # The ranks may be starting again after they were killed when only the last rename was missing.
                self._backend.finish_saves()
                found = [
                    (each.number, each.path, each.saved_at, dict(each.metrics), each.nbytes, each.own_bytes)
                    for each in self._complete_steps()
                ]
        return [Step(*each) for each in self._ranks.broadcast(found, what)]

    def _complete_steps(self) -> Iterator[Step]:
        """Yield the complete steps, the last one first; warn of later ones that are not complete."""
        found = self._backend.newest_first()
        broken: list[tuple[int, TensorkeepError]] = []
        for number, step in found:
            if isinstance(step, Step):
                break
            broken.append((number, step))
        else:
            # No step is complete.
            step = None
        for number, error in reversed(broken):
            logger.info("step %d of %s is skipped: %s", number, self.root, error)
            warn_caller(skipped(f"step {number}", error))
        if step is not None:
            yield step
            yield from (step for _, step in found if isinstance(step, Step))

    # Saving steps

    def due(self, step: int) -> bool:
        """Return whether to save after this step, by ``save_when``; UsageError if the manager has no such rule."""
        if self.save_when is None:
            raise UsageError("this manager has no rule for when to save", remedy="give it save_when=EverySteps(100)")
        due = self.save_when.due(step)
        if self.save_when.is_by_number:
            return due
        # Clocks and signals differ between ranks: all save if one would.
        return any(self._ranks.gather(due, "asking whether to save"))

    @explains_keywords(metric="give metrics={NAME: VALUE}")
    def save(
        self,
        step: int,
        state: object,
        metrics: Mapping[str, float] | None = None,
        *,
        overwrite: bool = False,
        files: Mapping[str, str | bytes] | None = None,
    ) -> PendingSave:
        """Save a step. The caller is blocked while the state is copied; if not asynchronous, until it is durable.

        Parameters
        ----------
        step : int
            Its number, 0 or more.
        state : nested dict, list, tuple of tensors, arrays, plain values and objects
            Objects with a ``state_dict()`` (modules, optimizers, schedulers, scalers, `tensorkeep.RandomState`) are
            replaced by what it returns.
        metrics : mapping of str to float, optional
            Stored with the step, for `best` and the rules. They survive the step, see `tensorkeep.log`.
        overwrite : bool
            Replace a step of that number. A damaged step is always replaced, so that a run that resumed from an
            earlier step can save it again.
        files : mapping of str to str or bytes, optional
            Small files that ``from_pretrained`` reads beside the weights: their contents by name, such as
            ``{"config.json": model.config.to_json_string()}``. They become durable with the step, are verified like
            it, and are deleted with it.

        Returns
        -------
        PendingSave
            ``wait()`` returns the report, or raises the error of the save.

        Raises
        ------
        UnsupportedLeafError, UsageError
            If the state or an argument cannot be saved. Nothing is written, and no queued save is replaced.
        DestinationExistsError
            If the step exists and is not damaged.
        BusyError
            If another process writes in the folder.
        TensorkeepError
            The error of an earlier save that was not waited for. This save is then not begun.
        """
        started = time.perf_counter()
        with self._queue.one_at_a_time():
            with self._ranks.reporting_errors(PREPARING):
                step = step_number(step, self.root)
                path = self._backend.path_of(step)
                record = self._record(step, metrics)
                # The lock comes before everything that looks at the folder: another process could change it.
                self._claim()
                # Waits for the save before this one. If that has failed, this one is not begun.
                self._queue.wait_for_place()
                self._queue.raise_failure()
                self._warn_of_failures()
                overwrite = self._check_free(step, overwrite=overwrite)
                request = self._request(
                    path,
                    overwrite=overwrite,
                    options={**self._incremental, "files": files},
                    step=record,
                    started=started,
                )
                # After all checks: an error before this leaves the queue as it was.
                flat = flat_state(state, self._ranks)
            on_durable = partial(self._after_save, path, step)
            prepare = partial(
                begin_save, flat, request, copy=self._asynchronous, on_durable=on_durable, ranks=self._ranks
            )
            pending = PendingSave((self._queue.add if self._asynchronous else self._queue.run)(prepare))
        if not self._asynchronous:
            pending.wait()
            self._warn_of_failures()
        if self.save_when is not None:
            self.save_when.saved(step)
        return pending

    def _record(self, step: int, metrics: Mapping[str, float] | None) -> StepRecord:
        is_main = self._ranks.is_main
        # The time of the call, when the state was reached. The step may be durable much later.
        record = StepRecord(step, clock().time(), checked_metrics(metrics if is_main else None))
        try:
            # As a reader will.
            msgspec.json.decode(msgspec.json.encode(record), type=prepared(StepRecord))
        except (msgspec.ValidationError, OverflowError) as error:
            text = f"step {step}, saved {record.saved_at:.0f} seconds after 1970, cannot be stored ({error})"
            remedy = "look at the number of the step and at the clock of this machine"
            raise UnsupportedError(text, path=self._backend.root, remedy=remedy) from error
        # Only rank 0 stores and checks metrics.
        if is_main:
            self.keep.check(record.metrics)
        return record

    def _check_free(self, step: int, *, overwrite: bool) -> bool:
        """Check that a step can be saved; return whether to replace an existing step."""
        if not self._ranks.is_main:
            return overwrite

        def look() -> tuple[bool, list[int]]:
            path, numbers = self._backend.path_of(step), self._backend.numbers()
            replaces = overwrite
            if step in numbers and not overwrite:
                # A step that a restore found damaged is replaced, if its manifest is still the same.
                known = self._damaged.get(path)
                replaces = is_damaged(path) or (known is not None and known == manifest_digest(path))
                if not replaces:
                    text = "this step was saved already"
                    raise DestinationExistsError(text, path=path, remedy="give overwrite=True, or delete it first")
            return replaces, [number for number in numbers if number > step]

        # In another thread, because Ctrl-C could otherwise leave an open directory behind.
        replaces, later = shielded(look)
        if later and self._warns_of_later:
            warn_caller(
                f"step {step} is saved although there are later ones, up to step {later[-1]}: latest() and restore() "
                "continue from the last one; delete() them if this run replaces them"
            )
        self._backend.before_save(step, overwrite=overwrite)
        return replaces

    def _find_base(self) -> Path | None:
        # A step that was saved or restored here: any other step may be damaged, and the new one would share its files.
        return self._base if self._base is not None and self._backend.exists(self._base) else None

    def _after_save(self, path: Path, step: int) -> None:
        # In the thread that wrote the step, once it is durable.
        self._base = path
        self._damaged.pop(path, None)  # the damaged step was replaced
        if self._ranks.is_main:
            self._backend.after_save(step, self.keep)

    def _warn_of_failures(self) -> None:
        for message in self._backend.take_warnings():
            warn_caller(message)

    def wait(self) -> None:
        """Wait until everything that was saved is durable; raise the error of a save that was not waited for.

        With ``local``, wait until it is in the store as well. StoreError names the steps that could not be uploaded.
        """
        self._queue.drain()
        try:
            self._backend.wait_for_uploads()
        finally:
            self._warn_of_failures()
            self._queue.raise_failure()

    # Restoring

    @explains_keywords(state="give into=", state_dict="give into=", map_location="give device=")
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
            By default the last step. If it turns out to be damaged, a warning names it, and the step before it is
            loaded.
        into, select, device, strict, threads, progress : optional
            See `tensorkeep.load`. With ``into``, the returned state contains the given tensors and objects.

        Raises
        ------
        NotACheckpointError
            If the step does not exist, or the folder has no steps.
        CorruptCheckpointError
            If the given step, or every step, is damaged. Tensors in ``into`` may be partly overwritten.
        StateMismatchError
            If ``into`` does not fit. Usually nothing was changed. If an object refuses its state later,
            the message says so.

        Examples
        --------
        >>> import tempfile, torch, tensorkeep
        >>> folder, weight = tempfile.TemporaryDirectory(), torch.ones(2)
        >>> with tensorkeep.CheckpointManager(folder.name) as manager:
        ...     pending = manager.save(1, {"weight": weight})
        >>> manager.restore()
        {'weight': tensor([1., 1.])}
        >>> folder.cleanup()
        """
        # A step that is being saved is the newest one.
        self._queue.drain()
        request = LoadRequest(into, select, device, strict, progress=progress, threads=threads, ranks=self._ranks)
        if step is not None:
            with self._ranks.reporting_errors("loading"):
                return self._restore(self._backend.find(_number(step)), request)
        return self._restore_newest(request)

    def _restore(self, path: Path, request: LoadRequest) -> Any:
        return self._backend.read_nearest(path, partial(self._load, request=request))

    def _load(self, path: Path, request: LoadRequest) -> Any:
        # Through the page cache if ranks of one machine read the same blocks: from the disk once.
        settings = open_settings(self._budget or DEFAULT_BUDGET, page_cache=self._ranks.is_distributed)
        state = load_path(path, settings, request, "native")
        self.restored_from = path
        # All blocks were checked, so the next incremental save may share them, unless the step is in another storage.
        if request.select is None:
            self._base = path if path.parent == self._backend.root else None
        return state

    def _restore_newest(self, request: LoadRequest) -> Any:
        """Restore the newest step that no rank finds damaged. Raises CorruptCheckpointError or NotACheckpointError."""
        first_error: TensorkeepError | None = None
        for found in self._newest_first():
            path = as_path(found.path)
            error: BaseException | None = None
            state, lost = None, self._ranks.lost
            try:
                state = self._restore(path, request)
            # BaseException: the other ranks must hear of Ctrl-C here as well.
            except BaseException as caught:
                error = caught
                if self._ranks.lost is not lost:
                    raise  # no rank can exchange anything now
            # All ranks restore the same step, or none does: they decide from the same list of outcomes.
            outcome = self._outcome(error, path)
            outcomes = self._ranks.gather(outcome, "restoring")
            if error is None and {*outcomes} == {"restored"}:
                return state
            if {*outcomes} <= {"damaged", "missing", "informed"} and isinstance(error, TensorkeepError):
                if "damaged" in outcomes:
                    first_error = first_error or error
                    # The digest, not the path: a later save may replace the step.
                    self._damaged[path] = manifest_digest(path)
                    logger.info("%s is damaged and skipped: %s", path, error)
                    warn_caller(skipped(path.name, error))
                    continue
                if outcomes[0] == "missing":
                    continue  # its writer has deleted it since it was listed
            if outcome == "missing":
                text = "this rank does not find a step that rank 0 has found"
                raise RanksDisagreeError(text, path=path, remedy="give a folder that all ranks share") from error
            raise error or RanksDisagreeError("other ranks could not restore it", path=path, remedy="see their errors")
        raise first_error or NotACheckpointError(
            "contains no steps", path=self._backend.root, remedy="check the folder, or start from the beginning"
        )

    def _outcome(self, error: BaseException | None, path: Path) -> str:
        if error is None:
            return "restored"
        if isinstance(error, CorruptCheckpointError):
            return "damaged"
        if isinstance(error, NotACheckpointError):
            return "missing"
        if isinstance(error, RanksDisagreeError):  # it reports the error of another rank
            return "informed" if self._backend.exists(path) else "missing"
        return "failed"

    # Deleting steps

    def delete(self, step: int | Step) -> None:
        """Delete a step, complete or damaged; other steps keep the files that they share with it.

        Raises NotFoundError if the step does not exist, NotACheckpointError if it has lost its manifest, UsageError if
        it contains files that do not belong to it, and BusyError or StoreError as `save`.
        """
        with self._ranks.collective("deleting a step"):
            if self._ranks.is_main:
                self._backend.claim()
                self._backend.delete([self._backend.find(_number(step))])

    def prune(self, *, dry_run: bool = False) -> list[Step]:
        """Delete the steps that no rule keeps, and return them; with ``dry_run``, only return them.

        Damaged steps are neither counted nor deleted. A warning names a step that cannot be deleted. In a store, what
        deleted steps and failed saves have left is deleted as well, when it is old enough. With ``local``, what is on
        the disk is uploaded first. Of many ranks, rank 0 deletes the steps, and the other ranks return an empty list.
        """
        if dry_run:
            return unwanted(self.keep, self.steps())
        self.claim()
        self._backend.wait_for_uploads()
        deleted: list[Step] = []
        with self._ranks.collective("deleting steps"):
            if self._ranks.is_main:
                deleted = self._backend.delete_unwanted(self.keep)
        self._warn_of_failures()
        return deleted

    # The lock of the folder

    def claim(self) -> None:
        """Lock the folder, as the first call that changes something does; BusyError if another process writes there."""
        with self._ranks.collective("locking the folder"):
            self._claim()

    def _claim(self) -> None:
        if self._ranks.is_main:
            self._backend.claim()

    def close(self) -> None:
        """Wait for saves, unlock the folder and free the buffers; raises like `wait`. The manager can be used again."""
        try:
            self.wait()
        finally:
            # Ctrl-C only ends the waiting: a running save continues, and the folder stays locked until it is over.
            if not self._queue.is_busy():
                self._backend.release()  # first: an interrupt of the other call must not leave the folder locked
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


def _checked_tier(
    root: Path, local: PathLike | LocalTier, keywords: dict[str, Any], ranks: RankCoordinator
) -> LocalTier:
    """Raises UsageError if the root is not in a store, or for many ranks; UnsupportedError for a read-only store."""
    if not isinstance(root, StorePath):
        text = "local= is for a run in an object store"
        raise UsageError(text, path=root, remedy="give a URL such as s3://bucket/run, or no local=")
    check_store(root, "native")
    if ranks.is_distributed:
        raise UsageError("local= and group= exclude each other", remedy="leave one out: ranks save into the store")
    return _with_keywords(local if isinstance(local, LocalTier) else LocalTier(local), keywords)


def _number(step: int | Step) -> int:
    return step.number if isinstance(step, Step) else step
