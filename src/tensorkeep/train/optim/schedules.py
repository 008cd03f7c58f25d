"""Learning-rate schedules: the learning rate of each step, as a factor of its peak."""

import math

from tensorkeep.train.config.sections import ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step as a factor of the peak.

    Warm-up is linear. ``"cosine"`` is that of Loshchilov and Hutter (arXiv 1608.03983), without restarts. ``"wsd"``
    (warm-up, stable, decay) is that of Hu et al. (arXiv 2404.06395), with a linear decay. ``"range"`` rises
    exponentially, while the range test of Smith (arXiv 1506.01186) rises linearly; see
    `tensorkeep.train.optim.range_test`.

    Parameters
    ----------
    step : int
        Counted from 1.
    steps : int
        Of the whole run.

    Returns
    -------
    float
        From 0 to 1.

    Examples
    --------
    >>> schedule = ScheduleConfig(name="linear", warmup_steps=2, final=0.0)
    >>> [learning_rate_factor(schedule, step, 7) for step in range(1, 8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    # From 0 in the first step after the warm-up to 1 in the last step.
    done = (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps - 1)
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
    """Lowers the learning rate when the validation loss has stopped improving; its state is part of a checkpoint.

    Parameters
    ----------
    config : ScheduleConfig
        It has no effect unless ``name`` is ``"plateau"``.

    Attributes
    ----------
    factor : float
        By which the learning rate is multiplied now.
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

    def state_dict(self) -> dict[str, float | int]:
        """Return the state."""
        return {"share": self.factor, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore a state that `state_dict` returned."""
        self.factor = float(state["share"])
        self._best = float(state["best"])
        self._waited = int(state["waited"])
