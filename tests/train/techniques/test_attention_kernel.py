"""The exams of attention kernels, and torch's ways to another one than was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, losses, train_run, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.generate import generate
from tensorkeep.train.loop import take_step
from tensorkeep.train.model.block import Block
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import attention_kernel
from tensorkeep.train.techniques.attention_kernel import AttentionKernel, AttentionKernelSettings
from tensorkeep.train.techniques.machine import Machine

NO_DROPOUT = TINY.changed({"model.dropout": 0})


def last_block(run: Run) -> Block:
    block: Block = run.model.blocks[-1]  # type: ignore[assignment]
    return block


class TestFlash(TechniqueSuite):
    technique = AttentionKernel
    variants = ({"kernel": "flash"},)
    config = NO_DROPOUT

    def sabotage(self, run: Run) -> None:
        # On a CPU torch goes back to math where there is dropout, without a word.
        attention = last_block(run).attention
        attention.kernel, attention.dropout_p = functional.scaled_dot_product_attention, 0.1

    def test_why_torch_finds_no_kernel_is_told(self, tmp_path: Path, data: Path) -> None:
        """Its reasons are warnings, which are part of the error."""
        config = with_techniques(self.config, {"attention-kernel": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            last_block(run).attention.dropout_p = 0.1
            with (
                pytest.raises(TechniqueNotActiveError, match="do not support non-zero dropout"),
                run.techniques.verified(run),
            ):
                take_step(run)

    def test_generation_with_a_cache_is_not_held_to_it(self, tmp_path: Path, data: Path) -> None:
        """A cache asks for masks, which flash does not have."""
        config = with_techniques(self.config, {"attention-kernel": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            found = generate(run.model, [1, 2, 3], max_new_tokens=4)
            last_block(run).attention.kernel = functional.scaled_dot_product_attention
            assert torch.equal(found, generate(run.model, [1, 2, 3], max_new_tokens=4))

    def test_a_model_with_dropout_is_refused_on_a_cpu(self, tmp_path: Path, data: Path) -> None:
        """Before anything is built."""
        config = with_techniques(TINY, {"attention-kernel": {}})
        with pytest.raises(UsageError, match="no dropout on a CPU"):
            train_run(config, tmp_path / "run", data)


class TestMath(TechniqueSuite):
    technique = AttentionKernel
    variants = ({"kernel": "math"},)
    config = NO_DROPOUT

    def sabotage(self, run: Run) -> None:
        last_block(run).attention.kernel = functional.scaled_dot_product_attention

    def test_dropout_draws_the_same_numbers(self, tmp_path: Path, data: Path) -> None:
        """On a CPU torch itself takes math where there is dropout: the bits are the same."""
        train_run(TINY, tmp_path / "plain", data, stop_after=3)
        train_run(
            with_techniques(TINY, {"attention-kernel": {"kernel": "math"}}), tmp_path / "math", data, stop_after=3
        )
        assert losses(tmp_path / "math") == losses(tmp_path / "plain")

    def test_math_in_16_bits_is_math(self, tmp_path: Path, data: Path) -> None:
        """Torch computes it in 32, and casts what comes out."""
        mixed = {"dtype": "bf16", "attention": "same"}
        both = {"attention-kernel": {"kernel": "math"}, "mixed-precision": mixed}
        with open_run(with_techniques(TINY, both), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            assert run.techniques.proofs["attention-kernel"].figures["kernel"] == "math"

    def test_it_is_seen_where_activations_are_computed_again(self, tmp_path: Path, data: Path) -> None:
        """The graph of gradients of a checkpoint tells it as well."""
        config = with_techniques(TINY, {"attention-kernel": {"kernel": "math"}, "activation-checkpointing": {}})
        with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            with run.techniques.verified(run):
                take_step(run)
            assert run.techniques.proofs["attention-kernel"].figures["kernel"] == "math"


@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "flex"])
def test_kernels_of_cuda_are_refused_on_a_cpu(kernel: str) -> None:
    technique = AttentionKernel(AttentionKernelSettings(kernel=kernel))  # type: ignore[arg-type]
    assert "needs a CUDA device" in str(technique.lacks(Machine(torch.device("cpu"))))


def test_turing_has_no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turing(Machine):
        capability = (7, 5)  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    here = Turing(torch.device("cuda"))
    assert AttentionKernel(AttentionKernelSettings()).lacks(here) == "needs compute capability 8.0; Tesla T4 has 7.5"
    assert AttentionKernel(AttentionKernelSettings(kernel="efficient")).lacks(here) is None


def test_kernels_of_16_bits_are_refused_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    technique = AttentionKernel(AttentionKernelSettings(kernel="cudnn"))
    with pytest.raises(UsageError, match="16 bits"):
        technique.configure(TINY)
    mixed = with_techniques(TINY, {"mixed-precision": {}})
    assert technique.configure(mixed) == mixed


def test_flex_with_dropout_is_refused() -> None:
    with pytest.raises(UsageError, match="no dropout"):
        AttentionKernel(AttentionKernelSettings(kernel="flex")).configure(TINY)


def test_a_kernel_is_known_by_what_it_leaves_in_the_graph() -> None:
    heads = torch.randn(2, 2, 16, 8, requires_grad=True)
    for backend, name in ((SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel([backend]):
            found = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        assert attention_kernel._kernel_of(found.transpose(1, 2).reshape(2, 16, 16)) == name
    assert attention_kernel._kernel_of(torch.ones(2)) == "nothing"
    assert attention_kernel._kernel_of(heads * 2) == "MulBackward0"


def test_the_causal_mask_of_flex_looks_back_only() -> None:
    places = torch.arange(4)
    assert torch.equal(
        attention_kernel._sees(places[0], places[0], places.unsqueeze(1), places), torch.ones(4, 4).tril().bool()
    )


def test_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    from tensorkeep.train.techniques.stack import Stack

    with pytest.raises(UsageError, match="the settings of attention-kernel are not valid"):
        Stack.of({"attention-kernel": {"kernel": "fast"}})
    with pytest.raises(UnsupportedError, match="attention-kernel needs a CUDA device"):
        Stack.of({"attention-kernel": {"kernel": "efficient"}}).check(Machine(torch.device("cpu")))
