"""Learning-rate range test: the rate rises exponentially, and what the loss does says which one to train with."""

from __future__ import annotations

from typing import ClassVar

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.scheduled import ScheduleTechnique


class RangeTestSettings(Section, frozen=True):
    """Which rates are tried.

    Attributes
    ----------
    lowest, highest : float
        Learning rates of the first step and the last.
    """

    lowest: float = 1e-6
    highest: float = 1.0

    def __post_init__(self) -> None:
        check_bounds("lowest", self.lowest, above=0)
        check_bounds("highest", self.highest, above=self.lowest)


class RangeTestTechnique(ScheduleTechnique):
    """Smith, arXiv 1506.01186, over the schedule ``"range"``; `tensorkeep.train.optim.range_test` makes the suggestion.

    A run with it is a test and no training: take the rate that it suggests into another run.
    """

    name: ClassVar = "lr-range-test"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "optimizer"
    summary: ClassVar = "raises the learning rate step by step until the loss runs away, and suggests one"
    effect: ClassVar = (
        "a start for tuning at the price of a short run; charge that to what it finds, and compare with a tuned rate"
    )
    reference: ClassVar = "arXiv 1506.01186"
    Settings: ClassVar = RangeTestSettings
    conflicts: ClassVar = {
        "lr-plateau": "each sets the schedule",
        "progressive-length": "the loss would change with the length of the windows, and the test reads the loss",
        "length-curriculum": "the loss would change with the choice of documents, and the test reads the loss",
        "loss-curriculum": "the loss would change with the choice of windows, and the test reads the loss",
    }

    def configure(self, config: Config) -> Config:
        """Set the schedule, and the peak that its shares are of.

        Raises
        ------
        UsageError
            If the optimizer has more than one learning rate.
        """
        if config.optim.name == "muon":
            raise UsageError(
                "lr-range-test finds one learning rate, and muon has two: its own and AdamW's",
                remedy="give optim.name adamw, or leave lr-range-test out",
            )
        return config.changed(
            {
                "optim.lr": self.settings.highest,
                "schedule.name": "range",
                "schedule.final": self.settings.lowest / self.settings.highest,
                "schedule.warmup_steps": 0,
            }
        )
