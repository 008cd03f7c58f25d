"""Distributed data parallel, by one process and by two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.train.data.dataset import Dataset
from holdfast.train.run import Run, open_run
from holdfast.train.run_folder import RunFolder
from holdfast.train.techniques.ddp import Ddp

sys.path.insert(0, str(Path(__file__).parent))
from several_processes import EXACT, TAMPER, task, trained_by
from together_suite import TogetherSuite


class TestDdp(TogetherSuite):
    technique = Ddp
    tampered = {"no_sync": "0 numbers were averaged", "gradient": "different gradients"}  # noqa: RUF012

    def sabotage(self, run: Run) -> None:
        """Leave `no_sync` on, which was to hold for all but the last batch."""
        TAMPER["no_sync"](run)

    def test_gradients_are_exchanged_once_for_several_batches(self, tmp_path: Path, data: Path) -> None:
        config = self.together(EXACT.changed({"loop.accumulate": 3, "loop.batch_size": 2}))
        _, second = trained_by(2, [task("step", config, tmp_path / "run", data)], tmp_path)
        seen = second[0]["proofs"]["ddp"]
        assert seen["numbers"] == _parameters(tmp_path / "alone", data)

    def test_it_divides_what_gradient_accumulation_divides(self, tmp_path: Path, data: Path) -> None:
        config = self.together(EXACT.changed({"techniques.gradient-accumulation": "on"}))
        plain = self.together(EXACT)
        tasks = [task("step", config, tmp_path / "parts", data), task("step", plain, tmp_path / "whole", data)]
        parts, whole = trained_by(2, tasks, tmp_path)[0]
        assert "proofs" in parts, parts
        assert parts["proofs"]["gradient-accumulation"]["sequences"] == 1
        assert parts["record"]["loss"] == pytest.approx(whole["record"]["loss"], rel=1e-5)
        assert parts["record"]["gradient_norm"] == pytest.approx(whole["record"]["gradient_norm"], rel=1e-4)

    def test_a_batch_that_does_not_divide_is_refused(self, tmp_path: Path, data: Path) -> None:
        config = self.together(EXACT.changed({"loop.batch_size": 3}))
        for said in trained_by(2, [task("step", config, tmp_path / "run", data)], tmp_path):
            assert said[0]["kind"] == UsageError.kind
            assert "3 sequences does not divide among 2 processes" in said[0]["message"]


def _parameters(folder: Path, data: Path) -> int:
    with open_run(EXACT, RunFolder(folder), Dataset.open(data)) as run:
        return sum(each.numel() for each in run.model.parameters())
