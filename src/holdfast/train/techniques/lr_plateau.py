"""Learning rate on a plateau: lowered when the validation loss no longer gets better."""

from __future__ import annotations

from typing import ClassVar

from holdfast.train.bounds import check_bounds
from holdfast.train.config import Config
from holdfast.train.sections import Section
from holdfast.train.techniques.scheduled import ScheduleTechnique


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
    """`holdfast.train.schedules.Plateau`, as in ``torch.optim.lr_scheduler.ReduceLROnPlateau``."""

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
