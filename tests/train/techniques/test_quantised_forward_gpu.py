"""Quantised forward in float8, which only some GPUs support."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, losses, train_run, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.quantised_forward import QuantisedForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


class TestFloat8(TechniqueSuite):
    technique = QuantisedForward
    variants = ({"mode": "float8"},)
    config = with_techniques(
        TINY.changed({"loop.device": "cuda", "model.d_model": 64, "model.context_length": 64}), {"compile": {}}
    )

    def config_with(self, variant: Mapping[str, Any]) -> Config:
        return with_techniques(self.config, {"quantised-forward": variant})

    def break_on_purpose(self, run: Run) -> None:
        """Restore the plain layer in one place."""
        mlp: Any = run.model.blocks[0].mlp
        up = nn.Linear(mlp.up.in_features, mlp.up.out_features, device="meta")
        up.weight, up.bias = mlp.up.weight, mlp.up.bias
        mlp.up = up

    def test_losses_are_close_to_float32(self, tmp_path: Path, data: Path) -> None:
        train_run(self.config, tmp_path / "plain", data)
        train_run(self.config_with({"mode": "float8"}), tmp_path / "float8", data)
        plain, found = ([loss for *_, loss in losses(tmp_path / name)] for name in ("plain", "float8"))
        assert found != plain
        assert found == pytest.approx(plain, rel=0.03)
