"""Training states: objects with a ``state_dict()``, and random numbers."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorkeep
from tensorkeep import CheckpointManager, RandomState
from tensorkeep.testing.equality import same


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "rng": RandomState()}


def train(parts: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 8) + random.random() + np.random.rand()
        loss = parts["model"](inputs).square().mean()
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("incremental", [False, "delta"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, incremental: Any) -> None:
    parts = training()
    with CheckpointManager(tmp_path, incremental=incremental) as manager:
        train(parts, 5)
        manager.save(5, {**parts, "epoch": 1})
        train(parts, 5)
        manager.save(10, {**parts, "epoch": 2})
        expected = train(parts, 10)
    other = training(seed=99)
    restored = CheckpointManager(tmp_path).restore(into={**other, "epoch": 0})
    assert restored["epoch"] == 2
    assert restored["model"] is other["model"]
    assert train(other, 10) == expected
    assert same(other["optimizer"].state_dict(), parts["optimizer"].state_dict())
    assert same(other["scheduler"].state_dict(), parts["scheduler"].state_dict())


def test_parameters_are_filled_in_place_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    parts = training()
    tied = parts["tied"] = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    tied["head"].weight = tied["embed"].weight
    train(parts, 2)
    tensors = [*parts["model"].parameters(), *tied.parameters()]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, parts).wait()
        places = [tensor.data_ptr() for tensor in tensors]
        moments = [entry["exp_avg"].data_ptr() for entry in parts["optimizer"].state.values()]
        saved = [tensor.detach().clone() for tensor in tensors]
        train(parts, 2)
        nn.init.zeros_(tied["head"].weight)
        manager.restore(into=parts)
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert [entry["exp_avg"].data_ptr() for entry in parts["optimizer"].state.values()] == moments
    assert all(torch.equal(a, b) for a, b in zip(saved, tensors, strict=True))
    assert tied["head"].weight is tied["embed"].weight


def test_random_numbers_continue(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.gauss(0, 1)
    state = RandomState()
    tensorkeep.save(state.state_dict(), tmp_path / "rng")
    expected = [draw() for _ in range(5)]
    state.load_state_dict(tensorkeep.load(tmp_path / "rng"))
    assert [draw() for _ in range(5)] == expected
