"""Our Triton kernels, by Triton's interpreter: the numbers of torch's activations, and their gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tensorkeep.errors import TechniqueNotActiveError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import NoSettings
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.triton_kernel import TritonKernel

PLAIN = {
    "relu2": lambda gate, up: functional.relu(gate).square(),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels be interpreted, and the technique run on the CPU."""
    # Triton looks at it where a kernel is defined, which is when the technique is first used.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    monkeypatch.setattr(TritonKernel, "lacks", lambda self, machine: None)


class TestTritonKernel(TechniqueSuite):
    technique = TritonKernel
    config = TINY.changed({"model.activation": "swiglu"})

    @pytest.fixture(autouse=True)
    def here(self, interpreted: None) -> None:
        """Sit the exam by the interpreter."""

    def sabotage(self, run: Run) -> None:
        """Let the kernel be on in the last block only, as a closure over the variable of a loop is."""
        for block in list(run.model.blocks)[:-1]:
            del block.mlp.forward  # type: ignore[union-attr]

    @pytest.mark.parametrize("activation", ["relu2", "geglu"])
    def test_other_activations_are_proved_too(self, tmp_path: Path, data: Path, activation: str) -> None:
        config = with_techniques(TINY.changed({"model.activation": activation}), {"triton-kernel": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            # Two blocks, two batches, both ways.
            assert run.techniques.proofs["triton-kernel"].figures == {"launches": 8}

    def test_blocks_that_are_computed_again_launch_more(self, tmp_path: Path, data: Path) -> None:
        config = with_techniques(self.config, {"triton-kernel": {}, "activation-checkpointing": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            assert run.techniques.proofs["triton-kernel"].figures == {"launches": 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PLAIN)
def test_values_and_gradients_are_those_of_torch(interpreted: None, kind: str, dtype: torch.dtype) -> None:
    from tensorkeep.train.techniques.activation_kernels import activation

    launched: Counter[str] = Counter()
    # More than one block of the kernel, the last of them not full; and not contiguous.
    given = [4 * torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    gate, up, gradient = (each.to(dtype).transpose(0, 1) for each in given)
    exact = compute(PLAIN[kind], gate.double(), up.double(), gradient.double())
    found = compute(
        lambda *both: activation(
            kind, both[0], None if kind == "relu2" else both[1], lambda way: launched.update([way])
        ),
        *(gate, up, gradient),
    )
    assert launched == {"forward": 1, "backward": 1}
    most = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for one, other in zip(exact, found, strict=True):
        assert other.dtype == dtype
        torch.testing.assert_close(other.double(), one, rtol=most, atol=most)


def compute(function: Any, gate: Tensor, up: Tensor, gradient: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    result = function(gate, up)
    result.backward(gradient)
    return [result.detach(), gate.grad, torch.zeros_like(up) if up.grad is None else up.grad]


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_what_torch_computes_in_one_kernel_is_refused(activation: str) -> None:
    run: Any = SimpleNamespace(config=TINY.changed({"model.activation": activation}))
    with pytest.raises(UsageError, match="there is nothing to win"):
        TritonKernel(NoSettings()).apply(run)


def test_a_step_without_launches_is_no_proof() -> None:
    run: Any = SimpleNamespace(config=TINY, model=SimpleNamespace(blocks=[object(), object()]))
    missed = "forward of block 0, the backward of block 0, the forward of block 1, the backward of block 1"
    with pytest.raises(TechniqueNotActiveError, match=missed), TritonKernel(NoSettings()).verify(run):
        pass


def test_on_the_cpu_it_says_what_is_missing() -> None:
    lack = TritonKernel(NoSettings()).lacks(Machine(torch.device("cpu")))
    assert lack == "needs a CUDA device; the run is on cpu"
