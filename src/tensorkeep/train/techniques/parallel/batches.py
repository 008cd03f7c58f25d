"""Data parallelism: each process trains its own rows of every batch."""

import msgspec
import torch

from tensorkeep.errors import UsageError
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.wrapped_batches import WrappedBatches


class RowsOfRank(WrappedBatches):
    """The rows of each batch that one process trains.

    Parameters
    ----------
    inner : BatchSource
        The batches of all processes.
    rank, size : int
        The rank of this process, and the number of processes.
    """

    def __init__(self, inner: BatchSource, rank: int, size: int) -> None:
        super().__init__(inner)
        self._rank = rank
        self._size = size

    def __next__(self) -> Batch:
        inputs, targets = (each.tensor_split(self._size)[self._rank] for each in next(self.inner))
        return inputs, targets


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
    run.batches = RowsOfRank(run.batches, world.rank, world.size)
    run.replicas = world.size
    # For this process only: a run may be resumed by another number of processes.
    loop = msgspec.structs.replace(loop, batch_size=loop.batch_size // world.size)
    run.config = msgspec.structs.replace(run.config, loop=loop)
    torch.manual_seed(loop.seed + world.rank)
