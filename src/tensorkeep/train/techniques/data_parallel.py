"""Data parallelism: each process trains its own rows of every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from tensorkeep.errors import UsageError
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.techniques.drawing import Drawing

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class Rows(Drawing):
    """The rows of each batch that one of several processes trains.

    Parameters
    ----------
    plain : BatchSource
        Those of all processes.
    rank, size : int
        Which of how many processes this is.
    """

    def __init__(self, plain: BatchSource, rank: int, size: int) -> None:
        super().__init__(plain)
        self._rank = rank
        self._size = size

    def __next__(self) -> Batch:
        inputs, targets = (each.tensor_split(self._size)[self._rank] for each in next(self.plain))
        return inputs, targets


def share_batches(run: Run) -> None:
    """Let this process train its rows of each batch, with numbers of its own for dropout.

    ``loop.batch_size`` is that of all processes together: what they compute is what one process would.

    Raises
    ------
    UsageError
        If the rows of a batch do not divide.
    """
    world, rows = run.world, run.config.loop.batch_size
    if rows % world.size:
        raise UsageError(
            f"a batch of {rows} sequences does not divide among {world.size} processes",
            remedy=f"give a batch size (--loop.batch_size) that is a multiple of {world.size}",
        )
    run.batches = Rows(run.batches, world.rank, world.size)
    run.replicas = world.size
    # Of this run, not of its folder, which may be gone on with by another number of processes.
    loop = msgspec.structs.replace(run.config.loop, batch_size=rows // world.size)
    run.config = msgspec.structs.replace(run.config, loop=loop)
    torch.manual_seed(run.config.loop.seed + world.rank)
