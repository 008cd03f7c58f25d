"""Conformance suite of compilation on a GPU, in all modes."""

from pathlib import Path

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, opened, verified_step, with_techniques
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.compile import Compile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ONE_BATCH = TINY.changed({"loop.device": "cuda", "loop.accumulate": 1})


class TestCompile(TechniqueSuite):
    technique = Compile
    variants = ({}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"fullgraph": True})
    config = ONE_BATCH

    def break_on_purpose(self, run: Run) -> None:
        run.operations.loss = run.model.loss


class TestCompileOfSeveralBatches(TechniqueSuite):
    technique = Compile
    variants = ({}, {"mode": "max-autotune"})
    config = TINY.changed({"loop.device": "cuda"})

    def break_on_purpose(self, run: Run) -> None:
        run.operations.loss = run.model.loss


def test_proof_takes_no_more_memory_than_later_steps(tmp_path: Path, data: Path) -> None:
    """A whole batch in plain Python would need what a run without compilation needs."""
    wide = {"model.vocab_size": 8192, "model.context_length": 256, "loop.batch_size": 64, "loop.accumulate": 1}
    config = with_techniques(ONE_BATCH.changed(wide), {"compile": {}, "fused-optimizer": {}})
    with opened(config, tmp_path / "run", data) as run:
        peaks = []
        for step in (verified_step, take_step):
            torch.cuda.reset_peak_memory_stats()
            step(run)  # type: ignore[operator]
            peaks.append(torch.cuda.max_memory_allocated())
        assert peaks[0] < 1.1 * peaks[1]
