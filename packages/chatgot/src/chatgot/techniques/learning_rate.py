"""Learning-rate schedules as techniques: a rate that falls on a plateau, and a range test that suggests a rate.

Both set the schedule in the configuration; the proof reads the rates of a step.
"""

import copy
import math
from typing import ClassVar

import msgspec
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from chatgot.optim.schedules import learning_rate_factor
from chatgot.settings import Count, Fraction, Positive
from chatgot.techniques.base import Config, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import hooked
from tensorkeep.errors import UsageError

# The relative rounding error of a learning rate in float32.
_SAME_RATE = 1e-6


class _ScheduleTechnique(Technique):
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "optimizer"

    def verify(self, run: StepState) -> Verification:
        stepped: list[float] = []
        # A global hook: it also sees an optimizer that the run does not know.
        with hooked([register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.extend(_rates(optimizer)))]):
            yield
        # If the loss scaler skipped the update, check the rates that the update would have used.
        rates = stepped or [rate for optimizer in run.optimizers.values() for rate in _rates(optimizer)]
        factor = learning_rate_factor(run.config.schedule, run.progress.step, run.config.loop.steps)
        factor *= run.plateau.factor
        optim = run.config.optim
        # Muon and AdamW have a rate each, and groups of parameters may have a factor.
        peaks = (optim.lr, *([optim.muon_lr] if optim.name == "muon" else []))
        groups = {1.0, *(each.lr_factor for each in optim.groups.values() if each.lr_factor is not None)}
        expected = sorted({factor * peak * group for peak in peaks for group in groups})
        others = [rate for rate in rates if not any(math.isclose(rate, each, rel_tol=_SAME_RATE) for each in expected)]
        if others or not rates:
            raise self.not_active(
                f"of {len(rates)} groups of parameters, {len(others)} stepped with another learning rate "
                f"({', '.join(f'{rate:g}' for rate in others[:3])}) than {', '.join(f'{rate:g}' for rate in expected)}"
            )
        summary = (
            f"{len(rates)} groups of parameters stepped with the learning rate of the schedule, "
            f"{', '.join(f'{rate:.3g}' for rate in expected)}"
        )
        return Proof(summary, groups=len(rates), learning_rates=expected, share_of_peak=factor)


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class PlateauSettings(Section, frozen=True):
    """When the learning rate is lowered, and by how much."""

    # Evaluations without a better validation loss.
    patience: Count = 3
    # What the rate is multiplied by.
    factor: Fraction = 0.5


class LrPlateau(_ScheduleTechnique):
    """The schedule ``"plateau"``, as in ``torch.optim.lr_scheduler.ReduceLROnPlateau``; a warm-up is kept."""

    name: ClassVar = "lr-plateau"
    aliases: ClassVar = ("auto-tune-scheduler", "auto-tuned-lr", "reduce-lr-on-plateau")
    summary: ClassVar = "lowers the learning rate whenever the validation loss has stopped improving"
    effect: ClassVar = (
        "a schedule for runs of unknown length; with a known length a tuned cosine is the baseline to beat"
    )
    reference: ClassVar = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    sets: ClassVar = "schedule.name"
    predicts_memory: ClassVar = True
    settings: PlateauSettings

    def configure(self, config: Config) -> Config:
        settings = msgspec.structs.asdict(self.settings)
        return config.changed({"schedule.name": "plateau", **{f"schedule.{key}": settings[key] for key in settings}})

    def verify(self, run: StepState) -> Verification:
        proof = yield from super().verify(run)
        patience, before, trial = self.settings.patience, run.plateau.factor, copy.deepcopy(run.plateau)
        for _ in range(patience):
            # On a copy: the proof must not change the schedule of the run.
            trial.add(math.inf)
        if not math.isclose(trial.factor, before * self.settings.factor):
            raise self.not_active(
                f"{patience} evaluations without improvement would change the learning rate from {before:g} of its "
                f"peak to {trial.factor:g}"
            )
        return proof


class RangeTestSettings(Section, frozen=True):
    """The range of learning rates."""

    # The learning rates of the first and the last step.
    lowest: Positive = 1e-6
    highest: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest <= self.lowest:
            raise UsageError(f"highest is {self.highest}", remedy=f"give a number above lowest, {self.lowest}")


class LrRangeTest(_ScheduleTechnique):
    """Smith, arXiv 1506.01186: the schedule ``"range"``. A test: use the suggested rate in another run."""

    name: ClassVar = "lr-range-test"
    aliases: ClassVar = ("lr-finder", "learning-rate-finder", "range-test", "auto-tune-scheduler")
    summary: ClassVar = "raises the learning rate step by step until the loss diverges, and suggests a rate"
    effect: ClassVar = (
        "a start for tuning at the price of a short run; include that price, and compare with a tuned rate"
    )
    reference: ClassVar = "arXiv 1506.01186"
    sets: ClassVar = "schedule.name"
    predicts_memory: ClassVar = True
    conflicts: ClassVar = {
        "lr-plateau": "each sets the schedule",
        "progressive-length": "the loss would change with the length of the windows, and the test reads the loss",
        "length-curriculum": "the loss would change with the choice of documents, and the test reads the loss",
        "loss-curriculum": "the loss would change with the choice of windows, and the test reads the loss",
    }
    settings: RangeTestSettings

    def configure(self, config: Config) -> Config:
        if config.optim.name == "muon":
            raise UsageError(
                "lr-range-test finds one learning rate, and muon has two: its own and AdamW's",
                remedy="give optim.name adamw, or leave lr-range-test out",
            )
        lowest, highest = self.settings.lowest, self.settings.highest
        # The schedule rises to its peak, so the peak is the highest rate.
        schedule = {"schedule.name": "range", "schedule.final": lowest / highest, "schedule.warmup_steps": 0}
        return config.changed({"optim.lr": highest, **schedule})
