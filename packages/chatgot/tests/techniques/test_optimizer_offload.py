"""Optimizer offload, with the weights on the CPU too: the arithmetic is the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatgot.optim.optimizers import build_optimizers
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.optimizer_offload import HostOptimizer, OptimizerOffload
from chatgot.testing import TINY, TechniqueSuite, losses, opened, trained, verified_step

FUSED = TINY.changed({"optim.implementation": "fused"})


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in ((5, 7), (7,), (3, 4, 2), (1,))]


def groups(tensors: list[Tensor]) -> list[dict[str, object]]:
    return [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0, "peak_lr": 1.0}]


def give_gradients(tensors: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for each in tensors:
        each.grad = torch.randn(each.shape, generator=generator)


class TestOptimizerOffload(TechniqueSuite):
    technique = OptimizerOffload

    @pytest.fixture(autouse=True)
    def check_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow it on the CPU, where it saves no memory."""
        monkeypatch.setattr(OptimizerOffload, "missing", lambda self, machine: None)

    def break_on_purpose(self, run: StepState) -> None:
        """Use torch's optimizer."""
        run.optimizers["adamw"] = build_optimizers(run.model, run.config.optim)["adamw"]

    def test_run_is_bit_identical_to_the_fused_adamw(self, data: Path) -> None:
        """With clipping and accumulation, which use the gradients on the device."""
        assert losses(trained(self.config_with({}), data)) == losses(trained(FUSED, data))

    def test_skipped_update_leaves_no_gradient(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            run.operations.accepts = lambda loss, norm: False
            take_step(run)
            assert all(each.grad is None for each in run.model.parameters())

    def test_muon_stays_on_the_device(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}).changed({"optim.name": "muon"}), tmp_path / "run", data) as run:
            verified_step(run)
            assert isinstance(run.optimizers["muon"], torch.optim.Muon)
            assert isinstance(run.optimizers["adamw"], HostOptimizer)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_weights_equal_those_of_adamw_with_any_bucket_size(bucket_bytes: int) -> None:
    here, there = weights(), weights()
    plain = torch.optim.AdamW(groups(here), lr=0.1, fused=True)
    host = HostOptimizer(torch.optim.AdamW(groups(there), lr=0.1), bucket_bytes=bucket_bytes)
    for step in range(4):
        for tensors, optimizer in ((here, plain), (there, host)):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            give_gradients(tensors, step)
            if step == 2:
                # A weight without a gradient is not updated, and its step count does not change.
                tensors[0].grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    assert all(each.grad is None for each in there)


def test_states_can_be_loaded_with_and_without_offload() -> None:
    here, there = weights(), weights()
    plain = torch.optim.AdamW(groups(here), lr=0.1)
    host = HostOptimizer(torch.optim.AdamW(groups(there), lr=0.1))
    for tensors, optimizer in ((here, plain), (there, host)):
        give_gradients(tensors, 0)
        optimizer.step()
    saved = host.state_dict()
    assert saved["param_groups"][1]["peak_lr"] == 1.0
    assert saved["state"].keys() == plain.state_dict()["state"].keys()
    fused = torch.optim.AdamW(groups(here), lr=0.5)
    fused.load_state_dict(saved)
    other = HostOptimizer(torch.optim.AdamW(groups(there), lr=0.5))
    other.load_state_dict(plain.state_dict())
    for tensors, optimizer in ((here, fused), (there, other)):
        assert optimizer.param_groups[0]["lr"] == 0.1
        give_gradients(tensors, 1)
        optimizer.step()
    for one, two in zip(here, there, strict=True):
        torch.testing.assert_close(one, two)
    # Loaded weights are not overwritten by older ones.
    for each in there:
        each.fill_(100.0)
    other.load_state_dict(other.state_dict())
    give_gradients(there, 2)
    other.step()
    assert all(bool((each > 50).all()) for each in there)
