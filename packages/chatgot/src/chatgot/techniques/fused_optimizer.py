"""Fused AdamW: one kernel updates weights, momentum and variance."""

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chatgot.techniques.base import Config, MemoryEffects, Proof, StepState, Technique, Verification
from chatgot.techniques.observe import observe_adamw
from tensorkeep.errors import UsageError


class FusedOptimizer(Technique):
    """torch's ``AdamW(fused=True)``, also for the parameters that Muon leaves to AdamW."""

    name: ClassVar = "fused-optimizer"
    aliases: ClassVar = ("fused-adamw", "fused-kernels", "fused-kernel-operations")
    changes: ClassVar = "optimizer"
    # The kernel adds in another order, and Adam divides by numbers that may be tiny.
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "updates weights, momentum and variance in one pass over memory"
    effect: ClassVar = "the update is several times as fast, but it is a small part of a step"
    reference: ClassVar = "torch.optim.AdamW, fused"
    sets: ClassVar = "optim.implementation"
    predicts_memory: ClassVar = True

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.fuses_update = True

    def configure(self, config: Config) -> Config:
        if config.optim.implementation == "foreach":
            raise UsageError(
                "optim.implementation is 'foreach', and fused-optimizer sets it to 'fused'",
                remedy="leave fused-optimizer out, or give optim.implementation default",
            )
        return config.changed({"optim.implementation": "fused"})

    def verify(self, run: StepState) -> Verification:
        adamw, observer = run.optimizers["adamw"], _FusedKernelObserver()
        step = adamw.step

        def observed_step(*arguments: Any, **options: Any) -> Any:
            # The mode is on during AdamW's step only. torch compiles nothing in a dispatch mode, and never compiles a
            # function that it first met in one, such as the Newton-Schulz steps of a compiled Muon.
            with observer:
                return step(*arguments, **options)

        adamw.step = observed_step  # type: ignore[method-assign]
        try:
            with observe_adamw(run) as observed:
                yield
        finally:
            # The class has `step`; the attribute of the instance hid it.
            del adamw.step
        if not observed.updates:
            return None
        missed = [group for group in adamw.param_groups if not observer.weights.issuperset(map(id, group["params"]))]
        if missed:
            raise self.not_active(
                f"the fused kernel did not update {len(missed)} of {len(adamw.param_groups)} groups of weights",
                "report it, with the device and the dtype of the weights",
            )
        observed.check(self)
        summary = (
            f"{observer.calls} calls of the fused kernel updated {len(observer.weights)} weights by AdamW's formula"
        )
        return Proof(summary, calls=observer.calls, weights=len(observer.weights))


class _FusedKernelObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        # Identities, not addresses: a sharded weight has no data pointer.
        self.weights: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten._fused_adamw_:
            self.calls += 1
            self.weights.update(map(id, arguments[0]))
        return operator(*arguments, **(options or {}))
