"""Learning rate on a plateau: lowered when the validation loss no longer gets better."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof
from tensorkeep.train.techniques.scheduled import ScheduleTechnique

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class PlateauSettings(Section, frozen=True):
    """When the rate is lowered, and by how much.

    Attributes
    ----------
    patience : int
        Evaluations without a better validation loss.
    factor : float
        What the rate is multiplied by.
    """

    patience: int = 3
    factor: float = 0.5

    def __post_init__(self) -> None:
        check_bounds("patience", self.patience, least=1)
        check_bounds("factor", self.factor, above=0, below=1)


class PlateauTechnique(ScheduleTechnique):
    """`tensorkeep.train.optim.schedules.Plateau`, as in ``torch.optim.lr_scheduler.ReduceLROnPlateau``."""

    name: ClassVar = "lr-plateau"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "optimizer"
    summary: ClassVar = "lowers the learning rate whenever the validation loss has stopped getting better"
    effect: ClassVar = (
        "a schedule for runs whose length is not known; with a known length a tuned cosine is the baseline to beat"
    )
    reference: ClassVar = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    Settings: ClassVar = PlateauSettings

    def configure(self, config: Config) -> Config:
        """Set the schedule; a warm-up stays.

        Raises
        ------
        UsageError
            If the run is never evaluated.
        """
        return config.changed(
            {
                "schedule.name": "plateau",
                "schedule.patience": self.settings.patience,
                "schedule.factor": self.settings.factor,
            }
        )

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See the rates, and what a copy of the schedule makes of evaluations that are no better."""
        with super().verify(run) as proof:
            yield proof
        before, tried = run.plateau.factor, copy.deepcopy(run.plateau)
        for _ in range(self.settings.patience):
            tried.add(math.inf)
        if not math.isclose(tried.factor, before * self.settings.factor):
            raise self.not_active(
                f"{self.settings.patience} evaluations that were no better would bring the learning rate from "
                f"{before:g} of its peak to {tried.factor:g}",
                "report it, with the other techniques that are on",
            )
