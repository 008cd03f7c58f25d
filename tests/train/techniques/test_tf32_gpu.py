"""Conformance suite of TF32 on a GPU."""

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.tf32 import Tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


class TestTf32(TechniqueSuite):
    technique = Tf32
    # Without dropout, whose kernels may draw other numbers.
    config = TINY.changed({"loop.device": "cuda", "model.dropout": 0})

    def break_on_purpose(self, run: Run) -> None:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
