"""Learning-rate schedules as techniques: the rates of the optimizers, on a plateau and in a range test."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from chatgot.optim.schedules import Plateau
from chatgot.step.state import StepState
from chatgot.techniques.learning_rate import LrPlateau, LrRangeTest, PlateauSettings, RangeTestSettings
from chatgot.testing import STEPS, TINY, TechniqueSuite, opened, trained, verified_step
from tensorkeep.errors import TechniqueNotActiveError


class TestPlateau(TechniqueSuite):
    technique = LrPlateau
    variants = ({}, pytest.param({"patience": 1, "factor": 0.1}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
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


def test_plateau_keeps_the_warm_up() -> None:
    config = LrPlateau(PlateauSettings()).configure(TINY.changed({"schedule.warmup_steps": 5}))
    assert (config.schedule.name, config.schedule.warmup_steps) == ("plateau", 5)


class TestRangeTest(TechniqueSuite):
    technique = LrRangeTest
    variants = (pytest.param({}, marks=pytest.mark.exhaustive), {"lowest": 1e-5, "highest": 1e-2})

    def break_on_purpose(self, run: StepState) -> None:
        """Step an optimizer that the schedule does not set."""
        stray = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
        run.operations.update = stray.step

    def test_rates_rise_exponentially_from_the_lowest_to_the_highest(self, data: Path) -> None:
        log = trained(self.config_with({"lowest": 1e-5, "highest": 1e-2}), data) / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
        assert len(rates) == STEPS
        assert (rates[0], rates[-1]) == pytest.approx((1e-5, 1e-2))
        factors = [after / before for before, after in itertools.pairwise(rates)]
        assert factors == pytest.approx([math.exp(math.log(1e3) / (STEPS - 1))] * (STEPS - 1))

    def test_group_with_a_stale_rate_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            optimizer, update = run.optimizers["adamw"], run.operations.update

            def update_with_one_stale_rate() -> None:
                optimizer.param_groups[1]["lr"] = 3e-4
                update()

            run.operations.update = update_with_one_stale_rate
            with pytest.raises(TechniqueNotActiveError, match=r"of 2 groups of parameters, 1 .*0\.0003"):
                verified_step(run)

    def test_rates_are_proved_if_the_update_is_skipped(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            run.operations.accepts = lambda loss, norm: False
            assert verified_step(run)["lr-range-test"]["learning_rates"] == pytest.approx([1e-6])


def test_range_test_drops_the_warm_up() -> None:
    config = LrRangeTest(RangeTestSettings()).configure(TINY.changed({"schedule.warmup_steps": 5}))
    assert config.schedule.warmup_steps == 0
