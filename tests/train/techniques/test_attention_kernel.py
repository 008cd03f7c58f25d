"""Attention kernels: conformance suites, and cases in which torch uses another kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.testing.technique_suite import (
    TINY,
    TechniqueSuite,
    losses,
    opened,
    train_run,
    verified_step,
    with_techniques,
)
from tensorkeep.train.generate import generate
from tensorkeep.train.model.block import Block
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import attention_kernel
from tensorkeep.train.techniques.attention_kernel import AttentionKernel, AttentionKernelSettings
from tensorkeep.train.techniques.requirements import Machine

NO_DROPOUT = TINY.changed({"model.dropout": 0})


def last_block(run: Run) -> Block:
    block: Block = run.model.blocks[-1]  # type: ignore[assignment]
    return block


class TestFlash(TechniqueSuite):
    technique = AttentionKernel
    variants = ({"kernel": "flash"},)
    config = NO_DROPOUT

    def break_on_purpose(self, run: Run) -> None:
        # With dropout, torch silently falls back to math on a CPU.
        attention = last_block(run).attention
        attention.kernel, attention.dropout_p = functional.scaled_dot_product_attention, 0.1

    def test_error_has_the_reasons_of_torch(self, tmp_path: Path, data: Path) -> None:
        """torch gives its reasons as warnings."""
        config = with_techniques(self.config, {"attention-kernel": {}})
        with opened(config, tmp_path / "run", data) as run:
            last_block(run).attention.dropout_p = 0.1
            with pytest.raises(TechniqueNotActiveError, match="do not support non-zero dropout"):
                verified_step(run)

    def test_generation_with_a_cache_uses_any_kernel(self, tmp_path: Path, data: Path) -> None:
        """A cache needs masks, which flash does not support."""
        config = with_techniques(self.config, {"attention-kernel": {}})
        with opened(config, tmp_path / "run", data) as run:
            found = generate(run.model, [1, 2, 3], max_new_tokens=4)
            last_block(run).attention.kernel = functional.scaled_dot_product_attention
            assert torch.equal(found, generate(run.model, [1, 2, 3], max_new_tokens=4))

    def test_dropout_is_refused_on_a_cpu(self, tmp_path: Path, data: Path) -> None:
        """The configuration is refused before anything is built."""
        config = with_techniques(TINY, {"attention-kernel": {}})
        with pytest.raises(UsageError, match="no dropout on a CPU"):
            train_run(config, tmp_path / "run", data)


class TestMath(TechniqueSuite):
    technique = AttentionKernel
    variants = ({"kernel": "math"},)
    config = NO_DROPOUT

    def break_on_purpose(self, run: Run) -> None:
        last_block(run).attention.kernel = functional.scaled_dot_product_attention

    def test_dropout_draws_the_same_numbers(self, tmp_path: Path, data: Path) -> None:
        """With dropout, torch uses math on a CPU anyway: the losses are bit-identical."""
        train_run(TINY, tmp_path / "plain", data, stop_after=3)
        train_run(
            with_techniques(TINY, {"attention-kernel": {"kernel": "math"}}), tmp_path / "math", data, stop_after=3
        )
        assert losses(tmp_path / "math") == losses(tmp_path / "plain")

    def test_math_is_recognised_in_16_bits(self, tmp_path: Path, data: Path) -> None:
        """torch computes it in 32 bits, and casts the result."""
        mixed = {"dtype": "bf16", "attention": "same"}
        both = {"attention-kernel": {"kernel": "math"}, "mixed-precision": mixed}
        with opened(with_techniques(TINY, both), tmp_path / "run", data) as run:
            assert verified_step(run)["attention-kernel"]["kernel"] == "math"

    def test_it_is_proved_with_activation_checkpointing(self, tmp_path: Path, data: Path) -> None:
        """The autograd graph of a checkpointed block has the kernel too."""
        config = with_techniques(TINY, {"attention-kernel": {"kernel": "math"}, "activation-checkpointing": {}})
        with opened(config, tmp_path / "run", data) as run:
            assert verified_step(run)["attention-kernel"]["kernel"] == "math"


@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "flex"])
def test_cuda_kernels_are_refused_on_a_cpu(kernel: str) -> None:
    technique = AttentionKernel(AttentionKernelSettings(kernel=kernel))  # type: ignore[arg-type]
    assert "needs a CUDA device" in str(technique.lacks(Machine(torch.device("cpu"))))


def test_turing_has_no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turing(Machine):
        capability = (7, 5)  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    here = Turing(torch.device("cuda"))
    assert AttentionKernel(AttentionKernelSettings()).lacks(here) == "needs compute capability 8.0; Tesla T4 has 7.5"
    assert AttentionKernel(AttentionKernelSettings(kernel="efficient")).lacks(here) is None


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_16_bit_kernels_are_refused_with_attention_in_32_bits(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    technique = AttentionKernel(AttentionKernelSettings(kernel=kernel))
    with pytest.raises(UsageError, match="16 bits"):
        technique.configure(with_techniques(TINY, {"mixed-precision": {"attention": "float32"}}))
    for techniques in ({}, {"mixed-precision": {}}, {"mixed-precision": {"attention": "same"}}):
        config = with_techniques(TINY, techniques)
        assert technique.configure(config) == config


@pytest.mark.parametrize("mixed", [{}, {"mixed-precision": {"dtype": "bf16", "attention": "same"}}])
def test_flash_computes_in_16_bits_on_cuda(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, mixed: dict[str, Any]
) -> None:
    """With the kernel of CPUs, which would also compute in 32 bits."""
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    dtypes: list[torch.dtype] = []
    real = attention_kernel.scaled_dot_product_attention

    def recording(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        dtypes.append(query.dtype)
        return real(query, *others, **options)

    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", recording)
    config = with_techniques(NO_DROPOUT, {"attention-kernel": {}, **mixed})
    with opened(config, tmp_path / "run", data) as run:
        figures = verified_step(run)
        assert figures["attention-kernel"]["kernel"] == "flash"
        assert set(dtypes) == {torch.bfloat16}
        assert ("in bfloat16" in run.techniques.proofs["attention-kernel"].summary) == (not mixed)


def test_flex_with_dropout_is_refused() -> None:
    with pytest.raises(UsageError, match="no dropout"):
        AttentionKernel(AttentionKernelSettings(kernel="flex")).configure(TINY)


def test_kernel_is_read_from_the_autograd_graph() -> None:
    heads = torch.randn(2, 2, 16, 8, requires_grad=True)
    for backend, name in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel([backend]):
            found = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        assert attention_kernel._kernel_of(found.transpose(1, 2).reshape(2, 16, 16)) == name
    assert attention_kernel._kernel_of(torch.ones(2)) == "nothing"
    assert attention_kernel._kernel_of(heads * 2) == "MulBackward0"


def test_mask_of_flex_is_causal() -> None:
    places = torch.arange(4)
    assert torch.equal(
        attention_kernel._causal(places[0], places[0], places.unsqueeze(1), places), torch.ones(4, 4).tril().bool()
    )


def test_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    from tensorkeep.train.techniques.stack import Stack

    with pytest.raises(UsageError, match="attention-kernel: kernel is 'fast'"):
        Stack.of({"attention-kernel": {"kernel": "fast"}})
    with pytest.raises(UnsupportedError, match="attention-kernel needs a CUDA device"):
        Stack.of({"attention-kernel": {"kernel": "efficient"}}).check(Machine(torch.device("cpu")))
