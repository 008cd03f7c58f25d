"""How techniques watch the updates of a step: which optimizers were stepped, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from holdfast.train.techniques.base import Proof

if TYPE_CHECKING:
    from holdfast.train.run import Run


@contextmanager
def counted_steps(run: Run) -> Iterator[Counter[str]]:
    """Count, within, how often each optimizer is stepped."""
    steps: Counter[str] = Counter()

    def hook(name: str) -> Any:
        def count(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
            steps[name] += 1

        return count

    with ExitStack() as hooks:
        for name, optimizer in run.optimizers.items():
            hooks.callback(optimizer.register_step_pre_hook(hook(name)).remove)
        yield steps


def was_skipped(proof: Proof) -> None:
    """Say that there was no update to be seen: in float16 the first ones often overflow, until a scale is found."""
    proof.is_that("nothing yet: the first update was skipped, because its gradient was not finite", updates=0)
