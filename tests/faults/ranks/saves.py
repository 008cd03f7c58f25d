"""What the ranks do in the fault tests: collective saves, one of whose operations is broken on one rank."""

import errno
import traceback
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorkeep
from faults import injection as faults
from tensorkeep.checkpoint.ranks import group

GRACE_SECONDS = 0.15
"""In place of a second, in which the living ranks would have to arrive on a busy machine."""

ACTIONS: dict[str, faults.Action] = {
    "killed before": faults.die,
    "killed after": faults.die_after,
    "full disk": faults.raise_error(errno.ENOSPC),
    "hung": faults.stop,
}


class Fault(NamedTuple):
    """What is broken: an operation of a rank, by its index, and how."""

    rank: int
    index: int
    action: str


class Part(NamedTuple):
    """What became of the save on one rank: its operations, and the class and text of its error, if it raised one."""

    operations: list[str]
    error: str | None
    message: str
    trace: str


def full_state(number: int) -> dict[str, Any]:
    """Return the state that all ranks have together; part of it is the same for all numbers."""
    return {
        "model": {"w": torch.arange(70.0).reshape(7, 10) * number, "frozen": torch.arange(4000.0).reshape(20, 200)},
        "plain": torch.full((30,), number),
        "step": number,
    }


def own_state(number: int) -> dict[str, Any]:
    """Return a rank's part of the state."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = full_state(number)
    model = {k: distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for k, v in state["model"].items()}
    return {**state, "model": model}


def save(root: Path, number: int, timeout: float) -> None:
    own = own_state(number)
    tensorkeep.save(own, root / "c", overwrite=True, group=dist.group.WORLD, timeout=timeout, threads=1)


def save_async(root: Path, number: int, timeout: float) -> None:
    own = own_state(number)
    pending = tensorkeep.save_async(
        own, root / "c", overwrite=True, compression="lossless", group=dist.group.WORLD, timeout=timeout, threads=1
    )
    pending.wait()


def save_step(root: Path, number: int, timeout: float) -> None:
    """Save a step over the last one, and delete that."""
    own = own_state(number)
    with tensorkeep.CheckpointManager(
        root, keep_last=1, incremental=True, group=dist.group.WORLD, timeout=timeout, threads=1
    ) as manager:
        if manager.latest() is not None:
            manager.restore(into=own_state(0))
        manager.save(number, own).wait()


def take_part(rank: int, work: str, root: str, number: int, timeout: float, fault: Fault | None) -> Part:
    """Save together with the other ranks, while an operation of one of them is broken."""
    broken = fault is not None and fault.rank == rank
    error: BaseException | None = None
    with (
        mock.patch.object(group, "_GRACE", GRACE_SECONDS),
        faults.broken(
            fail_at=fault.index if fault and broken else None, action=ACTIONS[fault.action] if fault else None
        ) as operations,
    ):
        try:
            globals()[work](Path(root), number, timeout)
        except BaseException as raised:
            error = raised
    if error is None:
        return Part(operations.seen, None, "", "")
    return Part(operations.seen, type(error).__name__, str(error), "".join(traceback.format_exception(error)))
