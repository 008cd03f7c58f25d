"""What all techniques have in common that let several processes train one run together."""

from __future__ import annotations

import os
from typing import ClassVar

from torch import distributed as dist

from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.machine import Machine

TOGETHER = ("ddp", "fsdp", "tensor-parallel", "pipeline-parallel")
"""Techniques that share out the processes of a run, each in its own way."""

_STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Parallel(Technique):
    """A technique for several processes, which torchrun starts; see `tensorkeep.train.run.distributed`."""

    kind: ClassVar = "systems"
    changes: ClassVar = "processes"

    def lacks(self, machine: Machine) -> str | None:
        """Say how the processes are started, unless they are."""
        if dist.is_initialized() or count_started():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def count_started() -> int:
    """Return how many processes torchrun has started with this one; 0 if it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _STARTED) else 0


def local_rank() -> int:
    """Return which of the processes on this machine this is."""
    return int(os.environ["LOCAL_RANK"])


def others_than(name: str) -> dict[str, str]:
    """Return, as conflicts, the other techniques that share out the processes."""
    return dict.fromkeys((each for each in TOGETHER if each != name), "each would share out the processes by itself")
