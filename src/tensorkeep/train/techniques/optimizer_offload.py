"""Optimizer offload: AdamW's states live in the memory of the CPU, which makes the updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.host_optimizer import HostOptimizer
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.updates import seen_updates
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class OptimizerOffload(Technique):
    """Ren et al., arXiv 2101.06840. Muon, whose updates are products of matrices, stays on the device."""

    name: ClassVar = "optimizer-offload"
    kind: ClassVar = "systems"
    changes: ClassVar = "optimizer"
    # Another device's kernel adds in another order, and Adam divides by what may be tiny.
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "keeps AdamW's states in the CPU's memory, and updates copies of the weights there"
    effect: ClassVar = (
        "8 bytes of GPU memory less for each weight, and 16 more on the CPU; a step takes longer by what 8 bytes a "
        "weight take over the bus and the CPU takes for AdamW"
    )
    reference: ClassVar = "arXiv 2101.06840"
    conflicts: ClassVar = {
        "fused-optimizer": "what is stepped on the CPU is stepped by the fused kernel already",
        "low-bit-optimizer": "what is stepped on the CPU has states of 32 bits",
        "fsdp": "fsdp divides the weights among devices, and has an offload of its own",
        "tensor-parallel": "the weights are divided among devices",
    }

    def lacks(self, machine: Machine) -> str | None:
        """Say that there is no GPU whose memory could be saved."""
        return machine.lacks_cuda()

    def apply(self, run: Run) -> None:
        """Put one that steps on the CPU in the place of AdamW."""
        run.optimizers["adamw"] = HostOptimizer(run.optimizers["adamw"])

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See the gradients come to the CPU, and where the states lie after the update."""
        proof = Proof()
        with seen_updates(run) as updates:
            before = getattr(run.optimizers["adamw"], "fetched_bytes", 0)
            yield proof
        if not updates.made:
            return
        optimizer = run.optimizers["adamw"]
        wanted = sum(weight.nbytes for group in optimizer.param_groups for weight in group["params"])
        fetched = getattr(optimizer, "fetched_bytes", 0) - before
        elsewhere = {str(state.device) for state in _states(optimizer) if state.device.type != "cpu"}
        if fetched != wanted or elsewhere:
            raise self.not_active(
                f"{format_bytes(fetched)} of {format_bytes(wanted)} of gradients came to the CPU, and states lie on "
                f"{', '.join(sorted(elsewhere)) or 'the CPU'}",
                "report it, with the other techniques that are on",
            )
        held = sum(state.nbytes for state in _states(optimizer))
        proof.is_that(
            f"{format_bytes(held)} of states lie in the CPU's memory, where {format_bytes(fetched)} of gradients came",
            state_bytes=held,
            fetched_bytes=fetched,
        )


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    states = optimizer.state_dict()["state"].values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
