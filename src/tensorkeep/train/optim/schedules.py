"""Learning-rate schedules: the rate of each step as a factor of its peak, and the range test that suggests a peak."""

import math
from dataclasses import dataclass

from tensorkeep.train.config.sections import ScheduleConfig

_SMOOTHED_OVER = 0.05
"""The fraction of the test over which the loss is smoothed: less is noisy, more notices a rise too late."""

_DIVERGED_RATIO = 4.0
"""The test ends when the smoothed loss is this many times its lowest value, as in fastai: the weights diverged."""

_MINIMUM_RATIO = 1.1
"""The lowest loss counts as a minimum once the smoothed loss has risen to this many times it."""

_SAFETY = 10.0


def learning_rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step as a factor of the peak.

    Warm-up is linear. ``"cosine"`` is that of Loshchilov and Hutter (arXiv 1608.03983), without restarts. ``"wsd"``
    (warm-up, stable, decay) is that of Hu et al. (arXiv 2404.06395), with a linear decay. ``"range"`` rises
    exponentially, while the range test of Smith (arXiv 1506.01186) rises linearly; see `RangeTest`. Steps count from 1.
    The schedule covers those after ``config.start``.

    A decay reaches ``final`` in the last step, but 0 one step later: a step at rate 0 would change nothing.

    Examples
    --------
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
    done = min(done, 1.0)
    if config.name == "cosine":
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done))
    if config.name == "linear":
        return 1 - (1 - config.final) * done
    if config.name == "wsd":
        decayed = max(0.0, (done - (1 - config.decay)) / config.decay)
        return 1 - (1 - config.final) * decayed
    if config.name == "range":
        return float(config.final ** (1 - done))
    return 1.0


class Plateau:
    """Lowers ``factor``, by which the learning rate is multiplied, when the validation loss has stopped improving.

    Its state is part of a checkpoint. It has no effect on schedules other than ``"plateau"``.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._patience = config.patience
        self._reduction = config.factor
        self._on = config.name == "plateau"
        self.factor = 1.0
        self._best = math.inf
        self._waited = 0

    def add(self, loss: float) -> None:
        """Add the loss of an evaluation."""
        if not self._on:
            return
        if loss < self._best:
            self._best, self._waited = loss, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self.factor *= self._reduction
            self._waited = 0

    def forget_losses(self) -> None:
        """Wait from now on for losses of other data, with the factor as it is."""
        self._best, self._waited = math.inf, 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the state."""
        return {"share": self.factor, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore a state that `state_dict` returned."""
        self.factor = float(state["share"])
        self._best = float(state["best"])
        self._waited = int(state["waited"])


@dataclass
class RangeTest:
    """Records the loss while the learning rate rises (Smith, arXiv 1506.01186); its fields are part of a checkpoint.

    It suggests a tenth of the rate at which the smoothed loss was lowest, the rule that fastai calls ``"minimum"``:
    at the minimum, training is about to become unstable, and a run takes many more steps at its peak rate. The test is
    over when the loss has diverged, so that higher rates need not be tried.
    """

    steps: int = 0
    smoothed: float = 0.0
    lowest: float = math.inf
    lowest_rate: float = 0.0
    over: bool = False

    def add(self, rate: float, loss: float, *, steps: int) -> None:
        """Add the learning rate and the loss of one of the ``steps`` of the test."""
        if not math.isfinite(loss):
            self.over = True
            return
        self.steps += 1
        self.smoothed += (loss - self.smoothed) * max(1 / self.steps, min(1.0, 1 / (_SMOOTHED_OVER * steps)))
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_rate = self.smoothed, rate
        self.over = self.smoothed > _DIVERGED_RATIO * self.lowest

    def suggestion(self) -> float | None:
        """Return the learning rate to train with; None if the loss never rose, so that higher rates must be tried."""
        if not self.steps or not (self.over or self.smoothed > _MINIMUM_RATIO * self.lowest):
            return None
        return self.lowest_rate / _SAFETY
