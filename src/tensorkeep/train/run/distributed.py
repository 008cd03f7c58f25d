"""The processes that train one run together, as torchrun starts them: which one this is, and what they agree on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tensorkeep.checkpoint.restore.stateful import expand
from tensorkeep.errors import RanksDisagreeError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.techniques.parallel import Parallel, count_started, local_rank
from tensorkeep.train.techniques.stack import Stack

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others: also while one of them prepares data, or saves, alone."""


class World:
    """The processes of a run, of which the first, of rank 0, leads: it alone writes, and speaks.

    What the methods return is the same in all processes, all of which must call them in the same order.

    Parameters
    ----------
    rank, size : int
        Which of how many processes this is.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._collecting = False

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Say whether a flag is raised in any process."""
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def agree(self, *values: int) -> bool:
        """Say whether all processes have the same whole numbers."""
        if self.size == 1:
            return True
        # The largest of a number and of its negative: the largest and the smallest of all.
        found = torch.tensor([*values, *(-value for value in values)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        highest, lowest = found.chunk(2)
        return bool((highest == -lowest).all())

    def of_first(self, value: float) -> float:
        """Return the number of the first process."""
        if self.size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(found, src=0)
        return found.item()

    def text_of(self, rank: int, text: str) -> str:
        """Return the text that a process, of some rank, has."""
        if self.size == 1:
            return text
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor(len(encoded))
        dist.broadcast(length, src=rank)
        found = encoded if self.rank == rank else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(found, src=rank)
        return bytes(found.tolist()).decode()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a scalar over the processes, on its device."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def wait_for_all(self) -> None:
        """Wait until every process is here."""
        self.any(False)

    def collect(self, state: object) -> Any:
        """Return a state that the first process can save.

        Where a process has a part of a tensor, the first gets the whole; in the others it is empty. One process that is
        alone has all of it.
        """
        if self.size == 1:
            return state
        self._collecting = not self.leads
        try:
            return expand(state)
        finally:
            self._collecting = False

    def whole(self, tensor: Any) -> Tensor:
        """Return the whole of a DTensor, of which each process has a part, on the CPU; see `collect`."""
        found: Tensor = tensor.full_tensor()
        return self.kept(found)

    def kept(self, whole: Tensor) -> Tensor:
        """Return a whole tensor, on the CPU; empty where it is collected for another process."""
        return whole.new_empty(0, device="cpu") if self._collecting else whole.cpu()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors, on the CPU and of one shape, of all processes, by rank."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor)
        return found


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """Let this process train with others, where a technique of the run asks for that.

    In a process that belongs to a group already, that group is taken, and left as it is.

    Parameters
    ----------
    config : Config

    Raises
    ------
    UsageError
        If several processes were started, and no technique lets them train together, or there is no GPU for each.
    StoreError
        If another process ends, or does not answer.
    """
    together = any(isinstance(each, Parallel) for each in Stack.of(config.techniques).techniques)
    if not together:
        _check_alone()
    if not together or not (dist.is_initialized() or count_started()):
        # Without torchrun a technique says by itself what it lacks.
        yield World()
        return
    with _translated(), _group(config.loop.device):
        yield World(dist.get_rank(), dist.get_world_size())


def configured(config: Config, world: World) -> tuple[Stack, Config]:
    """Return the techniques of a run, and its configuration as they want it: all processes have that of the first.

    Techniques may measure, and find another thing in each process.
    """
    techniques = Stack.of(config.techniques)
    config = techniques.configure(config)
    if world.size > 1:
        config = Config.from_dict(json.loads(world.text_of(0, json.dumps(config.as_dict()))))
        techniques = Stack.of(config.techniques)
        config = techniques.configure(config)
    return techniques, config


@contextmanager
def _group(device: str) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(_own_gpu(device))
    # What is agreed on lies on the CPU, so that no GPU is waited for.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _own_gpu(device: str) -> int:
    rank, there = local_rank(), torch.cuda.device_count()
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"loop.device is {device!r}, and each process takes a GPU of its own", remedy='give "auto", "cuda" or "cpu"'
        )
    if rank >= there:
        raise UsageError(
            f"process {rank} of this machine has no GPU of its own: there are {there}",
            remedy=f"torchrun --nproc-per-node {there}, or --loop.device cpu",
        )
    return rank


def _check_alone() -> None:
    if count_started() > 1:
        raise UsageError(
            f"torchrun started {count_started()} processes, and no technique lets them train together",
            remedy="turn one on (--technique ddp), or leave torchrun out",
        )


@contextmanager
def _translated() -> Iterator[None]:
    """Say of a failed exchange what it means."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RanksDisagreeError(
            f"another process of the run has ended, or does not answer: {str(error).splitlines()[0]}",
            remedy="see what that one said; then go on by --resume",
        ) from error
