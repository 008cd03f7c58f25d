"""States of several ranks, and their saves and loads by torch's distributed checkpoints; called by `ranks`."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {"a": (12, 8), "b": (12, 4)}


def full_tensor(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def sharded(shapes: Shapes, seed: int, *, sizes: tuple[int, ...] = (), placements: Sequence[Placement] = ()) -> Any:
    """Return tensors of known values that are sharded by rows over all ranks, or as given."""
    over = mesh(*sizes)
    tensors = {name: full_tensor(shape, seed + number) for number, (name, shape) in enumerate(shapes.items())}
    return {name: distribute_tensor(each, over, placements or [Shard(0)]) for name, each in tensors.items()}


def emptied(state: Any) -> Any:
    """Return a state of the same layout whose elements are all 7."""
    return {name: torch.full_like(each, 7) for name, each in state.items()}


def full(state: Any) -> dict[str, Any]:
    """Return the full tensors as arrays."""
    return {name: each.full_tensor().numpy() for name, each in state.items()}


def transferred(counter: str) -> int:
    """Return how many bytes this process has read (counter ``"rchar"``) or written (``"wchar"``) so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields[counter])


def save(state: Any, writer: Any, planner: Any = None) -> None:
    with warnings.catch_warnings():
        # That a checkpoint is overwritten, or that there is one process only.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, storage_writer=writer, planner=planner)


def load(state: Any, reader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, storage_reader=reader)
