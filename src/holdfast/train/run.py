"""A run: everything that a step of training depends on, built from its configuration, saved and restored as one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.retention import KeepBest
from holdfast.checkpoint.stateful import RandomState
from holdfast.errors import UsageError
from holdfast.train.average import WeightAverage
from holdfast.train.clock import Clock
from holdfast.train.config import CheckpointConfig, Config
from holdfast.train.data.batches import Batches
from holdfast.train.data.dataset import Dataset
from holdfast.train.generate import prompt_ids
from holdfast.train.log import RunLog
from holdfast.train.model.gpt import GPT
from holdfast.train.optimizers import Optimizers, build_optimizers
from holdfast.train.run_folder import RunFolder
from holdfast.train.schedules import Plateau
from holdfast.train.speed import Speedometer, measured_peak

METRIC = "validation_loss"


@dataclass
class Progress:
    """Where a run stands.

    Attributes
    ----------
    step : int
        Steps that are done.
    best : float
        The best validation loss so far.
    waited : int
        Evaluations since then.
    loss : float
        The last validation loss; infinite before the first.
    skipped : int
        Updates that were skipped because the loss or the gradient was not finite.
    """

    step: int = 0
    best: float = math.inf
    waited: int = 0
    loss: float = math.inf
    skipped: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        vars(self).update(state)


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
    batches : Batches
    average : WeightAverage
    progress : Progress
    manager : CheckpointManager
    log : RunLog
    speed : Speedometer
    clock : Clock
    """

    config: Config
    folder: RunFolder
    dataset: Dataset
    device: torch.device
    model: GPT
    optimizers: Optimizers
    plateau: Plateau
    batches: Batches
    average: WeightAverage
    manager: CheckpointManager
    log: RunLog
    speed: Speedometer
    progress: Progress = field(default_factory=Progress)
    clock: Clock = field(default_factory=Clock)

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint of the run holds."""
        return {
            "model": self.model,
            "average": self.average,
            "optimizers": dict(self.optimizers),
            "plateau": self.plateau,
            "batches": self.batches,
            "progress": self.progress,
            "rng": RandomState(),
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
        If configuration, data and run do not fit together.
    DestinationExistsError
        If a run was started there and is not to go on.
    """
    config = _with_vocabulary(config, dataset)
    _check(config, dataset)
    device = chosen_device(config.loop.device)
    if resume and folder.exists():
        folder.check_resumable(config, dataset)
    else:
        folder.check_new()
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    torch.manual_seed(config.loop.seed)
    model = GPT(config.model, generator=torch.Generator().manual_seed(config.loop.seed), device=device)
    batches = Batches(
        dataset.train,
        context_length=config.model.context_length,
        batch_size=config.loop.batch_size,
        seed=config.loop.seed,
        order=config.data.order,
    )
    with ExitStack() as stack:
        manager = stack.enter_context(_manager(folder, config.checkpoint))
        # Before anything is written: another process may be in the middle of this run.
        manager.claim()
        if not folder.exists():
            folder.start(config, dataset)
        run = Run(
            config=config,
            folder=folder,
            dataset=dataset,
            device=device,
            model=model,
            optimizers=build_optimizers(model, config.optim),
            plateau=Plateau(config.schedule),
            batches=batches,
            average=WeightAverage(model, config.ema.decay),
            manager=manager,
            log=stack.enter_context(RunLog(folder.log, tensorboard=config.log.tensorboard)),
            speed=Speedometer(config.model.flops_per_token(), measured_peak(device)),
        )
        if manager.latest() is not None:
            manager.restore(into=run.state())
        run.log.begin(run.progress.step)
        yield run


def _check(config: Config, dataset: Dataset) -> None:
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


def _with_vocabulary(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with a vocabulary that the data's fits into."""
    size = max(config.model.vocab_size, dataset.vocab_size)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=size))


def chosen_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is the GPU where there is one.

    Raises
    ------
    UsageError
        If torch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"loop.device is {name!r}: {reason}", remedy='give "auto", "cpu" or "cuda"') from error
    return device
