"""Techniques that are a schedule of the learning rate: what they share is their proof."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tensorkeep.train.optim.schedules import learning_rate_factor
from tensorkeep.train.techniques.base import Proof, Technique

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_SAME = 1e-6
"""Rates that are kept in float32 are this close to what they were set to."""


class ScheduleTechnique(Technique):
    """A technique that chooses the schedule of a run before it is built; nothing is left to do afterwards."""

    def apply(self, run: Run) -> None:
        """Do nothing: the schedule is part of the configuration."""

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See with which learning rates optimizers step, whichever do."""
        proof = Proof()
        with _stepped_rates() as stepped:
            yield proof
        # A scaler of losses may have skipped the update: then what would have stepped is looked at.
        rates = stepped or [rate for optimizer in run.optimizers.values() for rate in _rates(optimizer)]
        of_peak = (
            learning_rate_factor(run.config.schedule, run.progress.step, run.config.loop.steps) * run.plateau.factor
        )
        optim = run.config.optim
        wanted = {of_peak * peak for peak in (optim.lr, *([optim.muon_lr] if optim.name == "muon" else []))}
        others = [rate for rate in rates if not any(math.isclose(rate, each, rel_tol=_SAME) for each in wanted)]
        if others or not rates:
            raise self.not_active(
                f"of {len(rates)} groups of parameters, {len(others)} stepped with another learning rate "
                f"({', '.join(f'{rate:g}' for rate in others[:3])}) than "
                f"{', '.join(f'{rate:g}' for rate in sorted(wanted))}",
                "report it, with the other techniques that are on",
            )
        told = ", ".join(f"{rate:.3g}" for rate in sorted(wanted))
        proof.is_that(
            f"{len(rates)} groups of parameters stepped with the learning rate of the schedule, {told}",
            groups=len(rates),
            learning_rates=sorted(wanted),
            share_of_peak=of_peak,
        )


@contextmanager
def _stepped_rates() -> Iterator[list[float]]:
    """Note, within, the learning rate of each group of each optimizer that steps, known to the run or not."""
    rates: list[float] = []

    def note(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        rates.extend(_rates(optimizer))

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield rates
    finally:
        handle.remove()


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
