"""Distributed data parallel, by one process and by two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.ddp import Ddp
from train.techniques.several_processes import EXACT, TAMPER
from train.techniques.together_suite import TogetherSuite, Two


class TestDdp(TogetherSuite):
    technique = Ddp
    tampered = {"no_sync": "0 numbers were averaged", "gradient": "different gradients"}  # noqa: RUF012
    stepped = {  # noqa: RUF012
        "three batches": {"loop.accumulate": 3, "loop.batch_size": 2},
        "divided batches": {"techniques.gradient-accumulation": "on"},
        "odd batches": {"loop.batch_size": 3},
    }

    def sabotage(self, run: Run) -> None:
        """Leave `no_sync` on, which was to hold for all but the last batch."""
        TAMPER["no_sync"](run)

    def test_gradients_are_exchanged_once_for_several_batches(self, two: Two, tmp_path: Path, data: Path) -> None:
        _, (_, second) = two
        seen = second["three batches"]["proofs"]["ddp"]
        assert seen["numbers"] == _parameters(tmp_path / "alone", data)

    def test_it_divides_what_gradient_accumulation_divides(self, two: Two) -> None:
        _, (first, _) = two
        parts, whole = first["divided batches"], first["watched"]
        assert "proofs" in parts, parts
        assert parts["proofs"]["gradient-accumulation"]["sequences"] == 1
        assert parts["record"]["loss"] == pytest.approx(whole["record"]["loss"], rel=1e-5)
        assert parts["record"]["gradient_norm"] == pytest.approx(whole["record"]["gradient_norm"], rel=1e-4)

    def test_a_batch_that_does_not_divide_is_refused(self, two: Two) -> None:
        _, said = two
        for process in said:
            refused = process["odd batches"]
            assert refused["kind"] == UsageError.kind
            assert "3 sequences does not divide among 2 processes" in refused["message"]


def _parameters(folder: Path, data: Path) -> int:
    with open_run(EXACT, RunFolder(folder), Dataset.open(data)) as run:
        return sum(each.numel() for each in run.model.parameters())
