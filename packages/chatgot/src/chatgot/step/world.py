"""The ranks of a run: torchrun's process group, and the collectives of the trainer."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError, first_line

T = TypeVar("T")
# For a collective: ranks also wait while rank 0 alone prepares data.
_TIMEOUT = timedelta(minutes=30)
# The environment variables that torchrun sets in each process that it starts.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class World:
    """The ranks that train one run together. Rank 0 alone writes the record and the log, and prints.

    Every method that communicates is a collective: all ranks call it, in the same order, and all get the same result.
    With one rank nothing is sent.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag))
        # The maximum of 0 and 1 is "or".
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def all_equal(self, *values: int) -> bool:
        return self.size == 1 or len({tuple(each) for each in self.all_gather(values)}) == 1

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return the plain value that rank ``source`` has."""
        if self.size == 1:
            return value
        # torch's own broadcast of objects sends pickles.
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        length = torch.tensor(len(encoded))
        # The length first, so that the other ranks can allocate the bytes.
        dist.broadcast(length, src=source)
        found = encoded if self.rank == source else encoded.new_empty(int(length))
        dist.broadcast(found, src=source)
        return cast(T, msgspec.msgpack.decode(found.numpy()))

    def all_gather(self, value: T) -> list[T]:
        # By broadcasts, because the encoded values differ in size.
        return [self.broadcast(value, source=rank) for rank in range(self.size)]

    def mean(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def barrier(self) -> None:
        self.any(False)


def launched_ranks() -> int:
    """Return the number of ranks that torchrun started; 0 if it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHER_VARIABLES) else 0


def launched_machines() -> int:
    """Return the number of machines with ranks that torchrun started; 1 if it did not start this process."""
    return max(1, launched_ranks() // int(os.environ.get("LOCAL_WORLD_SIZE", launched_ranks() or 1)))


def can_join() -> bool:
    return dist.is_initialized() or launched_ranks() > 0


@contextmanager
def join(device: str) -> Iterator[World]:
    """Join the process group of the run; an existing group is used and left as it is."""
    with ExitStack() as stack:
        stack.enter_context(_lost_ranks_reported())
        if not dist.is_initialized():
            # On "auto" and "cuda" each rank of a machine takes its own GPU.
            on_cuda = device != "cpu" and torch.cuda.is_available()
            if on_cuda:
                torch.cuda.set_device(_own_gpu(device))
            # `World` communicates on the CPU, by gloo, so that it never waits for a GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=_TIMEOUT)
            stack.callback(dist.destroy_process_group)
        yield World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _own_gpu(device: str) -> int:
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"loop.device is {device!r}, and each rank takes its own GPU", remedy='give "auto", "cuda" or "cpu"'
        )
    if rank >= count:
        raise UsageError(
            f"local rank {rank} has no GPU: this machine has {count}",
            remedy=f"torchrun --nproc-per-node {count}, or --loop.device cpu",
        )
    return rank


@contextmanager
def _lost_ranks_reported() -> Iterator[None]:
    """Raise the RuntimeError of a failed collective as RanksDisagreeError."""
    try:
        yield
    except TensorkeepError:
        raise
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors, which only their text identifies.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RanksDisagreeError(
            f"another rank of the run has ended or does not answer: {first_line(error)}",
            remedy="see the error of that rank, then resume with --resume",
        ) from error
