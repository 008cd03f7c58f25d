"""Techniques with which several processes train one run together: their base class, and sharded batches."""

from collections.abc import Callable
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from tensorkeep.train.optim.muon import Muon
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import can_join
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.requirements import Machine

TOGETHER = ("ddp", "fsdp", "hsdp", "tensor-parallel", "pipeline-parallel")
"""Techniques that divide the work of a run among processes, each in its own way."""


class Parallel(Technique):
    """A technique for several processes, which torchrun starts; see `tensorkeep.train.run.world`."""

    kind: ClassVar = "systems"
    changes: ClassVar = "processes"
    # With dropout, each process draws other zeros; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    # Its own name has no effect: a technique is on once.
    conflicts: ClassVar = dict.fromkeys(TOGETHER, "both need all ranks")

    fills_model: ClassVar[bool] = False
    """Whether the model that it is applied to is on the meta device, and it makes the weights of this process."""

    def lacks(self, machine: Machine) -> str | None:
        """Return the command that starts the processes, unless they are started."""
        if can_join():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def shard_batches(run: Run, rank: int, count: int) -> None:
    """Let this process train one of ``count`` parts of each batch, with its own random numbers for dropout.

    ``loop.batch_size`` is that of all processes together: they compute what one process would.

    Raises UsageError if the batch size is not a multiple of the number of parts.
    """
    loop = run.config.loop
    run.batches.draw_part(rank, count)
    run.replicas, run.replica = count, rank
    # For this process only: a run may be resumed by another number of processes.
    loop = msgspec.structs.replace(loop, batch_size=loop.batch_size // count)
    run.config = msgspec.structs.replace(run.config, loop=loop)
    torch.manual_seed(loop.seed + rank)


def share_muon(run: Run) -> None:
    """Let each rank orthogonalise some of the matrices that Muon updates, instead of all of them."""
    for optimizer in run.optimizers.values():
        if isinstance(optimizer, Muon):
            optimizer.ranks = run.world


def before_each_batch(run: Run, announce: Callable[[bool], object]) -> None:
    """Call a function before the loss of each micro-batch of a step, with whether it is the last one."""
    operations = run.operations
    loss, backward, clip, done = operations.loss, operations.backward, operations.clip, 0

    def announced_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        announce(done == run.config.loop.accumulate - 1)
        return loss(inputs, targets)

    def counted_backward(value: Tensor) -> None:
        nonlocal done
        backward(value)
        done += 1

    def clip_after_last_batch() -> Tensor:
        nonlocal done
        done = 0
        return clip()

    operations.loss, operations.backward, operations.clip = announced_loss, counted_backward, clip_after_last_batch
