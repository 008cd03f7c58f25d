"""Fused AdamW on a GPU: conformance suite, also with float16, whose first update is skipped."""

from pathlib import Path

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, losses, train_run, with_techniques
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.config_switch import FusedOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


class TestFusedOptimizerOnCuda(TechniqueSuite):
    technique = FusedOptimizer
    config = TINY.changed({"loop.device": "cuda"})

    def break_on_purpose(self, run: Run) -> None:
        """Make one group use the implementation with many kernels."""
        group = run.optimizers["adamw"].param_groups[-1]
        group["fused"], group["foreach"] = False, True

    def test_it_works_with_a_scaler(self, tmp_path: Path, data: Path) -> None:
        both = {"fused-optimizer": {}, "mixed-precision": {"dtype": "fp16"}}
        train_run(with_techniques(self.config, both), tmp_path / "run", data)
        assert losses(tmp_path / "run")[-1][0] == self.config.loop.steps
