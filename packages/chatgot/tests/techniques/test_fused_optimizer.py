"""Fused AdamW: its kernel updates every weight of AdamW."""

from pathlib import Path

import pytest

from chatgot.step.state import StepState
from chatgot.techniques.fused_optimizer import FusedOptimizer
from chatgot.testing import TINY, TechniqueSuite, opened, verified_step, with_techniques
from tensorkeep.errors import TechniqueNotActiveError


class TestFusedOptimizer(TechniqueSuite):
    technique = FusedOptimizer

    def break_on_purpose(self, run: StepState) -> None:
        """Make one group use the implementation for single weights."""
        group = run.optimizers["adamw"].param_groups[-1]
        group["fused"], group["foreach"] = False, True

    def test_adamw_beside_muon_is_fused(self, tmp_path: Path, data: Path) -> None:
        config = with_techniques(TINY.changed({"optim.name": "muon"}), {"fused-optimizer": {}})
        with opened(config, tmp_path / "run", data) as run:
            verified_step(run)
            weights = sum(len(group["params"]) for group in run.optimizers["adamw"].param_groups)
            assert run.techniques.proofs["fused-optimizer"].figures == {"calls": 2, "weights": weights}
            self.break_on_purpose(run)
            run.techniques.proofs.clear()
            with pytest.raises(TechniqueNotActiveError, match="1 of 2 groups"):
                verified_step(run)
