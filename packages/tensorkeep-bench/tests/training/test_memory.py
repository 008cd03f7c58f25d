"""The peak memory of a step: every tensor counts while it exists, and the memory ledger predicts it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.config.recipes import RECIPES
from chatgot.data.dataset import Dataset
from chatgot.memory import live_bytes, predict
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step.train_step import take_step
from tensorkeep_bench.training.cell import step_peak
from tensorkeep_bench.training.workload import arm_config
from tiny_training import CONFIG, prepared

MIB = 1 << 20


def allocate(*mebibytes: int) -> None:
    for size in mebibytes:
        torch.empty(size * MIB, dtype=torch.uint8)


def test_peak_is_that_of_tensors_that_exist_together() -> None:
    before = step_peak(lambda: None)
    assert step_peak(lambda: allocate(1, 3, 2)) == before + 3 * MIB
    kept = torch.empty(5 * MIB, dtype=torch.uint8)
    assert step_peak(lambda: allocate(3)) == before + 8 * MIB
    del kept
    assert step_peak(lambda: None) == before
    # Tensors that share storage count once.
    before = live_bytes()
    whole = torch.zeros(MIB, dtype=torch.uint8)
    views = [whole[:10], whole.view(2, -1), whole.view(torch.int32)]
    assert live_bytes() == before + MIB
    del whole, views


WIDE = {"model.d_model": 64, "model.n_layers": 4, "model.context_length": 64, "model.dropout": 0.0}
ARMS = [{}, {"techniques.activation-checkpointing": "on"}, {"techniques.gradient-accumulation.batches": 3}]


@pytest.mark.parametrize("arm", ARMS, ids=["plain", "activation-checkpointing", "gradient-accumulation"])
def test_a_step_takes_the_memory_that_the_ledger_predicts(arm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(RECIPES, "wide", lambda: CONFIG.changed({"data.tokenizer": "char", **WIDE}))
    dataset = Dataset.open(prepared(tmp_path))
    config = arm_config("wide", arm, steps=4).changed({"model.vocab_size": dataset.vocab_size})
    with open_run(config, RunFolder(tmp_path / "run"), dataset) as run:
        take_step(run)
        others = live_bytes() - sum(each.nbytes for each in run.model.parameters()) * 3
        found = step_peak(lambda: take_step(run))
        assert found == step_peak(lambda: take_step(run))
    assert found - others == pytest.approx(predict(config, device="cpu").peak_of_steps, rel=0.15)
