"""Saves and loads by torch's distributed checkpoints, on ranks that `ranks` calls."""

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException


def full_tensor(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save(state: Any, writer: Any, planner: Any = None) -> None:
    # A checkpoint is overwritten, or there is one process only.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(state, storage_writer=writer, planner=planner)


def load(state: Any, reader: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(state, storage_reader=reader)


def errors_of(call: Callable[..., Any], *arguments: Any) -> dict[int, str]:
    """Save or load by DCP; return the class and the text of the error of each rank that has failed."""
    with pytest.raises(CheckpointException) as caught:
        call(*arguments)
    return {rank: f"{type(error).__name__}: {error}" for rank, (error, _) in caught.value.failures.items()}


class DyingPlanner(dcp.DefaultSavePlanner):
    """Kills one rank, before it writes or when it has written."""

    def __init__(self, rank: int, method: str) -> None:
        super().__init__()
        self._death = rank, method

    def finish_plan(self, new_plan: Any) -> Any:
        self._die("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._die("resolve_data")
        return super().resolve_data(write_item)

    def _die(self, method: str) -> None:
        if (dist.get_rank(), method) == self._death:
            os.kill(os.getpid(), signal.SIGKILL)
