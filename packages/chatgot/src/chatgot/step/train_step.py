"""The two computations of a run: one training step, and the loss of an evaluation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from chatgot.data.batches import Batch
from chatgot.model.gpt import GPT, IGNORED
from chatgot.optim.optimizers import set_learning_rate
from chatgot.optim.schedules import learning_rate_factor
from chatgot.step.state import StepState, check_steps
from chatgot.step.world import World


@dataclass(frozen=True, slots=True)
class StepResult:
    """The figures of a step. A GPU keeps loss and norm until `read` waits for it."""

    loss: Tensor
    gradient_norm: Tensor
    learning_rate: float

    def read(self) -> dict[str, float]:
        figures = {"loss": self.loss.item(), "gradient_norm": self.gradient_norm.item()}
        return figures | {"learning_rate": self.learning_rate}


def take_step(run: StepState) -> dict[str, float]:
    """Make one update of the weights, wait for it, and return its figures; see `train_step`."""
    result = train_step(run)
    check_steps(run)
    return result.read()


def train_step(run: StepState) -> StepResult:
    """Make one update of the weights: add up the gradients of its batches, clip them, step the optimizers."""
    loop, operations = run.config.loop, run.operations
    run.progress.step += 1
    factor = learning_rate_factor(run.config.schedule, run.progress.step, loop.steps) * run.plateau.factor
    set_learning_rate(run.optimizers, factor)
    # A sum on the device: reading each loss would make the CPU wait for the GPU.
    total = torch.zeros((), device=run.device)
    first = run.batches.position
    # Drawn here and not ahead of the step: the position in a checkpoint is the position of the used batches, and
    # techniques may choose batches by the step.
    batches = [next(run.batches) for _ in range(loop.gradient_accumulation_steps)]
    run.drawn = range(first, run.batches.position)
    counts = [int(np.count_nonzero(targets.numpy() != IGNORED)) for _, targets in batches]
    counted: float = sum(counts)
    # Windows of text have the same number of targets on all ranks.
    if run.world.size > 1 and run.dataset.chat_tokenizer is not None:
        counted = run.world.mean(torch.tensor(counted, dtype=torch.float64)).item()
    # A batch without an answer has no target, and its mean would be NaN.
    computed = [(inputs, targets, count) for (inputs, targets), count in zip(batches, counts, strict=True) if count]
    for number, (inputs, targets, count) in enumerate(computed, 1):
        run.is_last_batch = number == len(computed)
        # The mean over all targets of the step: each target has the same weight, whichever batch it is in.
        loss = operations.loss(*run.move(inputs, targets)) / (counted / count)
        operations.backward(loss)
        total += loss.detach()
    run.progress.tokens += round(counted * run.replicas)
    run.positions = run.replicas * sum(inputs.numel() for inputs, _, _ in computed)
    # Before `clip`: all ranks take the same decision in `accepts`.
    total = run.world.mean(total)
    norm = operations.clip()
    if operations.accepts(total, norm):
        operations.update()
        run.average.update(run.progress.step)
    # After the update and not before the next step: gradients are freed while the loop evaluates and saves.
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    return StepResult(total, norm, factor * run.config.optim.lr)


def evaluate(
    model: GPT,
    batches: Iterable[Batch],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Return the mean loss over all targets that count, in nats.

    It draws no random numbers, and each module keeps its training mode. The host waits for the device once, at the end.
    ``loss`` returns the mean loss of a batch, by default ``model.loss``. With ``world`` this is a collective: each rank
    has as many batches as the others.
    """
    device = model.tokens.weight.device
    # In float64: the sum over a whole split must not lose the last bits of a loss.
    total, counted = torch.zeros((), dtype=torch.float64, device=device), 0
    # Not inference_mode, which does not support sharded weights.
    with torch.no_grad(), evaluating(model):
        for inputs, targets in batches:
            count = int((targets != IGNORED).sum())
            mean = (loss or model.loss)(*(_moved(each, device) for each in (inputs, targets)))
            # A batch without a target is computed all the same: other ranks wait for this one. Its mean is NaN.
            total += mean.double() * count if count else 0.0
            counted += count
    # In one tensor, so that the ranks exchange both at once.
    sums = torch.stack([total, torch.full_like(total, counted)])
    nats, tokens = (sums if world is None else world.mean(sums)).tolist()
    return float(nats / tokens)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # A GPU copies from pinned memory while the host continues.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode (no dropout); afterwards each module has its previous mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Not `train()`, which would change modules that were in evaluation mode before.
        for module, training in modes:
            module.training = training
