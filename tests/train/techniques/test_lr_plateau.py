"""The plateau schedule as a technique: the learning rates of the optimizers."""

from pathlib import Path

import pytest
import torch

from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, opened, verified_step
from tensorkeep.train.optim.schedules import Plateau
from tensorkeep.train.step.state import Run
from tensorkeep.train.techniques.learning_rate import LrPlateau, PlateauSettings


class TestPlateau(TechniqueSuite):
    technique = LrPlateau
    variants = ({}, pytest.param({"patience": 1, "factor": 0.1}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: Run) -> None:
        """Step an optimizer that the schedule does not set."""
        stray = torch.optim.AdamW(run.model.parameters(), lr=3e-4)
        run.operations.update = stray.step

    def test_rate_is_lowered_after_evaluations_without_improvement(self, tmp_path: Path, data: Path) -> None:
        config = self.config_with({"patience": 2, "factor": 0.25})
        with opened(config, tmp_path / "run", data) as run:
            for loss in (3.0, 3.0, 3.0):
                run.plateau.add(loss)
            figures = verified_step(run)["lr-plateau"]
            assert figures["share_of_peak"] == 0.25
            assert figures["learning_rates"] == pytest.approx([0.25 * config.optim.lr])

    def test_schedule_that_ignores_evaluations_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            run.plateau = Plateau(TINY.schedule)
            with pytest.raises(TechniqueNotActiveError, match="from 1 of its peak to 1"):
                verified_step(run)

    def test_muon_has_its_own_rate(self, tmp_path: Path, data: Path) -> None:
        config = self.config_with({}).changed({"optim.name": "muon"})
        with opened(config, tmp_path / "run", data) as run:
            rates = verified_step(run)["lr-plateau"]["learning_rates"]
            assert rates == sorted([config.optim.lr, config.optim.muon_lr])


def test_warm_up_is_kept() -> None:
    config = LrPlateau(PlateauSettings()).configure(TINY.changed({"schedule.warmup_steps": 5}))
    assert (config.schedule.name, config.schedule.warmup_steps) == ("plateau", 5)
