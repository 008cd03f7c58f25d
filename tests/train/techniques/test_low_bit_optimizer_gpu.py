"""Conformance suite of the low-bit AdamW on a GPU, compiled."""

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.optim.optimizers import build_optimizers
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.low_bit_optimizer import LowBitOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


class TestLowBitOptimizerOnCuda(TechniqueSuite):
    technique = LowBitOptimizer
    config = TINY.changed({"loop.device": "cuda"})
    variants = ({}, {"bits": 4})

    def break_on_purpose(self, run: Run) -> None:
        """Fall back to torch's optimizer."""
        run.optimizers["adamw"] = build_optimizers(run.model, run.config.optim)["adamw"]
