"""Conformance suite of compilation on a GPU, in all modes."""

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
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
