"""Products of 8-bit numbers: how they are rounded, how gradients pass, and that no layer is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.quantised_forward import (
    QuantisedForward,
    QuantisedForwardSettings,
    fake_quantised,
    to_float8,
)

FLOAT8 = QuantisedForward(QuantisedForwardSettings(mode="float8"))


def linear_layers(model: GPT) -> list[nn.Linear]:
    return [each for each in model.blocks.modules() if isinstance(each, nn.Linear)]


class TestQuantisedForward(TechniqueSuite):
    technique = QuantisedForward

    def sabotage(self, run: Run) -> None:
        """Leave every layer as it was, as a loop does that binds its variable to the new layer."""
        for layer in linear_layers(run.model):
            del layer.forward

    def test_one_layer_that_is_left_out_is_caught(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            del linear_layers(run.model)[-1].forward
            with (
                pytest.raises(TechniqueNotActiveError, match="of 8 linear layers 1 did not"),
                run.techniques.verified(run),
            ):
                take_step(run)

    def test_numbers_that_are_rounded_otherwise_are_no_8_bit_integers(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            for layer in linear_layers(run.model):
                layer.forward = _with_bfloat16_weights(layer)  # type: ignore[method-assign]
            with pytest.raises(TechniqueNotActiveError, match="8 did not"), run.techniques.verified(run):
                take_step(run)

    def test_the_proof_tells_how_near_products_are(self, tmp_path: Path, data: Path) -> None:
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            figures = run.techniques.proofs["quantised-forward"].figures
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
    # No element moves by more than half the distance of two levels.
    assert ((found - x).abs() <= x.abs().amax(1, keepdim=True) / 127 / 2 * 1.001).all()


def test_signs_are_treated_alike_and_zeros_stay() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantised(-x), -fake_quantised(x))
    assert torch.equal(fake_quantised(torch.zeros(2, 5)), torch.zeros(2, 5))


def test_levels_of_what_was_rounded_to_16_bits_are_exact_all_the_same() -> None:
    found = fake_quantised(torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert found.dtype == torch.float32
    steps = found / (found.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 1e-3


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slope = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    (fake_quantised(x) * slope).sum().backward()
    assert torch.equal(x.grad, slope)


def test_float8_keeps_parameters_and_their_names() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=16, context_length=16, n_layers=2, n_heads=2, d_model=32, bias=True))
    inputs, targets = torch.randint(16, (2, 16)), torch.randint(16, (2, 16))
    plain, before = model.loss(inputs, targets), dict(model.named_parameters())
    to_float8(model.blocks, emulate=True)
    assert [(name, id(each)) for name, each in model.named_parameters()] == [
        (name, id(each)) for name, each in before.items()
    ]
    loss = model.loss(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss != plain
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_float8_is_not_to_be_had_on_a_cpu() -> None:
    assert "needs a CUDA device; the run is on cpu" in str(FLOAT8.lacks(Machine(torch.device("cpu"))))


def test_float8_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(UsageError, match="not compiled"):
        FLOAT8.configure(TINY)


@pytest.mark.parametrize(
    ("settings", "size"),
    [({"model.d_model": 24}, "d_model is 24"), ({"model.d_ff": 40}, "MLPs is 40"), ({"loop.batch_size": 1}, None)],
)
def test_float8_wants_multiples_of_16(settings: dict[str, object], size: str | None) -> None:
    config = with_techniques(TINY, {"compile": {}}).changed(settings)
    if size is None:
        assert FLOAT8.configure(config) == config
    else:
        with pytest.raises(UsageError, match=size):
            FLOAT8.configure(config)
