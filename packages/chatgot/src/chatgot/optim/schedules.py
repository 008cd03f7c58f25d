"""Learning-rate schedules, the entries of `SCHEDULES`, and the range test that suggests a peak."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from chatgot.settings import Count, Fraction, Section, Steps
from tensorkeep.errors import UsageError

# The fraction of the test over which the loss is smoothed: less is noisy, more notices a rise too late.
_SMOOTHED_OVER = 0.05
# The test ends when the smoothed loss is this many times its lowest value, as in fastai: the weights diverged.
_DIVERGED_RATIO = 4.0
# The lowest loss counts as a minimum once the smoothed loss has risen to this many times it.
_MINIMUM_RATIO = 1.1
# A single loss that is so many times the lowest average is more than an effect of its batch.
_JUMP_RATIO = 2.0
_SAFETY = 10.0


class Schedule(NamedTuple):
    """The rate after the warm-up as a factor of the peak.

    ``factor`` takes the settings, and the fraction of the steps after the warm-up that is done: 0 in the first step, 1
    in the last one. ``uses`` names the settings that it reads; ``decays`` states that it ends below the peak.
    """

    factor: Callable[["ScheduleConfig", float], float]
    uses: tuple[str, ...] = ()
    decays: bool = False


def _wsd(config: "ScheduleConfig", done: float) -> float:
    decayed = max(0.0, (done - (1 - config.decay)) / config.decay)
    return 1 - (1 - config.final) * decayed


SCHEDULES: dict[str, Schedule] = {
    # Loshchilov and Hutter (arXiv 1608.03983), without restarts.
    "cosine": Schedule(
        lambda config, done: config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done)),
        uses=("final",),
        decays=True,
    ),
    "linear": Schedule(lambda config, done: 1 - (1 - config.final) * done, uses=("final",), decays=True),
    # Warm-up, stable, decay: Hu et al. (arXiv 2404.06395), with a linear decay.
    "wsd": Schedule(_wsd, uses=("final", "decay"), decays=True),
    "constant": Schedule(lambda config, done: 1.0),
    # `Plateau` lowers the rate.
    "plateau": Schedule(lambda config, done: 1.0, uses=("patience", "factor")),
    # Rises exponentially; the range test of Smith (arXiv 1506.01186) rises linearly.
    "range": Schedule(lambda config, done: float(config.final ** (1 - done)), uses=("final",)),
}


class ScheduleConfig(Section, frozen=True):
    """How the learning rate changes."""

    aliases: ClassVar = {
        "scheduler": "name",
        "lr_scheduler": "name",
        "warmup": "warmup_steps",
        "warmup_iters": "warmup_steps",
        "min_lr": "final",
    }

    # ``"cosine"``, ``"linear"``, ``"wsd"`` (warm-up, stable, decay), ``"constant"``, ``"plateau"``, or ``"range"``: a
    # range test, which rises from ``final`` to the peak, ends early when the loss diverges, and suggests a tenth of the
    # rate with the lowest smoothed loss.
    name: Literal[tuple(SCHEDULES)] = "cosine"  # type: ignore[valid-type]
    # The step after which the schedule begins: it covers the steps from there to ``loop.steps``, warm-up included.
    start: Steps = 0
    # Steps of the rise from 0.
    warmup_steps: Steps = 0
    # The rate of the last step as a fraction of the peak; for ``"range"``, the rate of the first step. 0 is reached one
    # step after the last one, so that the last step still changes the weights.
    final: Annotated[float, Meta(ge=0, le=1)] = 0.1
    # For ``"wsd"``: the fraction of the steps that decay.
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.2
    # For ``"plateau"``: after this many evaluations without a better loss, the rate is multiplied by the factor.
    patience: Count = 3
    factor: Fraction = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "range" and not self.final:
            raise UsageError("schedule.final is 0", remedy="a range test begins above 0: give 0.001, for example")
        if self.name == "range" and self.warmup_steps:
            raise UsageError(
                f"schedule.warmup_steps is {self.warmup_steps}, and a range test has no warm-up",
                remedy="give schedule.warmup_steps 0",
            )


def learning_rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step as a factor of the peak; warm-up is linear.

    Steps count from 1. A decay reaches ``final`` in the last step, but 0 one step later: a step at rate 0 would change
    nothing.

    >>> schedule = ScheduleConfig(name="linear", warmup_steps=2, final=0.0)
    >>> [round(learning_rate_factor(schedule, step, 7), 2) for step in range(1, 8)]
    [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    """
    step, steps = step - config.start, steps - config.start
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    # From 0 in the first step after the warm-up to 1 in the last step, or in the one after it.
    end = steps if config.final else steps + 1
    done = (step - config.warmup_steps - 1) / max(1, end - config.warmup_steps - 1)
    return SCHEDULES[config.name].factor(config, min(done, 1.0))


class Plateau:
    """Lowers ``factor`` of the learning rate when the validation loss stops improving, if the schedule is "plateau"."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._patience = config.patience
        self._reduction = config.factor
        self._on = config.name == "plateau"
        self.factor = 1.0
        self._best = math.inf
        self._waited = 0

    def add(self, loss: float) -> None:
        if not self._on:
            return
        if loss < self._best:
            self._best, self._waited = loss, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            # The product of all reductions so far.
            self.factor *= self._reduction
            self._waited = 0

    def forget_losses(self) -> None:
        """Wait from now on for losses of other data, with the factor as it is."""
        self._best, self._waited = math.inf, 0

    def state_dict(self) -> dict[str, float | int]:
        # "share" is the key in checkpoints; it is the factor.
        return {"share": self.factor, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.factor = float(state["share"])
        self._best = float(state["best"])
        self._waited = int(state["waited"])


@dataclass
class RangeTest:
    """Records the loss while the learning rate rises (Smith, arXiv 1506.01186), and suggests a rate to train with."""

    # All fields are part of a checkpoint.
    steps: int = 0
    smoothed: float = 0.0
    lowest: float = math.inf
    lowest_rate: float = 0.0
    over: bool = False
    last: float = 0.0

    def add(self, rate: float, loss: float, *, steps: int) -> None:
        """Add the learning rate and the loss of one of the ``steps`` of the test."""
        if not math.isfinite(loss):
            self.over = True
            return
        self.steps += 1
        # The mean of the first losses, then an exponential average.
        self.smoothed += (loss - self.smoothed) * max(1 / self.steps, min(1.0, 1 / (_SMOOTHED_OVER * steps)))
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_rate = self.smoothed, rate
        self.last = loss
        # Higher rates need not be tried once the loss has diverged. In a long test, the average follows a loss that
        # jumps only after many steps.
        self.over = max(self.smoothed, loss) > _DIVERGED_RATIO * self.lowest

    def suggestion(self) -> float | None:
        """Return the learning rate to train with; None if the loss never rose, or was not finite from the beginning."""
        rose = self.smoothed > _MINIMUM_RATIO * self.lowest or self.last > _JUMP_RATIO * self.lowest
        if not self.steps or not (self.over or rose):
            return None
        # A tenth, the rule that fastai calls "minimum": at the minimum, training is about to become unstable, and a run
        # takes many more steps at its peak rate.
        return self.lowest_rate / _SAFETY
