"""Quantised forward: rounding, straight-through gradients, and that every layer is quantised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.step.state import StepState
from chatgot.techniques.experimental.quantised_forward import (
    QuantisedForward,
    QuantisedForwardSettings,
    fake_quantised,
    to_float8,
)
from chatgot.testing import TINY, TechniqueSuite, opened, verified_step, whole_run, with_techniques
from tensorkeep.errors import TechniqueNotActiveError


def linear_layers(model: GPT) -> list[nn.Linear]:
    return [each for each in model.blocks.modules() if isinstance(each, nn.Linear)]


class TestQuantisedForward(TechniqueSuite):
    technique = QuantisedForward

    def break_on_purpose(self, run: StepState) -> None:
        """Restore the plain forward of every layer."""
        for layer in linear_layers(run.model):
            del layer.forward

    def test_one_plain_layer_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            del linear_layers(run.model)[-1].forward
            with pytest.raises(TechniqueNotActiveError, match="of 8 linear layers 1 did not"):
                verified_step(run)

    def test_other_rounding_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            for layer in linear_layers(run.model):
                layer.forward = _with_bfloat16_weights(layer)  # type: ignore[method-assign]
            with pytest.raises(TechniqueNotActiveError, match="8 did not"):
                verified_step(run)

    def test_proof_has_the_distances(self, data: Path) -> None:
        figures = whole_run(self.config_with({}), data).proofs["quantised-forward"].figures
        assert figures["layers"] == 8
        assert figures["distance"] < 1e-5 < 1e-3 < figures["distance_of_plain"]


def _with_bfloat16_weights(layer: nn.Linear) -> Any:
    return lambda x: nn.functional.linear(x, layer.weight.bfloat16().float(), layer.bias)


def test_each_row_has_at_most_255_levels_and_keeps_its_largest_element() -> None:
    x = torch.randn(7, 4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    found = fake_quantised(x)
    assert all(len(row.unique()) <= 255 for row in found)
    largest = x.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), x.gather(1, largest))
    # No element changes by more than half the distance of two levels.
    assert ((found - x).abs() <= x.abs().amax(1, keepdim=True) / 127 / 2 * 1.001).all()


def test_rounding_is_symmetric_keeps_zeros_and_is_exact_for_16_bit_inputs() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantised(-x), -fake_quantised(x))
    assert torch.equal(fake_quantised(torch.zeros(2, 5)), torch.zeros(2, 5))
    found = fake_quantised(torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert found.dtype == torch.float32
    steps = found / (found.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 1e-3


def test_gradient_passes_straight_through() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slope = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    (fake_quantised(x) * slope).sum().backward()
    assert torch.equal(x.grad, slope)


def test_float8_keeps_parameters_and_their_names_and_any_batch_size() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=16, context_length=16, n_layers=2, n_heads=2, d_model=32, bias=True))
    inputs, targets = torch.randint(16, (2, 16)), torch.randint(16, (2, 16))
    plain, before = model.loss(inputs, targets), dict(model.named_parameters())
    to_float8(model.blocks, emulate=True)
    assert {name: id(each) for name, each in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    loss = model.loss(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss != plain
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    config = with_techniques(TINY, {"compile": {}}).changed({"loop.batch_size": 1})
    assert QuantisedForward(QuantisedForwardSettings(mode="float8")).configure(config) == config
