"""Opening a run, ready for its next step; `open_run` is the only entry point, for new and resumed runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.sft_batches import training_batches
from chatgot.data.tokenizers.base import prompt_ids
from chatgot.model.gpt import GPT
from chatgot.optim.optimizers import WeightAverage, build_optimizers, check_optimizers
from chatgot.optim.schedules import Plateau
from chatgot.run.auto_batch_size import filled, gpu_memory
from chatgot.run.data import check_data, validation_windows, with_data
from chatgot.run.folder import METRIC, RunFolder
from chatgot.run.log import TrainingLog, trackers_of
from chatgot.run.monitor import observe_gradient_norms
from chatgot.run.notes import ineffective_settings
from chatgot.run.resume import BranchedRun, BranchPoint, NewRun, ResumedRun
from chatgot.run.state import OpenRun, Speedometer, seed_random_states
from chatgot.run.weights import InitialWeights, mask_documents
from chatgot.step.cpu import SpinControl, keep_freed_memory
from chatgot.step.device import chosen_device, data_sheet_peak, device_name, measured_peak, memory_errors_reported
from chatgot.step.state import can_check_later, check_finite, default_operations
from chatgot.step.world import World, can_join, join, launched_ranks
from chatgot.techniques.base import Machine
from chatgot.techniques.distributed import ParallelTechnique
from chatgot.techniques.stack import Stack, agreed_defaults
from tensorkeep import CheckpointManager, KeepBest
from tensorkeep.errors import UsageError
from tensorkeep.ext.formats import find_codec

# Opens the data of a run, given its ranks; a collective.
OpenData = Callable[[World], Dataset]


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

    If settings differ that decide what a resumed run computes, a new segment begins; see
    `chatgot.run.resume`.

    It seeds the global generators of Python, numpy and torch (dropout), and sets the number of torch's CPU threads. On
    a CPU, the process keeps the memory that it frees from then on; see `chatgot.step.cpu`.

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
        The checkpoint of another run that a new run begins with. It continues to count steps.
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
        resumed = ResumedRun(folder) if resume and folder.exists() else None
        off: str | None = None
        if resumed is None:
            folder.check_new()
            config, off = agreed_defaults(config, world)
        device, manager, log = check_settings(config, folder, world.group)
        dataset = data if isinstance(data, Dataset) else data(world)
        if resumed is not None:
            # First: with other data, other messages would be misleading.
            folder.check_data(dataset)
        start = resumed or (NewRun(folder, initial) if branch is None else BranchedRun(folder, branch))
        # The model needs the vocabulary of the data, so the configuration is complete only now.
        described = with_data(config, folder, dataset, resume=resumed is not None, origin=start.before)
        techniques, final = _configured(described, world)
        start.check(final, dataset)
        # A technique may have changed the optimizer since `check_settings`.
        if final.optim != config.optim:
            check_optimizers(final.optim, device)
        check_data(final, dataset, techniques)
        if final.sample.every:
            prompt_ids(dataset.tokenizer, final.sample.prompt)  # refuses what the tokenizer does not know
        parts = _Parts(folder, dataset, device, world, manager, log)
        # With batches that fill the memory, techniques may configure themselves in another way.
        sized, filling = _with_batch_size(final, parts, start)
        if sized is not final:
            techniques, final = _configured(sized, world)
        stack.enter_context(techniques.process())
        weights = start.initial if isinstance(start, NewRun) else None
        run = _build(final, techniques, parts, None if weights is None else weights.values(final.model))
        stack.enter_context(manager)
        if isinstance(start, NewRun):
            start.check_store(run)
        stack.enter_context(log)
        if device.type == "cpu":
            stack.enter_context(SpinControl())
            keep_freed_memory()
        # Until here, every rank has only read. The lock first: another process may be working on this run.
        run.manager.claim()
        # Not with `run.config`: techniques shard its batch.
        start.begin(run, final)
        notes = (off, filling, run.batches.note, run.validation.note, *ineffective_settings(final))
        run.notes += tuple(note for note in notes if note is not None)
        yield run


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """Join the other ranks if a technique needs them; UsageError if torchrun started several ranks without one."""
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
) -> tuple[torch.device, CheckpointManager, TrainingLog]:
    """Refuse settings that would end the run later, as far as known without data; no file is opened."""
    device = chosen_device(config.loop.device)
    Stack.of(config.techniques).check(Machine(device))
    check_optimizers(config.optim, device)
    return device, manager_of(folder, config, group), TrainingLog(folder.log, trackers_of(config.log, folder))


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
        # Looked up now, so that an unknown codec does not fail at the first save.
        if config.compression not in (None, "auto"):
            find_codec(config.compression)
    except UsageError as error:
        raise UsageError(
            f"checkpoints cannot be saved with these settings: {error.message}", path=error.path, remedy=error.remedy
        ) from error
    return manager


def _configured(config: Config, world: World) -> tuple[Stack, Config]:
    """Return the techniques of a run, and its configuration as they change it; a collective."""
    techniques = Stack.of(config.techniques)
    config = techniques.configure(config)
    # A technique may choose a setting by a measurement, which may come out differently on each rank: rank 0 decides.
    if world.size > 1:
        config = Config.from_dict(world.broadcast(config.as_dict()))
        techniques = Stack.of(config.techniques)
        config = techniques.configure(config)
    return techniques, config


class _Parts(NamedTuple):
    folder: RunFolder
    dataset: Dataset
    device: torch.device
    world: World
    manager: CheckpointManager
    log: TrainingLog


def _with_batch_size(config: Config, parts: _Parts, start: NewRun | ResumedRun) -> tuple[Config, str | None]:
    """Return the configuration with the chosen batch size if ``loop.auto_batch_size`` is true, and a note."""

    @contextmanager
    def trial(config: Config) -> Iterator[OpenRun]:
        # Techniques may configure themselves by the batch size.
        techniques, config = _configured(config, parts.world)
        with techniques.process():
            yield _build(config, techniques, parts)

    if not config.loop.auto_batch_size:
        return config, None
    if start.before is not None:
        kept = "loop.auto_batch_size has no effect: a resumed run keeps its batches, and so does a branch"
        return config, None if start.before.loop.auto_batch_size else kept
    memory = gpu_memory(parts.device)
    if memory is None:
        return config, f"loop.auto_batch_size has no effect: {parts.device.type} memory is not only training's"
    return filled(config, memory, parts.world, trial)


def _build(config: Config, techniques: Stack, parts: _Parts, values: Mapping[str, Tensor] | None = None) -> OpenRun:
    """Return a run before its first step, with its techniques applied. Nothing is written."""
    device, dataset = parts.device, parts.dataset
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    seed_random_states(config.loop.seed)
    # Techniques that shard a model make its weights themselves: no rank has all weights.
    sharded = any(isinstance(each, ParallelTechnique) and each.fills_model for each in techniques.techniques)
    with memory_errors_reported(config.model):
        # The weights depend on the seed only, and not on what else draws random numbers.
        generator = torch.Generator().manual_seed(config.loop.seed)
        place = torch.device("meta") if sharded else device
        model = GPT(config.model, generator=generator, device=place, values=values)
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
            model,
            optimizers,
            grad_clip=config.optim.grad_clip,
            accepts=lambda loss, norm: check_finite(run, loss, norm),
        ),
        peak_flops=measured_peak(device),
        techniques=techniques,
    )
    # Before a checkpoint is restored: techniques may shard what is restored into.
    techniques.apply(run)
    # Their memory is needed no longer.
    model.values = {}
    if config.log.gradient_norms:
        observe_gradient_norms(run)
    # After the techniques, which may replace optimizers and read losses.
    run.checks_later = can_check_later(run)
    data_sheet = data_sheet_peak(device_name(device))
    # All ranks compute at once, so their peaks add up.
    ranks = run.world.size
    run.speed = Speedometer(run.peak_flops * ranks, None if data_sheet is None else data_sheet * ranks)
    return run
