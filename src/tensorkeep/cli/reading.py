"""The options of commands that read the tensors of checkpoints."""

from dataclasses import dataclass

from cyclopts import Parameter

from tensorkeep.cli.options import Allow, MemoryBudget, Threads
from tensorkeep.storage.buffers import DEFAULT_BUDGET


@Parameter(name="*")
@dataclass(frozen=True)
class Reading:
    """How tensors are read: with ``vars(reading)``, the arguments of functions such as `tensorkeep.verify`."""

    threads: Threads = None
    memory_budget: MemoryBudget = DEFAULT_BUDGET
    allow: Allow = None


READING = Reading()
