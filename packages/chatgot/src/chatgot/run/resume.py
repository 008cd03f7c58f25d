"""How a run begins: new, with initial weights, as a branch of another run, or resumed; and what may change then.

A *segment* is the part of a run after a step that computes with other settings; ``run.json`` lists them.
"""

import logging
import math
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from chatgot.config.config import TECHNIQUES, Config, differences
from chatgot.data.dataset import Dataset
from chatgot.optim.schedules import Plateau, RangeTest
from chatgot.run import notes
from chatgot.run.folder import BranchOrigin, Changes, RunFolder, RunRecord, Segment, now
from chatgot.run.state import OpenRun
from chatgot.run.weights import InitialWeights
from chatgot.step.device import numerics_environment
from chatgot.techniques.base import TECHNIQUE_CLASSES
from chatgot.techniques.distributed import PARALLEL_TECHNIQUES
from tensorkeep import CheckpointManager
from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    PathLike,
    RanksDisagreeError,
    StateMismatchError,
    UsageError,
)
from tensorkeep.ext.checkpoint import backend_of, find_checkpoint

logger = logging.getLogger(__name__)

# Prefixes of the settings that a resumed run may change, and that later resumes keep. They do not affect the weights
# of a step, with the exception in `_begins_segment`.
_KEPT = ("log.", "eval.", "sample.", "checkpoint.", "loop.on_divergence", "loop.auto_batch_size")

# Prefixes of the settings that depend on where a run is resumed; they affect rounding only.
_OF_ONE_RESUME = (
    "loop.device",
    "loop.threads",
    "data.source",
    *(f"{TECHNIQUES}{name}" for name in PARALLEL_TECHNIQUES),
)

# Prefixes of the settings that begin a segment, because the state of a run fits them; restoring checks techniques.
# fmt: off
_OF_A_SEGMENT = (
    "schedule.", "loop.steps", "loop.batch_size", "loop.gradient_accumulation_steps", "data.order", "model.dropout",
    "ema.decay", "optim.lr", "optim.muon_lr", "optim.muon_momentum", "optim.muon_steps", "optim.weight_decay",
    "optim.beta1", "optim.beta2", "optim.eps", "optim.grad_clip", TECHNIQUES,
)
# fmt: on

# Prefixes of the settings that a branch may change, too. Its data must have the tokenizer of the run.
_OF_A_BRANCH = ("data.", "loop.seed")

_VOCABULARY = " (the model has the vocabulary of its tokenizer)"
# Why settings must not change, by their prefix.
_REASONS = {
    "ema.decay": " (the average of the weights begins with the run)",
    "model.": " (the weights of the run have the shape of its model)",
    "data.tokenizer": _VOCABULARY,
    "data.vocab_size": _VOCABULARY,
}


def current_config(record: RunRecord) -> Config:
    """Return the configuration of a run's last segment with the changes of its last resume that are kept."""
    changes = record.resumed[-1].settings if record.resumed else {}
    # Before there were segments, a run could only become longer, and that was recorded here.
    kept = (*_KEPT, "loop.steps")
    return record.last_config.changed({name: now for name, (_, now) in changes.items() if name.startswith(kept)})


def segment_settings(before: Config, config: Config, folder: RunFolder, *, branch: bool = False) -> Changes:
    """Return the changed settings that begin a segment or a branch; UsageError if another one must not change."""
    changes = differences(before, config)
    for technique in (name for name in before.techniques if name not in config.techniques):
        # A technique of a third party need not be installed any more.
        name = TECHNIQUE_CLASSES.get(technique).sets if technique in TECHNIQUE_CLASSES.names() else None
        if name is not None and name not in changes:
            raise UsageError(
                f"techniques.{technique} is turned off, and {name} would stay as it has set it: "
                f"{before.setting(name)!r}",
                path=folder.path,
                remedy=f"state another {name}, too" if name.startswith(_OF_A_SEGMENT) else "leave the technique on",
            )
    found = {name: values for name, values in changes.items() if _begins_segment(name, before)}
    free = (*_KEPT, *_OF_ONE_RESUME, *(_OF_A_BRANCH if branch else ()))
    reasons = {name: next((why for prefix, why in _REASONS.items() if name.startswith(prefix)), "") for name in changes}
    refused = [
        f"{name}: {values[0]!r} then, {values[1]!r} now{reasons[name]}"
        for name, values in changes.items()
        if (name not in found and not name.startswith(free)) or (name == "ema.decay" and 0 in values)
    ]
    if refused:
        raise UsageError(
            f"was started with another configuration: {'; '.join(refused)}",
            path=folder.path,
            remedy=f"leave these settings out to {'branch from' if branch else 'resume with those of'} the run, or "
            "start a new run in another --out",
        )
    return found


def _begins_segment(name: str, before: Config) -> bool:
    if name.startswith(_OF_ONE_RESUME):
        return False
    # This schedule depends on the evaluations.
    evaluations = ("eval.every", "eval.tokens", "eval.batches")
    return name.startswith(_OF_A_SEGMENT) or (name in evaluations and before.schedule.name == "plateau")


def segments_after(record: RunRecord, config: Config, step: int, folder: RunFolder) -> list[Segment]:
    """Return the segments of a run that resumes after a step; the last one is new if settings have changed."""
    if record.segments and step < (began := record.segments[-1].step):
        raise CorruptCheckpointError(
            f"the last segment of the run began after step {began}, and the last undamaged checkpoint is of step "
            f"{step}",
            path=folder.checkpoints,
            remedy=f"copy step {began} back, or begin another run there: tensorkeep train --branch "
            f"{shlex.quote(f'{folder.path}@{step}')} --out NEW",
        )
    if not segment_settings(current_config(record), config, folder):
        return record.segments
    # A segment that has made no step is replaced.
    kept = [segment for segment in record.segments if segment.step < step]
    before = kept[-1].config if kept else record.config
    # The device and the threads belong to one resume, and not to the segment.
    parallel = {f"{TECHNIQUES}{name}": before.techniques.get(name, "off") for name in PARALLEL_TECHNIQUES}
    of_one_resume = {name: before.setting(name) for name in _OF_ONE_RESUME if not name.startswith(TECHNIQUES)}
    after = config.changed(of_one_resume | parallel)
    settings = segment_settings(before, after, folder)
    check_steps(config, step, folder)
    return [*kept, Segment(step=step, time=now(), settings=settings, config=after)] if settings else kept


def check_steps(config: Config, step: int, folder: RunFolder) -> None:
    """Raise UsageError if a segment or branch after a step has no steps, or its schedule begins later."""
    if config.loop.steps <= step:
        raise UsageError(
            f"loop.steps is {config.loop.steps}, and {step} steps are done: none is left for the changed settings",
            path=folder.path,
            remedy=f"give the last step of the run, counted from its start: --loop.steps {2 * step}, for example",
        )
    if config.schedule.start > step:
        raise UsageError(
            f"schedule.start is {config.schedule.start}, and the next step is {step + 1}",
            # The user need not have given this start: it may come from a checkpoint that has turned out to be damaged.
            remedy=f"give {step} or less, such as --schedule.start {step}" if step else "leave it out",
        )


def with_schedule_start(config: Config, before: Config, given: Collection[str], step: int) -> Config:
    """Let another schedule than before begin after a step, without warm-up; settings in ``given`` stay."""
    if not any(name.startswith("schedule.") for name in differences(before, config)):
        return config
    defaults = {"schedule.start": step, "schedule.warmup_steps": 0}
    return config.changed({name: value for name, value in defaults.items() if name not in given})


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of a run, its metrics, and the configuration of its step."""

    folder: RunFolder
    step: int
    metrics: dict[str, float]
    config: Config

    @property
    def record(self) -> RunRecord:
        return self.folder.record()

    def check_data(self, dataset: Dataset) -> None:
        """Raise UsageError if a dataset has another tokenizer than the run."""
        if dataset.tokenizer.digest != self.folder.tokenizer().digest:
            raise UsageError(
                f"data.tokenizer: the tokenizer of this data is not the tokenizer of {self.folder.path}, and the model "
                "has the vocabulary of its tokenizer",
                path=dataset.path,
                remedy="give data of the same tokenizer, or leave --data out for the data of the run",
            )


def branch_point(address: PathLike) -> BranchPoint:
    """Return the checkpoint at an address such as ``run``, ``run@1200``, ``run@best``; NotACheckpointError if none."""
    folder, wanted = RunFolder.at(address)
    record = folder.record()
    number = find_checkpoint(f"{folder.checkpoints}@{wanted or 'latest'}").step
    if number is None:
        raise NotACheckpointError("holds no checkpoint", path=folder.checkpoints, remedy="resume the run first")
    step = backend_of(folder.checkpoints).read(number)
    return BranchPoint(folder, number, dict(step.metrics), record.config_after(number))


class NewRun:
    """How a run with random or given weights begins; ``before`` is the configuration of the run that it branches from.

    Given weights are saved as step 0, so that a resume does not need their source.
    """

    before: Config | None = None
    first_step = 0

    def __init__(self, folder: RunFolder, initial: InitialWeights | None = None) -> None:
        self.folder = folder
        self.initial = initial

    def check(self, config: Config, dataset: Dataset) -> None:
        """Raise UsageError if a configuration or data does not fit."""
        if self.initial is not None:
            self.initial.check(config.model)
            self.initial.check_data(dataset)
        check_steps(config, self.first_step, self.folder)

    def check_store(self, run: OpenRun) -> None:
        """Raise DestinationExistsError if the object store of the run has the steps of another one."""
        store = run.config.checkpoint.store
        last = None if store is None or run.folder.unfinished_start() is not None else run.manager.latest()
        if last is not None:
            raise DestinationExistsError(
                f"holds the steps of a run already, up to step {last.number}",
                path=store,
                remedy="choose another checkpoint.store, or resume that run where its folder is (--resume)",
            )

    def begin(self, run: OpenRun, config: Config) -> None:
        """Bring the run to its first step, and write its record. ``config`` is for all ranks, before sharding."""
        # The checkpoint of a run that was killed before it had its record; this run takes its place.
        step = run.world.broadcast(run.folder.unfinished_start())
        if step is not None:
            run.manager.delete(step)
        self._begin(run, config)

    def _begin(self, run: OpenRun, config: Config) -> None:
        if self.initial is not None:
            # A kill before the record leaves a checkpoint and no run: the next start replaces it.
            self._save_first(run)
            run.notes += tuple(notes.on_initial_weights(self.initial, config, run.dataset))
        elif run.world.is_main:
            # Another process may also have started a run here since the first check.
            run.folder.check_new()
        self._write_record(run, config)

    def _write_record(self, run: OpenRun, config: Config, origin: BranchOrigin | None = None) -> None:
        if run.world.is_main:
            initial = None if self.initial is None else self.initial.record
            run.folder.start(config, run.dataset, _environment(run), origin, initial)
            run.log.begin(run.progress.step)
        # No rank trains before the run has its record.
        run.world.barrier()

    def _save_first(self, run: OpenRun, metrics: Mapping[str, float] | None = None) -> None:
        # The record is written after the checkpoint: a run exists once it has its record, and it must not begin without
        # this checkpoint.
        run.folder.check_new()
        # Every rank has seen a folder without a run before the main one writes there.
        run.world.barrier()
        if run.world.is_main:
            run.folder.begin_start(self.first_step)
        run.manager.save(self.first_step, run.state(), metrics).wait()


class BranchedRun(NewRun):
    """How a branch begins: it restores a checkpoint of another run, and saves it as its own first one."""

    def __init__(self, folder: RunFolder, point: BranchPoint) -> None:
        super().__init__(folder)
        self.point = point
        self.before, self.first_step = point.config, point.step

    def check(self, config: Config, dataset: Dataset) -> None:
        self.point.check_data(dataset)
        segment_settings(self.point.config, config, self.point.folder, branch=True)
        super().check(config, dataset)

    def _begin(self, run: OpenRun, config: Config) -> None:
        point = self.point
        settings = segment_settings(point.config, config, point.folder, branch=True)
        # Taken before restoring, which replaces the settings of the optimizers by the stored ones.
        fresh = _group_settings(run)
        manager = CheckpointManager(point.folder.checkpoints, group=run.world.group)
        _restore(run, lambda into: manager.restore(step=point.step, into=into), changed=True)
        _adapt(run, settings, fresh)
        same_data = point.record.data.fingerprint == run.dataset.fingerprint
        if not same_data:
            # Other data is read from its first batch, because the position counts batches of the data before. Its
            # losses cannot be compared with earlier ones.
            run.batches.load_state_dict({"position": 0})
            run.progress.best = run.progress.loss = math.inf
            run.plateau.forget_losses()
        self._save_first(run, point.metrics if same_data else {})
        changes = differences(point.config, config)
        path = str(point.folder.path)
        origin = BranchOrigin(run=path, step=point.step, started=point.record.started, settings=changes)
        self._write_record(run, config, origin)
        run.notes += (
            f"branches from {path} after step {point.step}: {notes.describe(changes) or 'no changes'}; "
            f"{notes.on_rates(point.config, config, point.step, run.plateau.factor)}",
        )
        if same_data:
            run.notes += tuple(notes.on_evaluations(point.config, config, point.step))


class ResumedRun:
    """How a run resumes: it restores its last undamaged checkpoint, and begins a segment if settings have changed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = folder.record()
        self.before: Config = current_config(self.record)

    def check(self, config: Config, dataset: Dataset) -> None:
        """Raise UsageError if a setting has changed that must not change."""
        segment_settings(self.before, config, self.folder)

    def begin(self, run: OpenRun, config: Config) -> None:
        # The settings of the optimizers before restoring, which replaces them by the stored ones.
        fresh, folder, record = _group_settings(run), self.folder, self.record
        changed = bool(segment_settings(self.before, config, folder))
        if run.manager.latest() is None:
            # A run with random weights begins again: its seed makes the same weights.
            self._check_began_without_checkpoint(run)
        else:
            _restore(run, lambda into: run.manager.restore(into=into), changed=changed)
        step = run.progress.step
        segments = segments_after(record, config, step, folder)
        # No checkpoint of the segment exists yet.
        begins = bool(segments) and segments[-1].step == step
        if begins:
            # Each resume repeats this until the segment has a checkpoint, so that a kill at any moment changes nothing.
            _adapt(run, segments[-1].settings, fresh)
        # The user hears of a segment once, and not at each resume before its first checkpoint.
        if begins and segments != record.segments:
            before = segments[-2].config if segments[1:] else record.config
            run.notes += (notes.on_segment(len(segments) + 1, segments[-1], before, run.plateau.factor),)
        run.notes += tuple(notes.on_evaluations(self.before, config, step))
        here, began = _environment(run), record.numerics_environment
        # An earlier version may have recorded fewer properties.
        moved = {name: (began[name], now) for name, now in here.items() if name in began and began[name] != now}
        if moved:
            differing = "; ".join(f"{name} was {before}, and is {now}" for name, (before, now) in moved.items())
            note = f"results may differ in the last bits from those of an uninterrupted run: {differing}"
            run.notes = (note, *run.notes)
        if run.world.is_main:
            run.log.begin(step)
            if begins:
                # With the first step of the segment, so that a resume before the next checkpoint writes it again.
                run.log.write(step + 1, "leg", leg=len(segments) + 1, settings=segments[-1].settings)
            logger.info("resuming %s after step %d", folder.path, step)
            last = segments[-1].config if segments else record.config
            folder.add_resumption(step, differences(last, config), moved, run.dataset.verified, segments)

    def _check_began_without_checkpoint(self, run: OpenRun) -> None:
        """Raise CorruptCheckpointError if a run began with a checkpoint, and has lost it: its weights are unknown."""
        origin, store = self.record.origin, run.config.checkpoint.store
        if origin is None and self.record.initial is None:
            return
        first = 0 if origin is None else origin.step
        again = "start again from the same weights (--init-from)" if origin is None else "start the branch again"
        raise CorruptCheckpointError(
            f"has lost all checkpoints of its run, which began with step {first}",
            path=run.folder.checkpoints if store is None else store,
            remedy=f"copy step {first} or a later one back, or {again} in another --out",
        )


def _restore(run: OpenRun, restore: Callable[[Any], object], *, changed: bool) -> None:
    try:
        restore(run.state())
    except StateMismatchError as error:
        # Without changed settings, the error has another cause.
        if not changed:
            raise
        raise StateMismatchError(
            f"the state of the run does not fit the changed settings: {error.message}",
            path=error.path,
            remedy="leave out the techniques that change what is saved",
        ) from error
    if not run.world.all_equal(run.progress.step):
        # Each rank looks for the last undamaged checkpoint by itself.
        raise RanksDisagreeError(
            "the ranks of the run have found different checkpoints",
            path=run.folder.checkpoints,
            remedy="give all ranks the same folder",
        )


def _environment(run: OpenRun) -> dict[str, Any]:
    return numerics_environment(run.device) | {"processes": run.world.size}


def _group_settings(run: OpenRun) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for name, optimizer in run.optimizers.items()
    }


def _adapt(run: OpenRun, settings: Changes, fresh: dict[str, list[dict[str, Any]]]) -> None:
    """Change a restored state as the changed settings need it; ``fresh`` are the new settings of the optimizers."""
    # A checkpoint holds settings of the optimizers, too: the new ones replace them.
    for name, groups in fresh.items():
        for group, values in zip(run.optimizers[name].param_groups, groups, strict=True):
            group.update(values)
    # The patience of other settings says nothing about these.
    run.progress.waited = 0
    run.progress.range_test = RangeTest()
    # A new schedule counts the evaluations from 0.
    if any(name.startswith("schedule.") for name in settings):
        run.plateau.load_state_dict(Plateau(run.config.schedule).state_dict())
    if "loop.batch_size" in settings:
        before, after = settings["loop.batch_size"]
        # Rounded up: a window is left out rather than drawn twice.
        run.batches.load_state_dict({"position": -(-run.batches.position * before // after)})
