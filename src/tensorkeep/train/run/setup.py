"""Setting up a `Run`, ready for its next step, from a configuration, a folder and data.

`open_run` is the only entry point, for new and resumed runs. It joins the ranks, refuses what would fail later, opens
the data, builds the model and what belongs to it, applies the techniques, and restores the last checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tensorkeep.errors import UsageError
from tensorkeep.formats.blockfile.write import find_codec
from tensorkeep.manager.manager import CheckpointManager
from tensorkeep.runs.retention import KeepBest
from tensorkeep.train.answers import training_batches
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.ineffective import ineffective_settings
from tensorkeep.train.data.batches import check_window
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.generate import prompt_ids
from tensorkeep.train.guard import can_check_later, check_finite
from tensorkeep.train.initial import InitialWeights
from tensorkeep.train.memory.filling import filled, gpu_memory
from tensorkeep.train.memory.freed import keep_freed_memory
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.monitor.gradients import observe_gradient_norms
from tensorkeep.train.monitor.trackers import trackers_of
from tensorkeep.train.operations import default_operations
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.optim.optimizers import build_optimizers, check_optimizers
from tensorkeep.train.optim.schedules import Plateau
from tensorkeep.train.run.branch import BranchPoint
from tensorkeep.train.run.data import check_masking, mask_documents, with_data
from tensorkeep.train.run.device import chosen_device, device_name, memory_errors_reported
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.log import RunLog
from tensorkeep.train.run.resume import check_steps, current_config, leg_settings
from tensorkeep.train.run.speed import Speedometer, data_sheet_peak, measured_peak
from tensorkeep.train.run.start import (
    branch_run,
    check_store,
    discard_unfinished,
    resume_run,
    start_from_weights,
    start_new,
)
from tensorkeep.train.run.state import METRIC, Run, RunRandomState, seed_random_states
from tensorkeep.train.run.validation import validation_windows
from tensorkeep.train.run.world import World, can_join, join, launched_ranks
from tensorkeep.train.spinning import SpinControl
from tensorkeep.train.techniques.base import Machine
from tensorkeep.train.techniques.distributed import ParallelTechnique
from tensorkeep.train.techniques.stack import Stack, agreed_defaults

OpenData = Callable[[World], Dataset]
"""Opens the data of a run, given its ranks; a collective."""


@dataclass(kw_only=True)
class OpenRun(Run):
    """A run with the techniques that are on."""

    techniques: Stack

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint of the run holds."""
        own = {
            "model": self.model,
            "average": self.average.state_dict(),
            "optimizers": dict(self.optimizers),
            "plateau": self.plateau,
            "batches": self.batches,
            "progress": self.progress,
            "techniques": self.techniques,
            "rng": RunRandomState(self.world),
        }
        return own | {name: part() for name, part in self.in_checkpoint.items()}


@contextmanager
def open_run(
    config: Config,
    folder: RunFolder,
    data: Dataset | OpenData,
    *,
    resume: bool = False,
    branch: BranchPoint | None = None,
    initial: InitialWeights | None = None,
) -> Iterator[OpenRun]:
    """Open a new run, or resume the one in the folder after its last undamaged checkpoint.

    If settings differ that decide what a resumed run computes, a new leg of it begins; see
    `tensorkeep.train.run.resume`.

    It seeds the global generators of Python, numpy and torch (dropout), and sets the number of torch's CPU threads. On
    a CPU, the process keeps the memory that it frees from then on; see `tensorkeep.train.memory.freed`.

    Parameters
    ----------
    config : Config
    folder : RunFolder
    data : Dataset or callable
        The data, or a function that opens it. It is called after everything was checked that needs no data, because
        preparing data may take long.
    resume : bool
        Resume the run in the folder, if there is one.
    branch : BranchPoint, optional
        The checkpoint of another run with which a new run begins, and continues to count steps.
    initial : InitialWeights, optional
        The weights that a new run starts from. They are saved as step 0, so that a resumed run does not need them.

    Yields
    ------
    OpenRun

    Raises
    ------
    UsageError
        If configuration, data and run do not fit together, or the machine has no such device or optimizer, or
        techniques conflict.
    UnsupportedError
        If there is no such technique, or this machine lacks what it needs.
    MissingExtraError
        If the package of a tracker (TensorBoard, W&B, MLflow), or one that a technique needs, is not installed.
    DestinationExistsError
        If the folder holds a run and ``resume`` is false.
    OutOfMemoryError
        If there is not enough memory for the model.
    StoreError
        If another process writes there, or the operating system refuses.
    """
    with ExitStack() as stack:
        world = stack.enter_context(joined(config))
        record = folder.record() if resume and folder.exists() else None
        off: str | None = None
        if record is None:
            folder.check_new()
            config, off = agreed_defaults(config, world)
        device, manager, log = check_settings(config, folder, world.group)
        dataset = data if isinstance(data, Dataset) else data(world)
        if record is not None:
            # First: with other data, other messages would be misleading.
            folder.check_data(dataset)
        origin = None if branch is None else branch.config
        described = with_data(config, folder, dataset, resume=record is not None, origin=origin)
        techniques, final = _configured(described, world)
        before: Config | None = None
        if record is not None:
            before = current_config(record)
            leg_settings(before, final, folder)  # refuses settings that must not change
        elif branch is not None:
            branch.check_data(dataset)
            before = branch.config
            leg_settings(before, final, branch.folder, branch=True)
        elif initial is not None:
            initial.check(final.model)
            initial.check_data(dataset)
        if record is None:
            check_steps(final, 0 if branch is None else branch.step, folder)
        if final.optim != config.optim:
            check_optimizers(final.optim, device)
        # Rows of conversations are filled up.
        splits = {"training split": dataset.train, "validation split": dataset.validation}
        for split, tokens in splits.items() if dataset.chat_tokenizer is None else ():
            check_window(tokens, final.model.context_length, what=split, path=dataset.path)
        check_masking(final, dataset)
        if final.sample.every:
            prompt_ids(dataset.tokenizer, final.sample.prompt)  # refuses what the tokenizer does not know
        parts = _Parts(folder, dataset, device, world, manager, log)
        memory = gpu_memory(device) if final.loop.fill_memory and record is None and branch is None else None
        filling: str | None = None
        if memory is not None:
            final, filling = filled(final, memory, world, lambda config: _trial(config, parts))
            techniques, final = _configured(final, world)
        elif final.loop.fill_memory and before is None:
            filling = f"loop.fill_memory has no effect: {device.type} memory is not only training's"
        elif final.loop.fill_memory and before is not None and not before.loop.fill_memory:
            filling = "loop.fill_memory has no effect: a resumed run keeps its batches, and so does a branch"
        stack.enter_context(techniques.process())
        values = None if initial is None or record is not None else initial.values(final.model)
        run = _build(final, techniques, parts, values)
        stack.enter_context(manager)
        if record is None:
            check_store(run)
        stack.enter_context(log)
        if device.type == "cpu":
            stack.enter_context(SpinControl())
            keep_freed_memory()
        # Not `run.config`, in which techniques shard the batch.
        # Until here, every rank has only read. The lock first: another process may be working on this run.
        run.manager.claim()
        if record is None:
            discard_unfinished(run)
        if record is not None:
            resume_run(run, final, record, run.state)
        elif branch is not None:
            branch_run(run, final, branch, run.state)
        elif initial is not None:
            start_from_weights(run, final, initial, run.state)
        else:
            start_new(run, final)
        notes = (off, filling, run.batches.note, run.validation.note, *ineffective_settings(final))
        run.notes += tuple(note for note in notes if note is not None)
        yield run


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """Join the other ranks if a technique of the run is for several ranks; see `join`.

    Raises UsageError if torchrun started several ranks and no technique trains them together.
    """
    parallel = any(isinstance(each, ParallelTechnique) for each in Stack.of(config.techniques).techniques)
    if not parallel and launched_ranks() > 1:
        raise UsageError(
            f"torchrun started {launched_ranks()} processes, and no technique trains them together",
            remedy="turn one on (--technique ddp), or leave torchrun out",
        )
    if parallel and can_join():
        with join(config.loop.device) as world:
            yield world
    else:
        # Without torchrun, the check of the technique reports what it lacks.
        yield World()


def check_settings(
    config: Config, folder: RunFolder, group: ProcessGroup | None = None
) -> tuple[torch.device, CheckpointManager, RunLog]:
    """Refuse settings that would end the run later, as far as known without data; see `open_run` for the errors.

    Returns what the run will use, with the ranks of a process group; neither the manager nor the log has opened a file.
    """
    device = chosen_device(config.loop.device)
    Stack.of(config.techniques).check(Machine(device))
    check_optimizers(config.optim, device)
    return (
        device,
        manager_of(folder, config, group),
        RunLog(folder.log, trackers_of(config.log, folder)),
    )


def manager_of(folder: RunFolder, settings: Config, group: ProcessGroup | None = None) -> CheckpointManager:
    """Return the manager of the run's checkpoints, after a check of the settings of its saves."""
    config, evaluates = settings.checkpoint, settings.eval.every > 0
    try:
        manager = CheckpointManager(
            folder.checkpoints if config.store is None else config.store,
            local=None if config.store is None else folder.checkpoints,
            keep_local=None,
            keep_last=config.keep_last,
            keep_best=KeepBest(config.keep_best, METRIC) if config.keep_best and evaluates else None,
            compression=config.compression,
            incremental=config.incremental,
            asynchronous=config.asynchronous,
            memory_budget=config.memory_budget,
            settings=config.settings,
            group=group,
        )
        if config.compression not in (None, "auto"):
            find_codec(config.compression)
    except UsageError as error:
        raise UsageError(
            f"checkpoints cannot be saved with these settings: {error.message}", path=error.path, remedy=error.remedy
        ) from error
    return manager


def _configured(config: Config, world: World) -> tuple[Stack, Config]:
    """Return the techniques of a run, and its configuration as they change it; all ranks get those of rank 0.

    A technique may choose a setting by a measurement, which may come out differently on each rank.
    """
    techniques = Stack.of(config.techniques)
    config = techniques.configure(config)
    if world.size > 1:
        config = Config.from_dict(world.broadcast(config.as_dict()))
        techniques = Stack.of(config.techniques)
        config = techniques.configure(config)
    return techniques, config


class _Parts(NamedTuple):
    """What a run is built with, whatever its configuration."""

    folder: RunFolder
    dataset: Dataset
    device: torch.device
    world: World
    manager: CheckpointManager
    log: RunLog


@contextmanager
def _trial(config: Config, parts: _Parts) -> Iterator[tuple[Run, Stack]]:
    """Build a run that is not started."""
    techniques, config = _configured(config, parts.world)
    with techniques.process():
        yield _build(config, techniques, parts), techniques


def _build(config: Config, techniques: Stack, parts: _Parts, values: Mapping[str, Tensor] | None = None) -> OpenRun:
    """Return a run before its first step, with its techniques applied. Nothing is written."""
    device, dataset = parts.device, parts.dataset
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    seed_random_states(config.loop.seed)
    # Techniques that shard a model make its weights themselves: no rank has all of them.
    sharded = any(isinstance(each, ParallelTechnique) and each.fills_model for each in techniques.techniques)
    model = _model(config.model, config.loop.seed, torch.device("meta") if sharded else device, values)
    mask_documents(model, config, dataset.tokenizer)
    optimizers = build_optimizers(model, config.optim)
    run = OpenRun(
        **parts._asdict(),
        config=config,
        model=model,
        optimizers=optimizers,
        plateau=Plateau(config.schedule),
        batches=training_batches(config, dataset),
        validation=validation_windows(config, dataset),
        average=WeightAverage(dict(model.named_parameters()), config.ema.decay),
        operations=default_operations(
            model, optimizers, clip=config.optim.clip, accepts=lambda loss, norm: check_finite(run, loss, norm)
        ),
        speed=Speedometer(measured_peak(device), data_sheet_peak(device_name(device))),
        techniques=techniques,
    )
    techniques.apply(run)
    # Their memory is needed no longer.
    model.values = {}
    if config.log.gradient_norms:
        observe_gradient_norms(run)
    run.checks_later = can_check_later(run)
    run.speed.peak *= run.world.size
    if run.speed.data_sheet is not None:
        run.speed.data_sheet *= run.world.size
    return run


def _model(config: ModelConfig, seed: int, device: torch.device, values: Mapping[str, Tensor] | None) -> GPT:
    with memory_errors_reported(config):
        return GPT(config, generator=torch.Generator().manual_seed(seed), device=device, values=values)
