"""Optimizer offload on a GPU: conformance suite, and the device of the states."""

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.optim.optimizers import build_optimizers
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.optimizer_offload import HostOptimizer, OptimizerOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


class TestOptimizerOffloadOnCuda(TechniqueSuite):
    technique = OptimizerOffload
    config = TINY.changed({"loop.device": "cuda"})

    def break_on_purpose(self, run: Run) -> None:
        """Use torch's optimizer, with its states on the GPU."""
        run.optimizers["adamw"] = build_optimizers(run.model, run.config.optim)["adamw"]


def test_gpu_holds_only_weights_and_gradients() -> None:
    """Buckets are copied while others are updated, and all weights are complete when the next kernel reads them."""
    weights = [torch.randn(1024, 1024, device="cuda") for _ in range(8)]
    mirror = [each.clone() for each in weights]
    before = torch.cuda.memory_allocated()
    host = HostOptimizer(torch.optim.AdamW(weights, lr=0.01), bucket_bytes=8 << 20)
    plain = torch.optim.AdamW([each.cpu() for each in mirror], lr=0.01, fused=True)
    for step in range(5):
        for live, copy in zip(weights, plain.param_groups[0]["params"], strict=True):
            generator = torch.Generator().manual_seed(step)
            copy.grad = torch.randn(copy.shape, generator=generator)
            live.grad = copy.grad.cuda()
        host.step()
        # Read at once: only the synchronisation of the optimizer itself protects it.
        found = [each * 1 for each in weights]
        plain.step()
        host.zero_grad()
        for live, copy in zip(found, plain.param_groups[0]["params"], strict=True):
            assert torch.equal(live.cpu(), copy)
    del found
    assert torch.cuda.memory_allocated() == before
    assert all(each.gradient.is_pinned() and each.master.is_pinned() for each in host._weights)
