"""The state of a run: what a training step changes and a checkpoint contains.

`Run` is what techniques and the divergence guard work on. It does not know them: `tensorkeep.train.run.setup` builds a
run, applies its techniques and adds them to what is saved.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.manager.manager import CheckpointManager
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.batches import BatchSource
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.evaluate import EvaluationWindows
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.operations import Operations
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.optim.optimizers import Optimizers
from tensorkeep.train.optim.schedules import Plateau, RangeTest
from tensorkeep.train.run.device import Mover
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.log import RunLog
from tensorkeep.train.run.speed import Clock, SlowdownDetector, Speedometer
from tensorkeep.train.run.world import World

METRIC = "validation_loss"
"""The metric that is saved with each checkpoint, and by which the best one is chosen."""


@dataclass
class Progress:
    """How far a run is and how well it did; all of it is part of a checkpoint."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on."""
    best: float = math.inf
    """The best validation loss."""
    waited: int = 0
    """Evaluations since the best one."""
    loss: float = math.inf
    """The last validation loss; infinite before the first evaluation."""
    evaluated: int = 0
    """The targets of that evaluation: a loss of more or of fewer cannot be compared with it."""
    skipped: int = 0
    """Updates skipped because the loss or the gradient norm was not finite."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last applied one."""
    range_test: RangeTest = field(default_factory=RangeTest)

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        vars(self).update({**state, "range_test": RangeTest(**state["range_test"])})


@dataclass(frozen=True, slots=True)
class UncheckedStep:
    """A step whose loss and gradient norm have not been checked yet, and the numbers of its batches."""

    number: int
    drawn: range
    loss: Tensor
    norm: Tensor


@dataclass(kw_only=True)
class Run:
    """A run of training, ready for its next step; see `tensorkeep.train.run.setup.open_run`.

    Attributes
    ----------
    validation : EvaluationWindows
        What the validation loss is computed on.
    operations : Operations
        What a step consists of; techniques replace or wrap them.
    world : World
        The ranks that train it together.
    replicas, replica : int
        How many ranks, or groups of ranks, train on data of their own, and the number of this one.
    move : Mover
        Copies batches to the device.
    in_checkpoint : dict of str to callable
        Returns a part of a checkpoint, by its name: what techniques save in place of the run's own object.
    notes : tuple of str
        Warnings for the user, known when the run was opened.
    drawn : range
        The numbers of the batches of the last step.
    positions : int
        The positions that all ranks together computed in the last step, whether their targets count or not.
    gradient_norms : dict of str to float
        The norm of each layer's gradient in the last step, if it is to be logged.
    checks_later : bool
        Whether losses are checked for divergence some steps later; see `tensorkeep.train.guard`.
    unchecked : list of UncheckedStep
        The steps that are still to be checked.
    """

    config: Config
    folder: RunFolder
    dataset: Dataset
    device: torch.device
    model: GPT
    optimizers: Optimizers
    plateau: Plateau
    batches: BatchSource
    validation: EvaluationWindows
    average: WeightAverage
    operations: Operations
    manager: CheckpointManager
    log: RunLog
    speed: Speedometer
    world: World = field(default_factory=World)
    replicas: int = 1
    replica: int = 0
    progress: Progress = field(default_factory=Progress)
    clock: Clock = field(default_factory=Clock)
    slowdown: SlowdownDetector = field(default_factory=SlowdownDetector)
    in_checkpoint: dict[str, Callable[[], Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    drawn: range = field(default=range(0), init=False)
    positions: int = field(default=0, init=False)
    gradient_norms: dict[str, float] = field(default_factory=dict, init=False)
    checks_later: bool = field(default=False, init=False)
    unchecked: list[UncheckedStep] = field(default_factory=list, init=False)
    move: Mover = field(init=False)

    def __post_init__(self) -> None:
        self.move = Mover(self.device)


def seed_random_states(seed: int) -> None:
    """Seed the global random states of Python, numpy and torch: equal runs have equal checkpoints in any process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RunRandomState(RandomState):
    """The random states of a run: those of rank 0, and under ``"others"`` torch's of the other ranks.

    Each rank saves its own. A run may resume on another number of GPUs: the states of GPUs are then not restored. It
    may resume on another number of ranks: the states of rank 0 are then restored on rank 0 only.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the current states of this rank."""
        own = super().state_dict()
        if self._world.is_main:
            return own
        return {"others": {str(self._world.rank): {"torch": own["torch"], "cuda": own.get("cuda", [])}}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check whether the states can be restored here."""
        super().check_state_dict(_for_these_gpus(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of this rank, if they were saved."""
        others = state.get("others", {})
        if self._world.is_main:
            super().load_state_dict(_for_these_gpus(state))
        elif len(others) + 1 == self._world.size:
            super().load_state_dict(_for_these_gpus({**state, **others[str(self._world.rank)]}))


def _for_these_gpus(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states without those of GPUs, if this machine has another number of them."""
    fits = len(state.get("cuda", ())) == torch.cuda.device_count()
    return {name: each for name, each in state.items() if name != "cuda" or fits}
