"""Triton kernels on a GPU: conformance suite, values and gradients in each dtype."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.triton_kernel import TritonKernel

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PLAIN = {
    "relu2": lambda gate, up: functional.relu(gate).square(),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
}


class TestTritonKernelOnCuda(TechniqueSuite):
    technique = TritonKernel
    config = TINY.changed({"loop.device": "cuda", "model.activation": "swiglu"})

    def break_on_purpose(self, run: Run) -> None:
        """Leave the kernel on in the last block only."""
        for block in list(run.model.blocks)[:-1]:
            del block.mlp.forward  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PLAIN)
def test_values_and_gradients_equal_torch(kind: str, dtype: torch.dtype) -> None:
    from tensorkeep.train.techniques.triton_activations import activation

    gate, up, gradient = (
        (4 * torch.randn(37, 1001, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))).to(dtype)
        for seed in (1, 2, 3)
    )
    exact = [each.double() for each in (gate, up)]
    given = [gate, up]
    results = []
    for pair in (exact, given):
        for each in pair:
            each.requires_grad_()
    results.append(PLAIN[kind](*exact))
    results.append(activation(kind, gate, None if kind == "relu2" else up, lambda way: None))
    for result in results:
        result.backward(gradient.to(result.dtype))
    most = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (results[0], results[1]),
        *((one.grad, other.grad) for one, other in zip(exact, given, strict=True)),
    ]
    for one, other in pairs:
        if one is not None and other is not None:
            torch.testing.assert_close(other.double(), one, rtol=most, atol=most)
