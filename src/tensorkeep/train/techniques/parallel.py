"""What all techniques have in common that let several processes train one run together."""

from __future__ import annotations

from typing import ClassVar

from tensorkeep.train.run.world import can_join
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.machine import Machine

TOGETHER = ("ddp", "fsdp", "tensor-parallel", "pipeline-parallel")
"""Techniques that share out the processes of a run, each in its own way."""


class Parallel(Technique):
    """A technique for several processes, which torchrun starts; see `tensorkeep.train.run.world`."""

    kind: ClassVar = "systems"
    changes: ClassVar = "processes"

    def lacks(self, machine: Machine) -> str | None:
        """Say how the processes are started, unless they are."""
        if can_join():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def others_than(name: str) -> dict[str, str]:
    """Return, as conflicts, the other techniques that share out the processes."""
    return dict.fromkeys((each for each in TOGETHER if each != name), "each would share out the processes by itself")
