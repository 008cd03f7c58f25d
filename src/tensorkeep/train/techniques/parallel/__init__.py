"""Techniques with which several processes train one run together: their base class, and how torchrun starts them."""

from typing import ClassVar

from tensorkeep.train.run.world import can_join
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.requirements import Machine

TOGETHER = ("ddp", "fsdp", "tensor-parallel", "pipeline-parallel")
"""Techniques that divide the work of a run among processes, each in its own way."""


class Parallel(Technique):
    """A technique for several processes, which torchrun starts; see `tensorkeep.train.run.world`."""

    kind: ClassVar = "systems"
    changes: ClassVar = "processes"
    # With dropout, each process draws other zeros; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05

    def lacks(self, machine: Machine) -> str | None:
        """Return the command that starts the processes, unless they are started."""
        if can_join():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def others_than(name: str) -> dict[str, str]:
    """Return, as conflicts, the other techniques for several processes."""
    return dict.fromkeys((each for each in TOGETHER if each != name), "each would divide the processes by itself")
