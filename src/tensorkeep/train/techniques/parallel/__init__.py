"""Techniques with which several processes train one run together: their base class, and sharded batches."""

from typing import ClassVar

import msgspec
import torch

from tensorkeep.errors import UsageError
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import can_join
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.wrapped_batches import WrappedBatches

TOGETHER = ("ddp", "fsdp", "tensor-parallel", "pipeline-parallel")
"""Techniques that divide the work of a run among processes, each in its own way."""


class Parallel(Technique):
    """A technique for several processes, which torchrun starts; see `tensorkeep.train.run.world`."""

    kind: ClassVar = "systems"
    changes: ClassVar = "processes"
    # With dropout, each process draws other zeros; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    # Its own name has no effect: a technique is on once.
    conflicts: ClassVar = dict.fromkeys(TOGETHER, "both need all ranks")

    def lacks(self, machine: Machine) -> str | None:
        """Return the command that starts the processes, unless they are started."""
        if can_join():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def shard_batches(run: Run) -> None:
    """Let this process train its rows of each batch, with its own random numbers for dropout.

    ``loop.batch_size`` is that of all processes together: they compute what one process would.

    Raises UsageError if the batch size is not a multiple of the number of processes.
    """
    world, loop = run.world, run.config.loop
    if loop.batch_size % world.size:
        raise UsageError(
            f"a batch of {loop.batch_size} sequences cannot be split equally among {world.size} processes",
            remedy=f"give a batch size (--loop.batch_size) that is a multiple of {world.size}",
        )

    def rows_of_rank(batches: BatchSource) -> Batch:
        inputs, targets = (each.tensor_split(world.size)[world.rank] for each in next(batches))
        return inputs, targets

    run.batches = WrappedBatches(run.batches, rows_of_rank)
    run.replicas = world.size
    # For this process only: a run may be resumed by another number of processes.
    loop = msgspec.structs.replace(loop, batch_size=loop.batch_size // world.size)
    run.config = msgspec.structs.replace(run.config, loop=loop)
    torch.manual_seed(loop.seed + world.rank)
