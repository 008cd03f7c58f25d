"""Muon on several ranks, which each orthogonalise a part of the matrices: ddp and fsdp, by two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chatgot.optim import muon
from chatgot.optim.muon import Muon
from chatgot.testing import killed_copy, losses, train_run, trained
from techniques.several_processes import EXACT, FOUR_STEPS, ProcessPool, task
from tiny_training import check_same

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

MUON = EXACT.changed(FOUR_STEPS).changed(
    {"optim.name": "muon", "optim.muon_split": True, "optim.muon_polynomials": "polar-express", "optim.muon_beta2": 0.9}
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_two_compute_as_one_and_resume(technique: str, tmp_path: Path, data: Path, two_processes: ProcessPool) -> None:
    config = MUON.changed({f"techniques.{technique}": "on"})
    two_processes.run({"whole": task("train", config, tmp_path / "whole", data)})
    for copy in ("resumed", "to-one"):
        killed_copy(tmp_path / "whole", tmp_path / copy, step=2)
    two_processes.run({"rest": task("train", config, tmp_path / "resumed", data, resume=True)})
    alone = [loss for _, _, loss in losses(trained(MUON, data))]
    assert [loss for _, _, loss in losses(tmp_path / "whole")] == pytest.approx(alone, rel=2e-3)
    check_same(tmp_path / "resumed", tmp_path / "whole", "train", "evaluate")
    train_run(MUON, tmp_path / "to-one", data, resume=True)
    assert [loss for _, _, loss in losses(tmp_path / "to-one")] == pytest.approx(alone, rel=2e-3)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_each_rank_orthogonalises_a_part_of_the_matrices(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of two ranks, computed one after the other, are the updates of one rank."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(8, 16, generator=generator) for _ in range(count)]

    def updated(optimizer: Muon) -> list[Tensor]:
        parameters: list[Any] = optimizer.param_groups[0]["params"]
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient.clone()
        optimizer.step()
        return [each.detach() for each in parameters]

    def optimizer() -> Muon:
        return Muon([nn.Parameter(torch.zeros(8, 16)) for _ in range(count)], lr=0.1)

    alone, parts = updated(optimizer()), []
    for rank in range(2):
        sharing = optimizer()
        sharing.ranks = object()  # type: ignore[assignment]
        monkeypatch.setattr(muon.dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(muon.dist, "get_rank", lambda group, rank=rank: rank)

        def gather(found: Tensor, own: Tensor, group: object) -> None:
            parts.append(own.clone())
            found.copy_(torch.cat([*parts, torch.zeros_like(own)])[: len(found)])

        monkeypatch.setattr(muon.dist, "all_gather_into_tensor", gather)
        found = updated(sharing)
    assert [len(each) for each in parts] == [-(-count // 2)] * 2
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("finite", [True, False])
def test_an_update_is_skipped_on_the_device(finite: bool) -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(8, 4))]
    copies = [nn.Parameter(each.detach().clone()) for each in parameters]
    optimizer, plain = (Muon([{"params": each, "beta2": 0.9}], lr=0.1) for each in (parameters, copies))
    for each in (optimizer, plain):
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.eye(*parameter.shape)
        each.step()
    before = [each.detach().clone() for each in parameters]
    states = [{key: value.clone() for key, value in optimizer.state[each].items()} for each in parameters]
    assert [set(each) for each in states] == [{"momentum_buffer", "row_variance"}] * 2
    for each in (optimizer, plain):
        for parameter in each.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, 1.0 if finite else torch.nan)
    optimizer.found_inf = torch.tensor(0.0 if finite else 1.0)
    optimizer.step()
    plain.step()
    for number, each in enumerate(parameters):
        if finite:
            assert torch.equal(each, plain.param_groups[0]["params"][number])
        else:
            assert torch.equal(each, before[number])
            assert all(torch.equal(optimizer.state[each][key], value) for key, value in states[number].items())
