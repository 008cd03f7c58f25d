"""Fused cross-entropy: loss and gradients of the plain loss, without the logits of a batch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chatgot.model.gpt import IGNORED, token_loss
from chatgot.step.state import StepState
from chatgot.techniques import fused_cross_entropy
from chatgot.techniques.base import Machine
from chatgot.techniques.fused_cross_entropy import (
    FusedCrossEntropy,
    fusable_gradient_and_loss,
    gradient_and_loss,
    linear_cross_entropy,
)
from chatgot.testing import TINY, TechniqueSuite, losses, opened, trained

TOKENS, WIDTH, VOCABULARY = 96, 16, 400


def drawn(*, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, the weights of a head, and targets; some targets are ignored."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = scale * torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[7:31:3] = IGNORED
    return features, weight, targets


def plain(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_loss(torch.nn.functional.linear(features, weight).unsqueeze(0), targets.unsqueeze(0))


def with_gradients(compute: Any, features: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    features, weight = (each.clone().requires_grad_() for each in (features, weight))
    loss = compute(features, weight, targets)
    loss.backward()
    assert features.grad is not None and weight.grad is not None
    return loss.detach(), features.grad, weight.grad


def test_a_frozen_head_gets_no_gradient() -> None:
    features, weight, targets = drawn()
    expected = with_gradients(partial(linear_cross_entropy, at_once=20), features, weight, targets)
    features.requires_grad_()
    with Largest() as largest:
        linear_cross_entropy(features, weight, targets, at_once=20).backward()
    assert weight.grad is None and features.grad is not None and torch.equal(features.grad, expected[1])
    # That of the head would be [vocabulary, width]; the logits of a chunk are larger.
    assert (VOCABULARY, WIDTH) not in largest.shapes


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and the shapes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operator(*arguments, **(options or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
            self.shapes.add(tuple(result.shape))
        return result


class TestFusedCrossEntropy(TechniqueSuite):
    technique = FusedCrossEntropy
    variants = ({}, pytest.param({"parts": 3}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Call the model's own loss."""
        del run.model.loss

    @pytest.mark.parametrize("at_once", [1, 12, 50, TOKENS])
    def test_loss_and_gradients_equal_the_plain_loss(self, at_once: int) -> None:
        given = drawn()
        expected = with_gradients(plain, *given)
        found = with_gradients(partial(linear_cross_entropy, at_once=at_once), *given)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_compiled_computes_the_same(self, dtype: torch.dtype) -> None:
        features, weight, targets = drawn()
        logits = (features @ weight.T).to(dtype)
        for padding in (0, 60):
            clipped = torch.where(targets < VOCABULARY - padding, targets, IGNORED)
            expected = gradient_and_loss(logits.clone(), clipped, padding)
            found = fusable_gradient_and_loss(logits, clipped, padding)
            torch.testing.assert_close(found[0], expected[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
            torch.testing.assert_close(found[1], expected[1])
            assert found[0].dtype == dtype

    @pytest.mark.parametrize("at_once", [12, TOKENS])
    def test_padding_has_no_part_in_the_loss(self, at_once: int) -> None:
        features, weight, targets = drawn()
        tokens = VOCABULARY - 60
        targets = targets.clamp(max=tokens - 1)
        loss, by_features, by_weight = with_gradients(plain, features, weight[:tokens], targets)
        padded = partial(linear_cross_entropy, at_once=at_once, padding=60)
        found = with_gradients(padded, features, weight, targets)
        torch.testing.assert_close(found[0], loss)
        torch.testing.assert_close((found[1], found[2][:tokens]), (by_features, by_weight), rtol=1e-5, atol=1e-7)
        assert not found[2][tokens:].any()

    def test_factor_on_the_loss_scales_the_gradients(self) -> None:
        given = drawn()
        once = with_gradients(lambda *each: linear_cross_entropy(*each, at_once=20), *given)
        thrice = with_gradients(lambda *each: 3 * linear_cross_entropy(*each, at_once=20), *given)
        torch.testing.assert_close(thrice[1:], tuple(3 * each for each in once[1:]))

    def test_logits_of_all_tokens_are_never_in_memory(self) -> None:
        given, full = drawn(), 4 * TOKENS * VOCABULARY
        for compute, most in ((plain, None), (lambda *each: linear_cross_entropy(*each, at_once=12), full // 4)):
            with Largest() as largest:
                with_gradients(compute, *given)
            assert largest.nbytes >= full if most is None else largest.nbytes < most

    def test_large_logits_do_not_overflow_and_the_loss_without_targets_is_nan(self) -> None:
        given = drawn(scale=100.0)
        loss, *gradients = with_gradients(partial(linear_cross_entropy, at_once=16), *given)
        torch.testing.assert_close(loss, plain(*given))
        assert all(bool(each.isfinite().all()) for each in gradients)
        features, weight, targets = given
        assert linear_cross_entropy(features, weight, torch.full_like(targets, IGNORED), at_once=16).isnan()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_are_float32_under_autocast(self, dtype: torch.dtype) -> None:
        """If it were divided first, the gradient of a mean over many tokens would vanish in float16."""
        given = drawn()
        loss, *exact = with_gradients(plain, *given)

        def within(*each: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return linear_cross_entropy(*each, at_once=16)

        found, *gradients = with_gradients(within, *given)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, loss, rtol=5e-3, atol=0)
        for one, other in zip(exact, gradients, strict=True):
            assert float((other - one).norm() / one.norm()) < 0.03

    def test_losses_are_those_of_the_plain_run(self, data: Path) -> None:
        untied, in_16_bits = TINY.changed({"model.tied": False}), {"techniques.mixed-precision.dtype": "bf16"}
        for config, others, within in ((untied, {}, 1e-3), (TINY, in_16_bits, 0.03)):
            on = config.changed({"techniques.fused-cross-entropy": "on", **others})
            plain, found = ([loss for _, _, loss in losses(trained(each, data))] for each in (config, on))
            assert found == pytest.approx(plain, rel=within), others

    def test_evaluation_uses_the_plain_loss(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            inputs, targets = next(run.batches)
            run.model.eval()
            with torch.no_grad():
                assert torch.equal(run.model.loss(inputs, targets), type(run.model).loss(run.model, inputs, targets))


def test_kernel_is_compiled_on_cuda_only_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "missing_package", lambda self, module, *, install: None)
    # Importing the compiler takes seconds; the kernel of other tests stays in its cache.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(fused_cross_entropy, "_compiled_kernel", fused_cross_entropy._compiled_kernel.__wrapped__)
    technique = FusedCrossEntropy(FusedCrossEntropy.Settings())
    assert technique._kernel(torch.device("cpu")) is gradient_and_loss
    assert technique._kernel(torch.device("cuda")) is fusable_gradient_and_loss
    plain_kernel = FusedCrossEntropy(FusedCrossEntropy.Settings(kernel="plain"))
    assert plain_kernel._kernel(torch.device("cuda")) is gradient_and_loss
