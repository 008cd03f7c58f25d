"""The range test as a technique: the rates that optimizers get, and what it cannot be combined with."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import STEPS, TINY, TechniqueSuite, train_run, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.lr_range_test import RangeTestSettings, RangeTestTechnique
from tensorkeep.train.techniques.stack import Stack


class TestRangeTest(TechniqueSuite):
    technique = RangeTestTechnique
    variants = ({}, {"lowest": 1e-5, "highest": 1e-2})

    def sabotage(self, run: Run) -> None:
        """Let an optimizer step that the schedule does not know: built anew, and put in place too late."""
        stray = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
        run.operations.update = stray.step

    def test_rates_rise_by_the_same_factor_from_the_lowest_to_the_highest(self, tmp_path: Path, data: Path) -> None:
        train_run(self.on({"lowest": 1e-5, "highest": 1e-2}), tmp_path, data)
        lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
        assert len(rates) == STEPS
        assert rates[0] == pytest.approx(1e-5)
        assert rates[-1] == pytest.approx(1e-2)
        factors = [after / before for before, after in itertools.pairwise(rates)]
        assert factors == pytest.approx([math.exp(math.log(1e3) / (STEPS - 1))] * (STEPS - 1))

    def test_a_group_that_keeps_its_own_rate_is_caught(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            optimizer, update = run.optimizers["adamw"], run.operations.update

            def update_with_one_stale_rate() -> None:
                optimizer.param_groups[1]["lr"] = 3e-4
                update()

            run.operations.update = update_with_one_stale_rate
            with (
                pytest.raises(TechniqueNotActiveError, match=r"of 2 groups of parameters, 1 .*0\.0003"),
                run.techniques.verified(run),
            ):
                take_step(run)

    def test_where_the_update_is_skipped_the_rates_are_seen_all_the_same(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            run.operations.accepts = lambda loss, norm: False
            with run.techniques.verified(run):
                take_step(run)
            assert run.techniques.proofs["lr-range-test"].figures["learning_rates"] == pytest.approx([1e-6])


def test_it_finds_one_rate_and_muon_has_two() -> None:
    with pytest.raises(UsageError, match="muon has two"):
        RangeTestTechnique(RangeTestSettings()).configure(TINY.changed({"optim.name": "muon"}))


def test_the_lowest_rate_must_be_below_the_highest() -> None:
    with pytest.raises(UsageError, match=r"highest is 0\.1"):
        RangeTestSettings(lowest=0.1, highest=0.1)


def test_a_warm_up_is_dropped() -> None:
    config = RangeTestTechnique(RangeTestSettings()).configure(TINY.changed({"schedule.warmup_steps": 5}))
    assert config.schedule.warmup_steps == 0


def test_two_techniques_that_set_the_schedule_conflict() -> None:
    both = with_techniques(TINY, {"lr-range-test": {}, "lr-plateau": {}})
    with pytest.raises(UsageError, match="each sets the schedule"):
        Stack.of(both.techniques)
