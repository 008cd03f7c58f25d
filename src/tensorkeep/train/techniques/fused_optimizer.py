"""Fused optimizer: AdamW updates all weights of a group in one kernel instead of a dozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.techniques.base import Proof, Technique

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class FusedOptimizer(Technique):
    """torch's ``AdamW(fused=True)``, also for what Muon leaves to AdamW."""

    name: ClassVar = "fused-optimizer"
    kind: ClassVar = "systems"
    changes: ClassVar = "optimizer"
    # The kernel adds in another order, and Adam divides by what may be tiny.
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "updates weights, momentum and variance in one pass over memory"
    effect: ClassVar = "the update takes a fraction of its time, which is a small part of a step's"
    reference: ClassVar = "torch.optim.AdamW, fused"
    conflicts: ClassVar = {
        "low-bit-optimizer": "the fused kernel takes no quantised states",
        "optimizer-offload": "what is stepped on the CPU is stepped by the fused kernel already",
    }

    def configure(self, config: Config) -> Config:
        """Ask for the fused AdamW.

        Raises
        ------
        UsageError
            If another implementation is asked for.
        """
        if config.optim.implementation == "foreach":
            raise UsageError(
                "optim.implementation is 'foreach', and fused-optimizer is to be on",
                remedy="leave one of them out",
            )
        return msgspec.structs.replace(config, optim=msgspec.structs.replace(config.optim, implementation="fused"))

    def apply(self, run: Run) -> None:
        """Leave the run as it is: its optimizers were built as `configure` asked."""

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See which weights the fused kernel is given: all those of AdamW, or it fell back to another one."""
        proof = Proof()
        adamw = run.optimizers["adamw"]
        watch, update = _FusedKernels(), run.operations.update
        made = 0

        def watched() -> None:
            nonlocal made
            made += 1
            with watch:
                update()

        run.operations.update = watched
        try:
            yield proof
        finally:
            run.operations.update = update
        if not made:
            return
        missed = [group for group in adamw.param_groups if not watch.saw(group["params"])]
        if missed:
            raise self.not_active(
                f"{len(missed)} of {len(adamw.param_groups)} groups of weights were not updated by the fused kernel",
                "report it, with the device and the dtype of the weights",
            )
        proof.is_that(
            f"{watch.calls} calls of the fused kernel updated {len(watch.weights)} weights",
            calls=watch.calls,
            weights=len(watch.weights),
        )


class _FusedKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each call of the fused AdamW, and the weights that it updates.

    Those are known by themselves, not by their memory: weights that are divided among processes have none to tell.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.weights: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten._fused_adamw_:
            self.calls += 1
            self.weights.update(map(id, arguments[0]))
        return operator(*arguments, **(options or {}))

    def saw(self, weights: list[torch.Tensor]) -> bool:
        return set(map(id, weights)) <= self.weights
