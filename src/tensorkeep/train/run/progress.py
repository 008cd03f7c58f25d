"""Where a run stands: how far it is, and how well it did so far."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorkeep.train.optim.range_test import RangeTest


@dataclass
class Progress:
    """Where a run stands; all of it is part of a checkpoint.

    Attributes
    ----------
    step : int
        Steps that are done.
    tokens : int
        That the run has been trained on.
    best : float
        The best validation loss so far.
    waited : int
        Evaluations since then.
    loss : float
        The last validation loss; infinite before the first.
    skipped : int
        Updates that were skipped because the loss or the gradient was not finite.
    skipped_in_a_row : int
        Those since the last update that was made.
    range_test : RangeTest
        What a range test has seen; nothing with another schedule.
    """

    step: int = 0
    tokens: int = 0
    best: float = math.inf
    waited: int = 0
    loss: float = math.inf
    skipped: int = 0
    skipped_in_a_row: int = 0
    range_test: RangeTest = field(default_factory=RangeTest)

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        vars(self).update({**state, "range_test": RangeTest(**state["range_test"])})
