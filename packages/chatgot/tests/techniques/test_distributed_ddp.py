"""Distributed data parallel, by one process and by two."""

from pathlib import Path

import pytest

from chatgot.run.state import OpenRun
from chatgot.techniques.ddp import Ddp
from chatgot.testing import opened
from techniques.parallel_suite import ParallelSuite, ProcessRun
from techniques.several_processes import BREAKS, EXACT
from tensorkeep.errors import UsageError

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


class TestDdp(ParallelSuite):
    technique = Ddp
    broken = {"no_sync": "0 were averaged", "gradient": "different gradients"}  # noqa: RUF012
    stepped = {  # noqa: RUF012
        "three batches": {"loop.gradient_accumulation_steps": 3, "loop.batch_size": 2},
        "micro-batches": {"techniques.gradient-accumulation": "on"},
        "odd batches": {"loop.batch_size": 3},
    }

    def break_on_purpose(self, run: OpenRun) -> None:
        """Leave `no_sync` on, which must end with the last batch."""
        BREAKS["no_sync"](run)

    def test_gradients_are_exchanged_once_in_a_step(self, together: ProcessRun, tmp_path: Path, data: Path) -> None:
        _, second = together.results
        with opened(EXACT, tmp_path / "alone", data) as run:
            parameters = sum(each.numel() for each in run.model.parameters())
        assert second["three batches"]["proofs"]["ddp"]["numbers"] == parameters

    def test_rows_are_split_again_by_gradient_accumulation(self, together: ProcessRun) -> None:
        split, whole = (together.results[0][name] for name in ("micro-batches", "verified"))
        assert "proofs" in split, split
        assert split["proofs"]["gradient-accumulation"]["sequences"] == 1
        for name, within in (("loss", 1e-5), ("gradient_norm", 1e-4)):
            assert split["record"][name] == pytest.approx(whole["record"][name], rel=within), name

    def test_odd_batch_size_is_refused(self, together: ProcessRun) -> None:
        for process in together.results:
            error = process["odd batches"]
            assert error["kind"] == UsageError.kind
            assert "3 sequences cannot be split equally among 2 processes" in error["message"]
