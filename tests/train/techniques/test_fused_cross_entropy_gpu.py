"""Fused cross-entropy on a GPU: conformance suite, and the memory that it saves."""

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite
from tensorkeep.train.model.gpt import token_loss
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.fused_cross_entropy import FusedCrossEntropy, linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

TOKENS, WIDTH, VOCABULARY = 8192, 256, 32000


class TestFusedCrossEntropyOnCuda(TechniqueSuite):
    technique = FusedCrossEntropy
    config = TINY.changed({"loop.device": "cuda"})

    def break_on_purpose(self, run: Run) -> None:
        """Call the model's own loss."""
        del run.model.loss


def test_logits_take_an_eighth_of_their_memory() -> None:
    features = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device="cuda", requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    peaks, losses = [], []
    for fused in (False, True):
        features.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (
                linear_cross_entropy(features, weight, targets, at_once=TOKENS // 8)
                if fused
                else token_loss((features @ weight.T).unsqueeze(0), targets.unsqueeze(0))
            )
        loss.backward()
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < peaks[0] / 4
