"""Techniques that only set configuration.

The settings are implemented where the configuration is read: in `tensorkeep.train.optim.optimizers`,
`tensorkeep.train.optim.schedules` and `tensorkeep.train.model.block`.
"""

from typing import ClassVar, Literal

import msgspec

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Count, Fraction, Positive, Section
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.techniques.base import Technique
from tensorkeep.train.techniques.config_proofs import (
    gelu_counterpart,
    prove_activation,
    prove_fused_adamw,
    prove_plateau,
    prove_schedule,
)

_SIZE_TOLERANCE = 0.05
"""The relative difference of the MLPs' parameters up to which models count as equally large."""


class FusedOptimizer(Technique):
    """torch's ``AdamW(fused=True)``, also for the parameters that Muon leaves to AdamW."""

    name: ClassVar = "fused-optimizer"
    kind: ClassVar = "systems"
    changes: ClassVar = "optimizer"
    # The kernel adds in another order, and Adam divides by numbers that may be tiny.
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "updates weights, momentum and variance in one pass over memory"
    effect: ClassVar = "the update is several times as fast, but it is a small part of a step"
    reference: ClassVar = "torch.optim.AdamW, fused"
    verify = prove_fused_adamw

    def configure(self, config: Config) -> Config:
        """Set the implementation of AdamW."""
        if config.optim.implementation == "foreach":
            raise UsageError(
                "optim.implementation is 'foreach', and fused-optimizer sets it to 'fused'",
                remedy="leave one of them out",
            )
        return config.changed({"optim.implementation": "fused"})


class PlateauSettings(Section, frozen=True):
    """When the learning rate is lowered, and by how much.

    Attributes
    ----------
    patience : int
        Evaluations without a better validation loss.
    factor : float
        What the rate is multiplied by.
    """

    patience: Count = 3
    factor: Fraction = 0.5


class PlateauTechnique(Technique):
    """The schedule ``"plateau"``, as in ``torch.optim.lr_scheduler.ReduceLROnPlateau``; a warm-up is kept."""

    name: ClassVar = "lr-plateau"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "optimizer"
    summary: ClassVar = "lowers the learning rate whenever the validation loss has stopped improving"
    effect: ClassVar = (
        "a schedule for runs whose length is not known; with a known length a tuned cosine is the baseline to beat"
    )
    reference: ClassVar = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    Settings: ClassVar = PlateauSettings
    settings: PlateauSettings
    verify = prove_plateau

    def configure(self, config: Config) -> Config:
        """Set the schedule."""
        settings = msgspec.structs.asdict(self.settings)
        return config.changed({"schedule.name": "plateau", **{f"schedule.{key}": settings[key] for key in settings}})


class RangeTestSettings(Section, frozen=True):
    """The range of learning rates.

    Attributes
    ----------
    lowest, highest : float
        The learning rates of the first and of the last step.
    """

    lowest: Positive = 1e-6
    highest: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest <= self.lowest:
            raise UsageError(f"highest is {self.highest}", remedy=f"give a number above lowest, {self.lowest}")


class RangeTestTechnique(Technique):
    """Smith, arXiv 1506.01186: the schedule ``"range"``; `tensorkeep.train.optim.schedules` makes the suggestion.

    A run with it is a test, not a training: use the suggested rate in another run.
    """

    name: ClassVar = "lr-range-test"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "optimizer"
    summary: ClassVar = "raises the learning rate step by step until the loss diverges, and suggests a rate"
    effect: ClassVar = (
        "a start for tuning at the price of a short run; include that price, and compare with a tuned rate"
    )
    reference: ClassVar = "arXiv 1506.01186"
    Settings: ClassVar = RangeTestSettings
    conflicts: ClassVar = {
        "lr-plateau": "each sets the schedule",
        "progressive-length": "the loss would change with the length of the windows, and the test reads the loss",
        "length-curriculum": "the loss would change with the choice of documents, and the test reads the loss",
        "loss-curriculum": "the loss would change with the choice of windows, and the test reads the loss",
    }
    settings: RangeTestSettings
    verify = prove_schedule

    def configure(self, config: Config) -> Config:
        """Set the schedule, whose last learning rate is the highest."""
        if config.optim.name == "muon":
            raise UsageError(
                "lr-range-test finds one learning rate, and muon has two: its own and AdamW's",
                remedy="give optim.name adamw, or leave lr-range-test out",
            )
        lowest, highest = self.settings.lowest, self.settings.highest
        schedule = {"schedule.name": "range", "schedule.final": lowest / highest, "schedule.warmup_steps": 0}
        return config.changed({"optim.lr": highest, **schedule})


class ActivationSettings(Section, frozen=True):
    """The activation of the MLPs.

    Attributes
    ----------
    activation : str
        ``"gelu"``; ``"relu2"``, the square of ReLU (So et al., arXiv 2109.08668); ``"swiglu"`` or ``"geglu"``, which
        multiply two projections of the input.
    """

    activation: Literal["gelu", "relu2", "swiglu", "geglu"] = "swiglu"


class ActivationFunction(Technique):
    """Shazeer, arXiv 2002.05202: gated activations are compared at equal size, 2/3 of the width and three matrices."""

    name: ClassVar = "activation-function"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "gives the MLPs another activation, with as many parameters as GELU with 4 d_model"
    effect: ClassVar = "often a slightly lower loss with ReLU^2 or a gated activation, at equal parameters and time"
    reference: ClassVar = "arXiv 2002.05202, arXiv 2109.08668"
    Settings: ClassVar = ActivationSettings
    conflicts: ClassVar = {"pipeline-parallel": "its activity check needs every block, but each process has only some"}
    settings: ActivationSettings
    verify = prove_activation

    def configure(self, config: Config) -> Config:
        """Set the activation, and the width with which a gated one has as many parameters."""
        model = config.model
        by_default = model.d_ff == msgspec.structs.replace(model, d_ff=None).mlp_width
        d_ff = None if by_default else model.d_ff
        chosen = msgspec.structs.replace(model, activation=self.settings.activation, d_ff=d_ff)
        excess = _mlp_weights(chosen) / _mlp_weights(gelu_counterpart(chosen)) - 1
        if abs(excess) > _SIZE_TOLERANCE:
            width = msgspec.structs.replace(chosen, d_ff=None).mlp_width
            raise UsageError(
                f"model.d_ff is {model.d_ff}, which gives MLPs with {chosen.activation} {excess:+.0%} parameters: "
                "a comparison of activations needs models of equal size",
                remedy=f"give model.d_ff none, for a width of {width}",
            )
        return config.changed({"model.activation": chosen.activation, "model.d_ff": d_ff})


def _mlp_weights(model: ModelConfig) -> int:
    return (3 if model.gated else 2) * model.d_model * model.mlp_width
