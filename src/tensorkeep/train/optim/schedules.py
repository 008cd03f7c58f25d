"""Learning-rate schedules: which share of the peak a step gets, as a function of the step alone."""

from __future__ import annotations

import math

from tensorkeep.train.config.sections import ScheduleConfig


def share(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the share of the peak learning rate for a step.

        Warm-up is linear. ``"cosine"`` is that of Loshchilov and Hutter (arXiv 1608.03983), without restarts;
    ``"wsd"``, warm-up, stable, decay, that of Hu et al. (arXiv 2404.06395), with a linear decay; ``"range"`` rises
    exponentially, as the range test of Smith (arXiv 1506.01186) does linearly; see
    `tensorkeep.train.optim.range_test` for what it finds.

    Parameters
        ----------
        config : ScheduleConfig
        step : int
            Counted from 1.
        steps : int
            Of the whole run.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    # 0 in the first step after the warm-up, 1 in the last of all.
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
    """Lowers the learning rate when the validation loss no longer gets better; its state is part of a checkpoint."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._patience = config.patience
        self._factor = config.factor
        self._on = config.name == "plateau"
        self.share = 1.0
        self._best = math.inf
        self._waited = 0

    def evaluated(self, loss: float) -> None:
        """Learn of a validation loss."""
        if not self._on:
            return
        if loss < self._best:
            self._best, self._waited = loss, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self.share *= self._factor
            self._waited = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return its state."""
        return {"share": self.share, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Take a state that `state_dict` gave."""
        self.share = float(state["share"])
        self._best = float(state["best"])
        self._waited = int(state["waited"])
