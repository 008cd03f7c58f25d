"""A run: everything that a step of training depends on, built from its configuration, saved and restored as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tensorkeep.checkpoint import settings
from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.retention import KeepBest
from tensorkeep.checkpoint.manager.steps import step_path
from tensorkeep.errors import OutOfMemoryError, RanksDisagreeError, UsageError
from tensorkeep.formats.native.writer import chosen_codec
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import CheckpointConfig
from tensorkeep.train.data.batches import Batches, BatchSource
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.generate import prompt_ids
from tensorkeep.train.guard import check_finite
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.operations import Operations, plain_operations
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.optim.optimizers import Optimizers, build_optimizers, check_optimizers
from tensorkeep.train.optim.schedules import Plateau
from tensorkeep.train.run.clock import Clock
from tensorkeep.train.run.data import with_data
from tensorkeep.train.run.device import chosen_device, surroundings
from tensorkeep.train.run.distributed import World, configured, joined
from tensorkeep.train.run.folder import Changes, RunFolder
from tensorkeep.train.run.log import RunLog
from tensorkeep.train.run.progress import Progress
from tensorkeep.train.run.random_states import WorldRandomState
from tensorkeep.train.run.speed import Speedometer, measured_peak
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.stack import Stack

METRIC = "validation_loss"


@dataclass
class Run:
    """A run of training, ready for its next step; see `open_run`.

    Attributes
    ----------
    config : Config
    folder : RunFolder
    dataset : Dataset
    device : torch.device
    model : GPT
    optimizers : dict of str to Optimizer
    plateau : Plateau
    batches : BatchSource
    average : WeightAverage
    progress : Progress
    manager : CheckpointManager
    log : RunLog
    speed : Speedometer
    clock : Clock
    operations : Operations
        What a step consists of.
    world : World
        The processes that train it together.
    replicas : int
        How many of them train data of their own.
    techniques : Stack
        Those that are on.
    notes : tuple of str
        What a person is to be told before it goes on.
    drawn : range
        The batches of the data from which the last step was made.
    """

    config: Config
    folder: RunFolder
    dataset: Dataset
    device: torch.device
    model: GPT
    optimizers: Optimizers
    plateau: Plateau
    batches: BatchSource
    average: WeightAverage
    manager: CheckpointManager
    log: RunLog
    speed: Speedometer
    techniques: Stack = field(default_factory=Stack)
    progress: Progress = field(default_factory=Progress)
    clock: Clock = field(default_factory=Clock)
    operations: Operations = field(init=False)
    world: World = field(default_factory=World)
    replicas: int = 1
    notes: tuple[str, ...] = ()
    drawn: range = field(default=range(0), init=False)

    def __post_init__(self) -> None:
        self.operations = plain_operations(
            self.model, self.optimizers, most=self.config.optim.clip, accepts=partial(check_finite, self)
        )

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint of the run holds."""
        return {
            "model": self.model,
            "average": self.average,
            "optimizers": dict(self.optimizers),
            "plateau": self.plateau,
            "batches": self.batches,
            "progress": self.progress,
            "techniques": self.techniques,
            "rng": WorldRandomState(self.world),
        }


@contextmanager
def open_run(config: Config, folder: RunFolder, dataset: Dataset, *, resume: bool = False) -> Iterator[Run]:
    """Start a run, or go on with one after its last whole checkpoint.

    Sets the seed of torch's random numbers, which draw dropout, and the number of its threads.

    Parameters
    ----------
    config : Config
    folder : RunFolder
    dataset : Dataset
    resume : bool
        Go on, if the run has a checkpoint.

    Raises
    ------
    UsageError
        If configuration, data and run do not fit together, or as `check_settings`.
    DestinationExistsError
        If a run was started there and is not to go on.
    StoreError
        If there is no memory for the model, another process is writing there, or the operating system refuses.
    """
    with ExitStack() as stack:
        world = stack.enter_context(joined(config))
        resume = resume and folder.exists()
        if resume:
            # First: with other data all else would be told wrongly.
            folder.check_data(dataset)
        else:
            folder.check_new()
        techniques, config = configured(with_data(config, folder, dataset, resume=resume), world)
        changed = folder.changed_settings(config) if resume else {}
        device = check_settings(config, folder)
        _check_data(config, dataset)
        stack.enter_context(techniques.process())
        run = _built(config, folder, dataset, device, techniques, world)
        here = surroundings(device) | {"processes": world.size}
        stack.enter_context(run.manager)
        stack.enter_context(run.log)
        # Until here all processes have looked at what was there; from here on, one writes.
        world.wait_for_all()
        if world.leads:
            # Before anything is written: another process may be in the middle of this run.
            run.manager.claim()
            if not resume:
                # It may also have come and gone since we looked.
                folder.check_new()
                folder.start(config, dataset, here)
        world.wait_for_all()
        if run.manager.latest() is not None:
            run.manager.restore(into=run.state())
        _check_same_step(run)
        moved = folder.changed_surroundings(here) if resume else {}
        run.notes = _in_words(moved)
        if world.leads:
            run.log.begin(run.progress.step)
            if resume:
                folder.note_resumed(run.progress.step, changed, moved)
        yield run


def _built(
    config: Config, folder: RunFolder, dataset: Dataset, device: torch.device, techniques: Stack, world: World
) -> Run:
    """Return a run before its first step, with its techniques on, of which nothing is written yet."""
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    torch.manual_seed(config.loop.seed)
    model = _model(config.model, config.loop.seed, device)
    run = Run(
        config=config,
        folder=folder,
        dataset=dataset,
        device=device,
        model=model,
        optimizers=build_optimizers(model, config.optim),
        plateau=Plateau(config.schedule),
        batches=Batches(
            dataset.train,
            context_length=config.model.context_length,
            batch_size=config.loop.batch_size,
            seed=config.loop.seed,
            order=config.data.order,
        ),
        average=WeightAverage(model, config.ema.decay),
        manager=_manager(folder, config.checkpoint),
        log=RunLog(folder.log, tensorboard=config.log.tensorboard),
        speed=Speedometer(measured_peak(device)),
        techniques=techniques,
        world=world,
    )
    techniques.apply(run)
    run.speed.peak *= world.size
    return run


def check_settings(config: Config, folder: RunFolder) -> torch.device:
    """Refuse what would end a run later, as far as no data is needed to know it; return the run's device.

    Nothing is written.

    Raises
    ------
    UsageError
        If there is no such device, it has no such optimizer, techniques conflict, or checkpoints cannot be saved as
        they are to be.
    UnsupportedError
        If there is no such technique, or it needs what this machine does not have.
    MissingExtraError
        If TensorBoard, or what a technique needs, is not installed.
    """
    device = chosen_device(config.loop.device)
    Stack.of(config.techniques).check(Machine(device))
    check_optimizers(config.optim, device)
    _check_saving(config.checkpoint, folder)
    # It opens nothing before it begins.
    RunLog(folder.log, tensorboard=config.log.tensorboard)
    return device


def _check_saving(config: CheckpointConfig, folder: RunFolder) -> None:
    """Refuse now what the first save would."""
    try:
        _manager(folder, config)
        choice = settings.choose(
            step_path(folder.checkpoints, 0),
            "native",
            compression=config.compression,
            threads=None,
            memory_budget=None,
            options={},
        )
        if choice.compression != "auto":
            chosen_codec(choice.compression)
    except UsageError as error:
        raise UsageError(
            f"checkpoints cannot be saved so: {error.message}", path=error.path, remedy=error.remedy
        ) from error


def _check_data(config: Config, dataset: Dataset) -> None:
    """Refuse now what would end the run hours later."""
    length = config.model.context_length
    for split, tokens in (("training", dataset.train), ("validation", dataset.validation)):
        if len(tokens) <= length:
            raise UsageError(
                f"the {split} split has {len(tokens):,} tokens, and a context of {length:,} needs {length + 1:,}",
                path=dataset.path,
                remedy="take a shorter context (--model.context_length), or prepare more text",
            )
    if config.sample.every:
        prompt_ids(dataset.tokenizer, config.sample.prompt)


def _model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    try:
        return GPT(config, generator=torch.Generator().manual_seed(seed), device=device)
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise OutOfMemoryError(
            f"a model of {config.parameter_count():,} parameters cannot be made: {reason}",
            remedy="take a smaller one (--model.d_model, --model.n_layers)",
        ) from error


def _check_same_step(run: Run) -> None:
    """Refuse to go on after different steps: each process finds the last undamaged one by itself."""
    if not run.world.agree(run.progress.step):
        raise RanksDisagreeError(
            "the processes of the run have found different checkpoints",
            path=run.folder.checkpoints,
            remedy="let all of them see the same folder",
        )


def _in_words(moved: Changes) -> tuple[str, ...]:
    if not moved:
        return ()
    told = "; ".join(f"{name} was {before}, and is {now}" for name, (before, now) in moved.items())
    return (f"what follows may differ in the last bits from a run that was never interrupted: {told}",)


def _manager(folder: RunFolder, config: CheckpointConfig) -> CheckpointManager:
    return CheckpointManager(
        folder.checkpoints,
        keep_last=config.keep_last,
        keep_best=KeepBest(config.keep_best, METRIC) if config.keep_best else None,
        compression=config.compression,
        incremental=config.incremental,
        asynchronous=config.asynchronous,
        memory_budget=config.memory_budget,
    )
