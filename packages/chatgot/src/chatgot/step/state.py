"""What a training step reads and changes. Techniques work on `StepState`, and replace the functions of `Operations`.

The loop works on `chatgot.run.state.OpenRun`, which adds the folder, the checkpoints and the log.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from chatgot.config.config import Config
from chatgot.data.batches import BatchSource
from chatgot.data.dataset import Dataset
from chatgot.model.gpt import GPT
from chatgot.optim.muon import Muon
from chatgot.optim.optimizers import Optimizers, WeightAverage
from chatgot.optim.schedules import Plateau, RangeTest
from chatgot.step.device import BatchTransfer
from chatgot.step.world import World
from tensorkeep.errors import DivergedError

logger = logging.getLogger(__name__)

# Updates that are skipped in a row before the run is stopped. A skipped update changes no weight: if this many batches
# fail, the cause is the weights and not the data.
MOST_SKIPPED = 20


@dataclass
class Operations:
    """The operations of a step, in the order of the calls of `chatgot.step.train_step.train_step`.

    A technique assigns its own function in place of one; most call the function that was there before. An operation
    that no technique has replaced is called directly, so that techniques that are off cost nothing.
    """

    # ``(inputs, targets) -> Tensor``: the mean loss of a batch, with its autograd graph.
    loss: Callable[[Tensor, Tensor], Tensor]
    # ``(loss) -> None``: adds the gradient of a loss to the gradients of the parameters.
    backward: Callable[[Tensor], None]
    # ``() -> Tensor``: makes the gradients final, clips them, and returns their norm before clipping.
    clip: Callable[[], Tensor]
    # ``(loss, norm) -> bool``: whether to apply the update; raises DivergedError to stop the run.
    accepts: Callable[[Tensor, Tensor], bool]
    # ``() -> None``: steps the optimizers.
    update: Callable[[], None]
    # ``(inputs, targets) -> Tensor``: the mean loss of a batch of an evaluation, without gradients and dropout.
    evaluate: Callable[[Tensor, Tensor], Tensor]
    # The same as ``loss`` in plain Python, if ``loss`` runs compiled or captured code, which calls no hooks.
    plain_loss: Callable[[Tensor, Tensor], Tensor] | None = None


def default_operations(
    model: GPT, optimizers: Optimizers, *, grad_clip: float, accepts: Callable[[Tensor, Tensor], bool]
) -> Operations:
    """Return the operations of a step without techniques; a ``grad_clip`` of 0 does not limit the gradient norm."""

    def clip_gradient() -> Tensor:
        parameters = list(model.parameters())
        if grad_clip:
            return torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        # Without a limit the norm is computed as well: the guard and the log need it.
        return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])

    def update() -> None:
        for optimizer in optimizers.values():
            optimizer.step()

    return Operations(
        # Looked up at each call, because techniques replace `model.loss`.
        loss=lambda inputs, targets: model.loss(inputs, targets),
        backward=lambda value: value.backward(),  # type: ignore[no-untyped-call]
        clip=clip_gradient,
        accepts=accepts,
        update=update,
        evaluate=lambda inputs, targets: model.loss(inputs, targets),
    )


@dataclass
class TrainingProgress:
    """How far a run is and how well it did; all fields are part of a checkpoint."""

    step: int = 0
    # Tokens trained on.
    tokens: int = 0
    # The best validation loss.
    best: float = math.inf
    # Evaluations since the best one.
    waited: int = 0
    # The last validation loss; infinite before the first evaluation.
    loss: float = math.inf
    # The targets of the last evaluation. Losses over another number of targets cannot be compared with it.
    evaluated: int = 0
    # Updates skipped because the loss or the gradient norm was not finite.
    skipped: int = 0
    # Updates skipped since the last applied one.
    skipped_in_a_row: int = 0
    range_test: RangeTest = field(default_factory=RangeTest)

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        if not self.range_test.steps:
            # Earlier versions do not know it: they resume every run that is not a range test.
            del state["range_test"]["last"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "range_test": RangeTest(**state["range_test"])})


@dataclass(frozen=True, slots=True)
class UncheckedStep:
    """A step before the check of its loss and gradient norm, and the numbers of its batches."""

    number: int
    drawn: range
    loss: Tensor
    norm: Tensor


@dataclass(kw_only=True)
class StepState(ABC):
    """A run as one training step sees it."""

    config: Config
    dataset: Dataset
    device: torch.device
    model: GPT
    optimizers: Optimizers
    plateau: Plateau
    batches: BatchSource
    average: WeightAverage
    # What a step consists of; techniques replace or wrap them.
    operations: Operations
    # FLOP/s of the fastest matmul in the precision of the run, on this rank; see `measured_peak`.
    peak_flops: float
    # The ranks that train the run together.
    world: World = field(default_factory=World)
    # How many ranks, or groups of ranks, train on data of their own, and the number of this one.
    replicas: int = 1
    replica: int = 0
    # In how many parts an operation computes one batch.
    micro_batches: int = 1
    # Whether a technique reads each loss in its own step.
    reads_losses: bool = False
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    # Returns a part of a checkpoint, by its name: what techniques save in place of the run's own object.
    in_checkpoint: dict[str, Callable[[], Any]] = field(default_factory=dict)
    # Whether the loss that is computed is the last one of its step.
    is_last_batch: bool = field(default=True, init=False)
    # The numbers of the batches of the last step.
    drawn: range = field(default=range(0), init=False)
    # The positions that all ranks together computed in the last step, whether their targets count or not.
    positions: int = field(default=0, init=False)
    # Whether losses are checked for divergence some steps later; see `can_check_later`.
    checks_later: bool = field(default=False, init=False)
    # The steps that are still to be checked.
    unchecked: list[UncheckedStep] = field(default_factory=list, init=False)
    # Copies batches to the device.
    move: BatchTransfer = field(init=False)

    def __post_init__(self) -> None:
        self.move = BatchTransfer(self.device)

    @abstractmethod
    def diverged(self, step: UncheckedStep, figures: str, *, skipped: int = 0) -> DivergedError:
        """Return the error that stops the run at a step with these figures, after ``skipped`` skipped updates."""


# The guard. Reading a loss makes the CPU wait for the GPU. On a GPU, steps are therefore checked together, when
# something else waits as well: a line of the log, an evaluation, a checkpoint. Until then the optimizers skip
# non-finite updates on the device. A run with `on_divergence = "stop"` loses its weights, and never saves them.


def can_check_later(run: StepState) -> bool:
    """Return whether the steps of a run may be checked some steps later, with the same result as at once."""
    # A range test ends at a loss, and fp16 scales losses by what it finds.
    if run.device.type == "cpu" or run.config.schedule.name == "range" or run.reads_losses:
        return False
    if run.config.loop.on_divergence == "stop":
        return True
    # By the attribute ``found_inf`` of the optimizer.
    skip_on_device = all(
        isinstance(each, Muon) or (type(each) is torch.optim.AdamW and each.defaults["fused"])
        for each in run.optimizers.values()
    )
    # An average must not include updates that turn out to be skipped.
    return not run.config.ema.decay and skip_on_device


def check_finite(run: StepState, loss: Tensor, norm: Tensor) -> bool:
    """Return whether to apply an update, and count skipped ones; always true for a run that checks later.

    Raises DivergedError if the loss or the norm is not finite, and ``loop.on_divergence`` is ``"stop"`` or
    `MOST_SKIPPED` updates in a row were skipped.
    """
    run.unchecked.append(UncheckedStep(run.progress.step, run.drawn, loss, norm))
    if not run.checks_later:
        return check_steps(run)
    if run.config.loop.on_divergence == "skip":
        # One sum for both: it is finite only if both are. The CPU does not read it.
        found_inf = (~(loss + norm).isfinite()).float()
        for optimizer in run.optimizers.values():
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    return True


@contextmanager
def checked_at_once(run: StepState) -> Iterator[None]:
    """Check the steps in this context before their updates: a skipped update proves nothing about a technique."""
    later, run.checks_later = run.checks_later, False
    try:
        yield
    finally:
        run.checks_later = later


def check_steps(run: StepState) -> bool:
    """Check the steps since the last check, waiting for the device; return whether the last one was finite."""
    # Emptied first, so that no step is checked twice if this raises.
    steps, run.unchecked = run.unchecked, []
    if len(steps) > 1:
        # One copy for all steps, so that the CPU waits once.
        found = torch.stack([torch.stack((each.loss, each.norm)) for each in steps]).tolist()
    else:
        found = [[each.loss.item(), each.norm.item()] for each in steps]
    finite = True
    for step, (loss, norm) in zip(steps, found, strict=True):
        finite = math.isfinite(loss + norm)
        if finite:
            run.progress.skipped_in_a_row = 0
        else:
            _count_skipped(run, step, f"the loss is {loss:g} and the gradient norm is {norm:g}")
    return finite


def _count_skipped(run: StepState, step: UncheckedStep, figures: str) -> None:
    progress = run.progress
    # A range test raises the learning rate until this happens, and then ends.
    if run.config.loop.on_divergence == "stop" and run.config.schedule.name != "range":
        raise run.diverged(step, figures)
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= MOST_SKIPPED:
        raise run.diverged(step, figures, skipped=progress.skipped_in_a_row)
    logger.info("step %d: update skipped: %s", step.number, figures)
