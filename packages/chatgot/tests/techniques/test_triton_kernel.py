"""Triton kernels in Triton's interpreter: values and gradients of torch's activations."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chatgot.step.state import StepState
from chatgot.techniques.stack import Stack
from chatgot.techniques.triton_kernel import TritonKernel
from chatgot.testing import TINY, TechniqueSuite, opened, verified_step, with_techniques
from tensorkeep.errors import TechniqueNotActiveError, UsageError

PLAIN = {
    "relu2": lambda gate, up: functional.relu(gate).square(),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels, and allow the technique on the CPU."""
    # Triton reads it when a kernel is defined, at the first use of the technique.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    monkeypatch.setattr(TritonKernel, "missing", lambda self, machine: None)


class TestTritonKernel(TechniqueSuite):
    technique = TritonKernel
    config = TINY.changed({"model.activation": "swiglu"})

    @pytest.fixture(autouse=True)
    def check_machine(self, interpreted: None) -> None:
        """Run the suite in the interpreter."""

    def break_on_purpose(self, run: StepState) -> None:
        """Leave the kernel on in the last block only."""
        for block in list(run.model.blocks)[:-1]:
            del block.mlp.forward  # type: ignore[union-attr]

    @pytest.mark.parametrize("activation", ["relu2", "geglu"])
    def test_other_activations_are_proved(self, tmp_path: Path, data: Path, activation: str) -> None:
        config = with_techniques(TINY.changed({"model.activation": activation}), {"triton-kernel": {}})
        with opened(config, tmp_path / "run", data) as run:
            # Two blocks, two batches, forward and backward.
            assert verified_step(run)["triton-kernel"] == {"launches": 8}

    def test_recomputed_blocks_launch_more(self, tmp_path: Path, data: Path) -> None:
        config = with_techniques(self.config, {"triton-kernel": {}, "activation-checkpointing": {}})
        with opened(config, tmp_path / "run", data) as run:
            assert verified_step(run)["triton-kernel"] == {"launches": 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PLAIN)
def test_values_and_gradients_equal_torch(interpreted: None, kind: str, dtype: torch.dtype) -> None:
    launched: Counter[str] = Counter()
    # More than one block of the kernel, the last one incomplete; not contiguous.
    given = [4 * torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    gate, up, gradient = (each.to(dtype).transpose(0, 1) for each in given)
    exact = compute(PLAIN[kind], gate.double(), up.double(), gradient.double())
    found = compute(partial(kernel, kind, note=lambda way: launched.update([way])), gate, up, gradient)
    assert launched == {"forward": 1, "backward": 1}
    most = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for one, other in zip(exact, found, strict=True):
        assert other.dtype == dtype
        torch.testing.assert_close(other.double(), one, rtol=most, atol=most)


def kernel(kind: str, gate: Tensor, up: Tensor, note: Callable[[str], object]) -> Tensor:
    from chatgot.techniques.triton_activations import activation

    return activation(kind, gate, None if kind == "relu2" else up, note)


def compute(function: Any, gate: Tensor, up: Tensor, gradient: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    result = function(gate, up)
    result.backward(gradient)
    return [result.detach(), gate.grad, torch.zeros_like(up) if up.grad is None else up.grad]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activation_that_is_one_kernel_in_torch_is_refused(activation: str) -> None:
    run: Any = SimpleNamespace(config=TINY.changed({"model.activation": activation}))
    with pytest.raises(UsageError, match="in one kernel already"):
        TritonKernel(TritonKernel.Settings()).apply(run)


def test_step_without_launches_is_an_error() -> None:
    operations = SimpleNamespace(loss=None, plain_loss=None)
    model = SimpleNamespace(blocks=[object(), object()])
    run: Any = SimpleNamespace(config=TINY, model=model, operations=operations, checks_later=False)
    missed = "forward of block 0, the backward of block 0, the forward of block 1, the backward of block 1"
    with (
        pytest.raises(TechniqueNotActiveError, match=missed),
        Stack([TritonKernel(TritonKernel.Settings())]).verified(run),
    ):
        pass
