"""Training states: objects with a ``state_dict()``, random numbers, and mismatches."""

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


def training(width: int = 16, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 2))
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


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    parts = training()
    train(parts, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, parts).wait()
        places = [parameter.data_ptr() for parameter in parts["model"].parameters()]
        moments = [entry["exp_avg"].data_ptr() for entry in parts["optimizer"].state.values()]
        saved = [parameter.detach().clone() for parameter in parts["model"].parameters()]
        train(parts, 2)
        manager.restore(into=parts)
    assert [parameter.data_ptr() for parameter in parts["model"].parameters()] == places
    assert [entry["exp_avg"].data_ptr() for entry in parts["optimizer"].state.values()] == moments
    assert all(torch.equal(a, b) for a, b in zip(saved, parts["model"].parameters(), strict=True))


def test_mismatches_are_named_before_anything_is_touched(tmp_path: Path) -> None:
    parts = training()
    train(parts, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, parts).wait()
    wider = training(width=20)
    before = {name: tensor.clone() for name, tensor in wider["model"].state_dict().items()}
    with pytest.raises(tensorkeep.StateMismatchError) as raised:
        CheckpointManager(tmp_path).restore(into=wider)
    assert "model.0.weight" in str(raised.value)
    assert same(dict(wider["model"].state_dict()), before)
    assert not wider["optimizer"].state


def test_an_optimizer_of_other_groups_is_refused_first(tmp_path: Path) -> None:
    parts = training()
    train(parts, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, parts).wait()
    other = training(seed=1)
    before = {name: tensor.clone() for name, tensor in other["model"].state_dict().items()}
    other["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in other["model"].parameters()])
    with pytest.raises(tensorkeep.StateMismatchError, match="groups of"):
        CheckpointManager(tmp_path).restore(into=other)
    assert same(dict(other["model"].state_dict()), before)


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    parts = training()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": parts["model"]}).wait()
    other = training(seed=1)
    before = {name: tensor.clone() for name, tensor in other["model"].state_dict().items()}
    with pytest.raises(tensorkeep.StateMismatchError, match="only in the state: optimizer"):
        CheckpointManager(tmp_path).restore(into={"model": other["model"], "optimizer": other["optimizer"]})
    assert same(dict(other["model"].state_dict()), before)


def test_random_numbers_continue(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.gauss(0, 1)
    state = RandomState()
    tensorkeep.save(state.state_dict(), tmp_path / "rng")
    expected = [draw() for _ in range(5)]
    state.load_state_dict(tensorkeep.load(tmp_path / "rng"))
    assert [draw() for _ in range(5)] == expected


def test_lists_of_objects(tmp_path: Path) -> None:
    models = [nn.Linear(3, 3), nn.Linear(4, 4)]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"models": models, "tuple": (models[0], 5)}).wait()
    others = [nn.Linear(3, 3), nn.Linear(4, 4)]
    CheckpointManager(tmp_path).restore(into={"models": others, "tuple": (others[0], 0)})
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(models, others, strict=True))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    first, second = Tied(), Tied()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": first}).wait()
    CheckpointManager(tmp_path).restore(into={"model": second})
    assert torch.equal(second.embed.weight, first.embed.weight)
    assert second.head.weight is second.embed.weight
