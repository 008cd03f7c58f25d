"""The start of a run in a process: a new record, the last checkpoint of the run, or that of a run to branch from.

Where a leg begins, the restored state is that of other settings, and `_adapt` changes what depends on them. A resume
repeats that until a checkpoint of the leg exists, so that a kill at any moment changes nothing.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, RanksDisagreeError, StateMismatchError
from tensorkeep.train.config.config import Config, differences
from tensorkeep.train.initial import InitialWeights
from tensorkeep.train.optim.schedules import Plateau, RangeTest
from tensorkeep.train.run.branch import BranchPoint
from tensorkeep.train.run.device import surroundings
from tensorkeep.train.run.folder import Changes, InitialRecord, Origin, RunRecord
from tensorkeep.train.run.resume import (
    current_config,
    describe,
    leg_settings,
    legs_after,
    note_on_evaluations,
    note_on_leg,
    note_on_rates,
)
from tensorkeep.train.run.state import Run

logger = logging.getLogger(__name__)

State = Callable[[], dict[str, Any]]
"""Returns what a checkpoint of the run holds."""


def check_store(run: Run) -> None:
    """Raise DestinationExistsError if the object store of a new run has the steps of another one, to be replaced."""
    store = run.config.checkpoint.store
    last = None if store is None or run.folder.unfinished_start() is not None else run.manager.latest()
    if last is not None:
        raise DestinationExistsError(
            f"holds the steps of a run already, up to step {last.number}",
            path=store,
            remedy="choose another checkpoint.store, or resume that run where its folder is (--resume)",
        )


def start_new(run: Run, config: Config, origin: Origin | None = None, initial: InitialRecord | None = None) -> None:
    """Write the record of a new run."""
    if run.world.is_main:
        if origin is None and initial is None:
            # Another process may also have started a run here since the first check.
            run.folder.check_new()
        run.folder.start(config, run.dataset, _here(run), origin, initial)
        run.log.begin(run.progress.step)
    run.world.barrier()


def start_from_weights(run: Run, config: Config, initial: InitialWeights, state: State) -> None:
    """Save the initial weights of a new run as its step 0, and write its record."""
    # A resumed run must not need the source of the weights.
    _save_first(run, 0, state)
    record = initial.record
    start_new(run, config, initial=record)
    step = "" if record.step is None else f", step {record.step}"
    run.notes += (f"initial weights: {record.path}{step}",)
    if initial.tokenizer is None:
        run.notes += ("the tokenizer of the initial weights is not known: the tokens of the data were not compared",)
    elif initial.tokenizer.opening != run.dataset.tokenizer.opening:
        names = [each.decode(each.opening) or "nothing" for each in (initial.tokenizer, run.dataset.tokenizer)]
        run.notes += (
            f"documents begin with {names[1]} in the data, and with {names[0]} for the initial weights: prepare it "
            "again to train as they were trained",
        )
    if new := initial.new_tokens(config.model):
        what = "the tokenizer" if initial.unused_tokens else "conversations"
        run.notes += (f"{new} tokens of {what} are new to the weights, and begin as the mean of all others",)


def resume_run(run: Run, config: Config, record: RunRecord, state: State) -> None:
    """Restore the last undamaged checkpoint of a run, begin a leg if settings changed, and add it to the record."""
    fresh, folder, current = _group_settings(run), run.folder, current_config(record)
    changed = bool(leg_settings(current, config, folder))
    if run.manager.latest() is None:
        _check_began_without_checkpoint(run, record)
    else:
        _restore(run, lambda into: run.manager.restore(into=into), state, changed=changed)
    step = run.progress.step
    legs = legs_after(record, config, step, folder)
    begins = bool(legs) and legs[-1].step == step
    if begins:
        _adapt(run, legs[-1].settings, fresh)
    if begins and legs != record.legs:
        before = legs[-2].config if legs[1:] else record.config
        run.notes += (note_on_leg(len(legs) + 1, legs[-1], before, run.plateau.factor),)
    note = note_on_evaluations(current, config, step)
    run.notes += (note,) if note else ()
    here = _here(run)
    began = record.surroundings
    moved = {name: (began[name], now) for name, now in here.items() if name in began and began[name] != now}
    if moved:
        differing = "; ".join(f"{name} was {before}, and is {now}" for name, (before, now) in moved.items())
        run.notes = (f"results may differ in the last bits from those of an uninterrupted run: {differing}", *run.notes)
    if run.world.is_main:
        run.log.begin(step)
        if begins:
            # With the first step of the leg, so that a resume before the next checkpoint writes it again.
            run.log.write(step + 1, "leg", leg=len(legs) + 1, settings=legs[-1].settings)
        logger.info("resuming %s after step %d", folder.path, step)
        last = legs[-1].config if legs else record.config
        folder.add_resumption(step, differences(last, config), moved, run.dataset.verified, legs)


def branch_run(run: Run, config: Config, point: BranchPoint, state: State) -> None:
    """Restore the checkpoint of another run, save it as the first one of this run, and write its record."""
    settings = leg_settings(point.config, config, point.folder, branch=True)
    fresh = _group_settings(run)
    manager = point.manager(run.world.group)
    _restore(run, lambda into: manager.restore(step=point.step, into=into), state, changed=True)
    _adapt(run, settings, fresh)
    same_data = point.record.data.fingerprint == run.dataset.fingerprint
    if not same_data:
        run.batches.load_state_dict({"position": 0})
        run.progress.best = run.progress.loss = math.inf
        run.plateau.forget_losses()
    _save_first(run, point.step, state, point.metrics if same_data else {})
    origin = Origin(
        run=str(point.folder.path),
        step=point.step,
        started=point.record.started,
        settings=differences(point.config, config),
    )
    start_new(run, config, origin)
    changed = f"branches from {point.folder.path} after step {point.step}: {describe(origin.settings) or 'no changes'}"
    run.notes += (f"{changed}; {note_on_rates(point.config, config, point.step, run.plateau.factor)}",)
    note = note_on_evaluations(point.config, config, point.step) if same_data else None
    run.notes += (note,) if note else ()


def discard_unfinished(run: Run) -> None:
    """Delete the checkpoint of a run that was killed before it had its record; the new run takes its place."""
    step = run.world.broadcast(run.folder.unfinished_start())
    if step is not None:
        run.manager.delete(step)


def _save_first(run: Run, step: int, state: State, metrics: Mapping[str, float] | None = None) -> None:
    """Save the checkpoint that a new run begins with.

    The record is written after it: a run exists once it has its record, and it must not begin without this checkpoint.
    """
    run.folder.check_new()
    run.world.barrier()
    if run.world.is_main:
        run.folder.begin_start(step)
    run.manager.save(step, state(), metrics).wait()


def _check_began_without_checkpoint(run: Run, record: RunRecord) -> None:
    """Raise CorruptCheckpointError if a run began with a checkpoint, and so has lost it: its weights are unknown."""
    if record.origin is None and record.initial is None:
        return
    first = 0 if record.origin is None else record.origin.step
    again = "start again from the same weights (--init-from)" if record.origin is None else "start the branch again"
    raise CorruptCheckpointError(
        f"has lost all checkpoints of its run, which began with step {first}",
        path=run.folder.checkpoints if run.config.checkpoint.store is None else run.config.checkpoint.store,
        remedy=f"copy step {first} or a later one back, or {again} in another --out",
    )


def _restore(run: Run, restore: Callable[[Any], object], state: State, *, changed: bool) -> None:
    try:
        restore(state())
    except StateMismatchError as error:
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


def _here(run: Run) -> dict[str, Any]:
    return surroundings(run.device) | {"processes": run.world.size}


def _group_settings(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return the settings of the parameter groups of each optimizer: rates, decay and others."""
    return {
        name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for name, optimizer in run.optimizers.items()
    }


def _adapt(run: Run, settings: Changes, fresh: dict[str, list[dict[str, Any]]]) -> None:
    """Change a restored state as the changed settings need it.

    The optimizers get their settings, which a checkpoint holds, and the batches their number: batches of another size
    continue after the windows that were drawn. Early stopping counts from 0 again, and so does a new schedule.
    """
    for name, groups in fresh.items():
        for group, values in zip(run.optimizers[name].param_groups, groups, strict=True):
            group.update(values)
    run.progress.waited = 0
    run.progress.range_test = RangeTest()
    if any(name.startswith("schedule.") for name in settings):
        run.plateau.load_state_dict(Plateau(run.config.schedule).state_dict())
    if "loop.batch_size" in settings:
        before, after = settings["loop.batch_size"]
        run.batches.load_state_dict({"position": -(-run.batches.position * before // after)})
