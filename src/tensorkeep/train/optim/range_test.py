"""The learning-rate range test: suggests a rate from the losses of a run whose rate rises."""

import math
from dataclasses import dataclass

_SMOOTHED_OVER = 0.05
"""The fraction of the test over which the loss is smoothed: less is noisy, more notices a rise too late."""

_RAN_AWAY = 4.0
"""The test ends when the smoothed loss is this many times its lowest value, as in fastai: the weights diverged."""

_ROSE = 1.1
"""The lowest loss counts as a minimum once the smoothed loss has risen to this many times it."""

_SAFETY = 10.0


@dataclass
class RangeTest:
    """Records the loss while the learning rate rises (Smith, arXiv 1506.01186); its fields are part of a checkpoint.

    It suggests a tenth of the rate at which the smoothed loss was lowest, the rule that fastai calls ``"minimum"``:
    at the minimum, training is about to become unstable, and a run takes many more steps at its peak rate.

    Attributes
    ----------
    steps : int
        Losses so far.
    smoothed : float
        Their exponential moving average.
    lowest, lowest_rate : float
        The lowest smoothed loss, and the learning rate of its step.
    over : bool
        Whether the loss has diverged, so that higher rates need not be tried.
    """

    steps: int = 0
    smoothed: float = 0.0
    lowest: float = math.inf
    lowest_rate: float = 0.0
    over: bool = False

    def add(self, rate: float, loss: float, *, steps: int) -> None:
        """Add a step.

        Parameters
        ----------
        rate, loss : float
            The learning rate and the loss of the step.
        steps : int
            The number of steps of the whole test.
        """
        if not math.isfinite(loss):
            self.over = True
            return
        self.steps += 1
        self.smoothed += (loss - self.smoothed) * max(1 / self.steps, min(1.0, 1 / (_SMOOTHED_OVER * steps)))
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_rate = self.smoothed, rate
        self.over = self.smoothed > _RAN_AWAY * self.lowest

    def suggestion(self) -> float | None:
        """Return the learning rate to train with; None if the loss never rose, so that higher rates must be tried."""
        if not self.steps or not (self.over or self.smoothed > _ROSE * self.lowest):
            return None
        return self.lowest_rate / _SAFETY
