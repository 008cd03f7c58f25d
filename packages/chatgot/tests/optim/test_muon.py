"""Muon on matrices together: the updates and states of torch's, which takes one after another."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from chatgot.optim import muon
from chatgot.optim.muon import Muon

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


def test_states_are_those_of_torch_and_parameters_and_rows_without_gradients_are_unchanged() -> None:
    first, second = matrices(), matrices()
    mine, theirs = Muon(first, lr=0.02), torch.optim.Muon(second, lr=0.02)
    trained(mine, first, 2)
    trained(theirs, second, 2)
    for one, other in ((mine, theirs), (theirs, mine)):
        assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]
        for each, wanted in zip(one.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
            assert torch.equal(each["momentum_buffer"], wanted["momentum_buffer"])
        one.load_state_dict(other.state_dict())
    parameters = matrices()
    optimizer = Muon(parameters, lr=0.02)
    optimizer.step()
    parameters[1].grad = torch.ones(8, 8)
    optimizer.step()
    same = [torch.equal(each, before) for each, before in zip(parameters, matrices(), strict=True)]
    assert same == [True, False, True, True, True, True]
    assert len(optimizer.state_dict()["state"]) == 1
    weight, empty = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
    optimizer = Muon([{"params": [weight, empty], "beta2": 0.9}], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        weight.grad, empty.grad = torch.eye(3, 4).repeat(2, 1), torch.zeros(6, 4)
        weight.grad[3:] = 0
        optimizer.step()
    assert torch.equal(empty, torch.ones(6, 4)) and torch.equal(weight[3:], torch.ones(3, 4))
    assert (weight[:3] - 1).norm(dim=1).min() > 0.05


def test_fused_projections_are_updated_like_separate_ones() -> None:
    """Keys above values: the updates are those of two parameters."""
    generator = torch.Generator().manual_seed(0)
    fused = nn.Parameter(torch.randn(16, 8, generator=generator))
    parts = [nn.Parameter(each.clone()) for each in fused.detach().chunk(2)]
    together = Muon([{"params": [fused], "projections": 2}], lr=0.02)
    apart, whole = Muon(parts, lr=0.02), copy.deepcopy(fused)
    as_one = Muon([whole], lr=0.02)
    for _ in range(3):
        fused.grad = torch.randn(16, 8, generator=generator)
        whole.grad = fused.grad.clone()
        for each, gradient in zip(parts, fused.grad.chunk(2), strict=True):
            each.grad = gradient.clone()
        for optimizer in (together, apart, as_one):
            optimizer.step()
    torch.testing.assert_close(fused, torch.cat(parts), rtol=0, atol=1e-4)
    assert not torch.allclose(fused, whole, atol=1e-3)


@pytest.mark.parametrize("fast", [True, False])
def test_the_steps_are_computed_in_bfloat16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(muon.machine, "multiplies_bfloat16_fast", lambda: fast)
    parameters = matrices()
    optimizer = Muon(parameters)
    results = []

    def observed(*arguments: Any) -> torch.Tensor:
        results.append(muon.orthogonal(*arguments))
        return results[-1]

    optimizer.orthogonal = observed
    trained(optimizer, parameters, 1)
    assert {each.dtype for each in results} == {torch.bfloat16 if fast else torch.float32}


@pytest.mark.parametrize("shape", [(32, 32), (16, 64)])
def test_the_polynomials_of_polar_express_converge(shape: tuple[int, int]) -> None:
    """All singular values of an update become 1; with the quintic polynomial they stay between about 0.7 and 1.2."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    errors = []
    for settings in ({"polar_express": True}, {}):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = matrix
        Muon([{"params": [parameter], **settings}], lr=1.0, ns_steps=9, weight_decay=0.0).step()
        errors.append((torch.linalg.svdvals(parameter.detach()) - 1).abs().max().item())
    assert errors[0] < 0.02 < 0.1 < errors[1]


@pytest.mark.parametrize("projections", [1, 3])
def test_rows_are_normalised_by_the_mean_of_their_squares(projections: int) -> None:
    """The formula of NorMuon, matrix by matrix, from updates whose rows are not normalised."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(24, 4)) for _ in range(4)]
    split = {"projections": projections} if projections > 1 else {}
    normalised = Muon([{"params": weights[:2], "beta2": 0.9, **split}], lr=1.0, weight_decay=0.0)
    plain = Muon([{"params": weights[2:], **split}], lr=1.0, weight_decay=0.0)
    variance = torch.zeros(2, 24, 1)
    for _ in range(3):
        before = [each.detach().clone() for each in weights]
        for one, other in zip(weights[:2], weights[2:], strict=True):
            # Some rows get small gradients.
            one.grad = torch.randn(24, 4, generator=generator) * torch.linspace(0.01, 1, 24)[:, None]
            other.grad = one.grad.clone()
        normalised.step()
        plain.step()
        changes = torch.stack([each.detach() - old for each, old in zip(weights, before, strict=True)])
        variance = torch.lerp(variance, changes[2:].square().mean(2, keepdim=True), 0.1)
        parts, divided = changes[2:].chunk(projections, 1), (changes[2:] / variance.sqrt()).chunk(projections, 1)
        expected = [
            b * a.norm(dim=(1, 2), keepdim=True) / b.norm(dim=(1, 2), keepdim=True)
            for a, b in zip(parts, divided, strict=True)
        ]
        torch.testing.assert_close(changes[:2], torch.cat(expected, 1), rtol=1e-3, atol=1e-5)
        assert not torch.allclose(changes[:2], changes[2:], atol=0.01)
