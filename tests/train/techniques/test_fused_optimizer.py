"""The fused AdamW: that its kernel updates every weight of AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, train_run, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.fused_optimizer import FusedOptimizer


class TestFusedOptimizer(TechniqueSuite):
    technique = FusedOptimizer

    def sabotage(self, run: Run) -> None:
        """Let one group fall back to the implementation that goes weight by weight."""
        group = run.optimizers["adamw"].param_groups[-1]
        group["fused"], group["foreach"] = False, True

    def test_what_muon_leaves_to_adamw_is_fused_too(self, tmp_path: Path, data: Path) -> None:
        config = with_techniques(TINY.changed({"optim.name": "muon"}), {"fused-optimizer": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            weights = sum(len(group["params"]) for group in run.optimizers["adamw"].param_groups)
            assert run.techniques.proofs["fused-optimizer"].figures == {"calls": 2, "weights": weights}
            self.sabotage(run)
            run.techniques.proofs.clear()
            with pytest.raises(TechniqueNotActiveError, match="1 of 2 groups"), run.techniques.verified(run):
                take_step(run)

    def test_another_implementation_is_refused(self, tmp_path: Path, data: Path) -> None:
        config = self.on({}).changed({"optim.implementation": "foreach"})
        with pytest.raises(UsageError, match=r"optim\.implementation is 'foreach'"):
            train_run(config, tmp_path / "run", data)
