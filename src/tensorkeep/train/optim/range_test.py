"""The learning-rate range test: what the loss did while the rate rose, and which rate that speaks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SMOOTHED_OVER = 0.05
"""Of the test: a few batches say little, and much more than this would see the loss rise long after it did."""

_RAN_AWAY = 4.0
"""The test is over when the smoothed loss is so many times its lowest, as in fastai's: weights do not come back."""

_ROSE = 1.1
"""The lowest loss is known to be the lowest once the smoothed loss is so many times as high."""

_SAFETY = 10.0


@dataclass
class RangeTest:
    """Watches the loss while the learning rate rises (Smith, arXiv 1506.01186); its fields are part of a checkpoint.

    It suggests a tenth of the rate at which the smoothed loss was lowest, the rule that fastai calls ``"minimum"``:
    where the loss is lowest training is about to become unstable, and a whole run takes many more steps at its peak.

    Attributes
    ----------
    steps : int
        Losses that were seen.
    smoothed : float
        A running mean of them, which forgets.
    lowest, lowest_rate : float
        The lowest smoothed loss, and the learning rate of its step.
    over : bool
        Whether the loss has run away, so that higher rates need no trying.
    """

    steps: int = 0
    smoothed: float = 0.0
    lowest: float = math.inf
    lowest_rate: float = 0.0
    over: bool = False

    def add(self, rate: float, loss: float, *, steps: int) -> None:
        """Learn of a step.

        Parameters
        ----------
        rate, loss : float
            Of the step.
        steps : int
            Of the whole test.
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
        """Return the learning rate to train with; None if the loss never rose, so that higher rates are to be tried."""
        if not self.steps or not (self.over or self.smoothed > _ROSE * self.lowest):
            return None
        return self.lowest_rate / _SAFETY
