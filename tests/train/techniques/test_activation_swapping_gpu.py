"""Activation swapping on a GPU: conformance suite, memory, and slow streams."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.activation_swapping import ActivationSwapping, Swapper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

LAYERS, WIDTH = 8, 512


class TestActivationSwappingOnCuda(TechniqueSuite):
    technique = ActivationSwapping
    config = TINY.changed({"loop.device": "cuda"})
    variants: tuple[Mapping[str, Any], ...] = ({"least": 64}, {"least": 64, "ahead": 0}, {"pool": False})

    def break_on_purpose(self, run: Run) -> None:
        """Compute the loss without the hooks."""
        run.operations.loss = run.model.loss


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers).cuda()


def gradients(model: nn.Module, inputs: Tensor, hooks: Any) -> list[Tensor]:
    model.zero_grad()
    with hooks:
        loss = model(inputs).square().sum()
    loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("lagging", ["_out", "_back"])
def test_gradients_are_bit_identical_with_a_slow_stream(lagging: str) -> None:
    """A slow stream would expose memory that is reused too early."""
    model = network()
    swapper = Swapper(torch.device("cuda"), list(model.parameters()), least=1, ahead=2)
    for step in range(4):
        inputs = torch.randn(256, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        expected = gradients(model, inputs, nullcontext())
        with torch.cuda.stream(getattr(swapper, lagging)):
            torch.cuda._sleep(100_000_000)
        found = gradients(model, inputs, swapper.hooks())
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_gpu_memory_of_activations_is_freed() -> None:
    model = network()
    inputs = torch.randn(4096, WIDTH, device="cuda")
    kept = []
    for hooks in (
        nullcontext(),
        Swapper(torch.device("cuda"), list(model.parameters()), least=1, ahead=2).hooks(),
    ):
        before = torch.cuda.memory_allocated()
        with hooks:
            loss = model(inputs).square().sum()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss
    assert kept[1] < kept[0] / 4
