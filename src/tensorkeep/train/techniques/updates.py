"""How techniques watch the updates of a step: whether one was made, and which optimizers it stepped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


@dataclass
class Updates:
    """What was seen of the updates of a step.

    Attributes
    ----------
    made : int
        Updates; none where the gradient was not finite.
    steps : Counter of str
        How often each optimizer was stepped, by its name.
    """

    made: int = 0
    steps: Counter[str] = field(default_factory=Counter)


@contextmanager
def seen_updates(run: Run) -> Iterator[Updates]:
    """Count, within, the updates that are made, and how often each optimizer is stepped."""
    seen, update = Updates(), run.operations.update

    def counted() -> None:
        seen.made += 1
        update()

    def hook(name: str) -> Any:
        def count(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
            seen.steps[name] += 1

        return count

    run.operations.update = counted
    with ExitStack() as hooks:
        for name, optimizer in run.optimizers.items():
            hooks.callback(optimizer.register_step_pre_hook(hook(name)).remove)
        try:
            yield seen
        finally:
            run.operations.update = update
