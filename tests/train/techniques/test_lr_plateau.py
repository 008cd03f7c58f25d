"""The plateau schedule as a technique: the rates that optimizers get, before and after it was lowered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.optim.schedules import Plateau
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.lr_plateau import PlateauSettings, PlateauTechnique


class TestPlateau(TechniqueSuite):
    technique = PlateauTechnique
    variants = ({}, {"patience": 1, "factor": 0.1})

    def sabotage(self, run: Run) -> None:
        """Let an optimizer step that the schedule does not know."""
        stray = torch.optim.AdamW(run.model.parameters(), lr=3e-4)
        run.operations.update = stray.step

    def test_the_rate_is_lowered_after_evaluations_that_were_no_better(self, tmp_path: Path, data: Path) -> None:
        config = self.on({"patience": 2, "factor": 0.25})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            for loss in (3.0, 3.0, 3.0):
                run.plateau.add(loss)
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["lr-plateau"].figures
            assert figures["share_of_peak"] == 0.25
            assert figures["learning_rates"] == pytest.approx([0.25 * config.optim.lr])

    def test_a_schedule_that_takes_no_notice_of_evaluations_is_caught(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            run.plateau = Plateau(TINY.schedule)
            with pytest.raises(TechniqueNotActiveError, match="from 1 of its peak to 1"), run.techniques.verified(run):
                take_step(run)

    def test_muon_has_a_rate_of_its_own(self, tmp_path: Path, data: Path) -> None:
        config = self.on({}).changed({"optim.name": "muon"})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            rates = run.techniques.proofs["lr-plateau"].figures["learning_rates"]
            assert rates == sorted([config.optim.lr, config.optim.muon_lr])


def test_a_run_that_is_never_evaluated_has_no_plateau() -> None:
    with pytest.raises(UsageError, match=r"eval\.every is 0"):
        PlateauTechnique(PlateauSettings()).configure(TINY.changed({"eval.every": 0}))


def test_a_warm_up_stays() -> None:
    config = PlateauTechnique(PlateauSettings()).configure(TINY.changed({"schedule.warmup_steps": 5}))
    assert (config.schedule.name, config.schedule.warmup_steps) == ("plateau", 5)


@pytest.mark.parametrize("settings", [{"patience": 0}, {"factor": 1.0}, {"factor": 0.0}])
def test_settings_have_bounds(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        PlateauSettings(**settings)  # type: ignore[arg-type]
