"""Muon on matrices together: the updates and states of torch's, which takes one after another."""

import pytest
import torch
from torch import nn

from tensorkeep.train.optim import muon
from tensorkeep.train.optim.muon import Muon

SHAPES = [(24, 8), (8, 8), (8, 24), (24, 8), (8, 8), (4, 1)]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int) -> list[nn.Parameter]:
    """Make steps whose gradients do not depend on the weights, so that rounding does not add up."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    return parameters


@pytest.mark.parametrize("changed", [{}, {"nesterov": False}, {"weight_decay": 0.0, "momentum": 0.5}, {"ns_steps": 3}])
@pytest.mark.parametrize("at_once", [1, 300, 1 << 26])
def test_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], at_once: int) -> None:
    monkeypatch.setattr(muon, "_AT_ONCE", at_once)
    settings = {"lr": 0.02, "weight_decay": 0.1, **changed}
    first, second = matrices(), matrices()
    trained(Muon(first, **settings), first, 4)
    trained(torch.optim.Muon(second, **settings), second, 4)
    for mine, theirs, before in zip(first, second, matrices(), strict=True):
        moved = (theirs - before).norm()
        # bfloat16 has 8 bits, and five products of them lie between.
        assert (mine - theirs).norm() < 0.02 * moved
        assert moved > 0.01


def test_states_are_interchangeable_with_those_of_torch() -> None:
    first, second = matrices(), matrices()
    mine, theirs = Muon(first, lr=0.02), torch.optim.Muon(second, lr=0.02)
    trained(mine, first, 2)
    trained(theirs, second, 2)
    for one, other in ((mine, theirs), (theirs, mine)):
        assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
        for each, wanted in zip(one.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
            assert torch.equal(each["momentum_buffer"], wanted["momentum_buffer"])
        one.load_state_dict(other.state_dict())


def test_parameter_without_gradient_is_unchanged() -> None:
    parameters = matrices()
    optimizer = Muon(parameters, lr=0.02)
    optimizer.step()
    parameters[1].grad = torch.ones(8, 8)
    optimizer.step()
    same = [torch.equal(each, before) for each, before in zip(parameters, matrices(), strict=True)]
    assert same == [True, False, True, True, True, True]
    assert len(optimizer.state_dict()["state"]) == 1
