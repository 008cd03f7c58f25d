"""Attention kernels: conformance suites, and cases in which torch uses another kernel."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from chatgot.generate import generate
from chatgot.model.gpt import TransformerBlock
from chatgot.step.state import StepState
from chatgot.techniques import attention_kernel
from chatgot.techniques.attention_kernel import AttentionKernel, AttentionKernelSettings, matmul_attention
from chatgot.techniques.base import Machine
from chatgot.testing import TINY, TechniqueSuite, losses, opened, trained, verified_step
from tensorkeep.errors import TechniqueNotActiveError

NO_DROPOUT = TINY.changed({"model.dropout": 0})
WITH_FA3 = NO_DROPOUT.changed({"techniques.attention-kernel.kernel": "fa3"})
MIXED = {"techniques.mixed-precision": {"dtype": "bf16", "attention": "same"}}


def last_block(run: StepState) -> TransformerBlock:
    block: TransformerBlock = run.model.blocks[-1]  # type: ignore[assignment]
    return block


class Suite(TechniqueSuite):
    technique = AttentionKernel
    config = NO_DROPOUT

    def break_on_purpose(self, run: StepState) -> None:
        last_block(run).attention.kernel = functional.scaled_dot_product_attention


class TestFlash(Suite):
    variants = ({"kernel": "flash"},)

    def break_on_purpose(self, run: StepState) -> None:
        # With dropout, torch silently falls back to math on a CPU.
        attention = last_block(run).attention
        attention.kernel, attention.dropout_p = functional.scaled_dot_product_attention, 0.1

    def test_error_has_the_reasons_of_torch(self, tmp_path: Path, data: Path) -> None:
        """torch gives its reasons as warnings."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            last_block(run).attention.dropout_p = 0.1
            with pytest.raises(TechniqueNotActiveError, match="do not support non-zero dropout"):
                verified_step(run)

    def test_generation_with_a_cache_uses_any_kernel(self, tmp_path: Path, data: Path) -> None:
        """A cache needs masks, which flash does not support."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            found = generate(run.model, [1, 2, 3], max_new_tokens=4)
            last_block(run).attention.kernel = functional.scaled_dot_product_attention
            assert torch.equal(found, generate(run.model, [1, 2, 3], max_new_tokens=4))


class TestMath(Suite):
    variants = ({"kernel": "math"},)

    def test_dropout_draws_the_same_numbers(self, data: Path) -> None:
        """With dropout, torch uses math on a CPU anyway: the losses are bit-identical."""
        math = TINY.changed({"techniques.attention-kernel.kernel": "math"})
        assert losses(trained(math, data)) == losses(trained(TINY, data))


@pytest.mark.parametrize(
    ("kernel", "beside"),
    [
        # torch computes math in 32 bits, and casts the result.
        ("math", MIXED),
        ("matmul", MIXED),
        # The autograd graph of a checkpointed block has the kernel too.
        ("math", {"techniques.activation-checkpointing": "on"}),
    ],
)
def test_kernel_is_recognised_beside(tmp_path: Path, data: Path, kernel: str, beside: dict[str, Any]) -> None:
    config = NO_DROPOUT.changed({"techniques.attention-kernel.kernel": kernel, **beside})
    with opened(config, tmp_path / "run", data) as run:
        figures = verified_step(run)
    assert figures["attention-kernel"]["kernel"] == kernel
    if beside == MIXED:
        assert figures["mixed-precision"]["attention"] == "torch.bfloat16"


class TestMatmul(Suite):
    variants = ({"kernel": "matmul"},)

    def test_attention_and_its_gradient_are_those_of_torch(self) -> None:
        heads = [torch.randn(2, 1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        causal = partial(matmul_attention, is_causal=True)
        expected = functional.scaled_dot_product_attention(*heads, is_causal=True)
        torch.testing.assert_close(causal(*heads), expected)
        assert torch.autograd.gradcheck(causal, heads)
        mask = torch.rand(2, 1, 6, 6) > 0.5
        mask[..., 0] = True
        masked = partial(matmul_attention, attn_mask=mask)
        torch.testing.assert_close(masked(*heads), functional.scaled_dot_product_attention(*heads, attn_mask=mask))
        assert torch.autograd.gradcheck(masked, heads)

    def test_scores_have_32_bits_under_autocast(self) -> None:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, 2, 64, 32, generator=generator).bfloat16() for _ in range(3))
        query.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = matmul_attention(8 * query, key, value, is_causal=True)
        doubles = [each.double() for each in (8 * query, key, value)]
        exact = functional.scaled_dot_product_attention(*doubles, is_causal=True)
        assert torch.equal(found, matmul_attention(8 * query, key, value, is_causal=True))
        # Scores of 16 bits, up to about 30, would be off by up to 0.06, and so would the shares.
        assert (found - exact).abs().max() < 0.015


@pytest.mark.parametrize("mixed", [{}, MIXED])
def test_flash_on_cuda_has_16_bits(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, mixed: Any) -> None:
    """With the kernel of CPUs, which would also compute in 32 bits."""
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    dtypes: list[torch.dtype] = []
    real = attention_kernel.scaled_dot_product_attention

    def recording(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        dtypes.append(query.dtype)
        return real(query, *others, **options)

    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", recording)
    with opened(NO_DROPOUT.changed({"techniques.attention-kernel": "on", **mixed}), tmp_path / "run", data) as run:
        figures = verified_step(run)
        assert figures["attention-kernel"]["kernel"] == "flash"
        assert set(dtypes) == {torch.bfloat16}
        assert ("in bfloat16" in run.techniques.proofs["attention-kernel"].summary) == (not mixed)


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
    mask = attention_kernel._causal(places[0], places[0], places.unsqueeze(1), places)
    assert torch.equal(mask, torch.ones(4, 4).tril().bool())


class Gpu(Machine):
    """A GPU of some compute capability, on which packages are installed."""

    capability = (9, 0)  # type: ignore[assignment]
    packages = True

    def missing_package(self, module: str, *, install: str) -> str | None:
        return None if self.packages else super().missing_package(module, install=install)


WithoutPackages = type("WithoutPackages", (Gpu,), {"packages": False})
Turing, Ampere, Blackwell = (type("Other", (Gpu,), {"capability": each}) for each in ((7, 5), (8, 0), (10, 0)))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    # Older ones have no FlashAttention-3 with a gradient.
    monkeypatch.setattr(torch, "__version__", "2.13.0")


@pytest.mark.parametrize(
    ("machine", "changes", "chosen"),
    [
        (Gpu, {}, "fa3"),
        (Gpu, {"model.dropout": 0.1}, "cudnn"),
        (WithoutPackages, {}, "cudnn"),
        (Blackwell, {}, "cudnn"),
        (Ampere, {}, "flash"),
        (Turing, {}, "efficient"),
        # Heads of 20, and of 256.
        (Gpu, {"model.d_model": 40}, "math"),
        (Gpu, {"model.d_model": 512}, "efficient"),
        (Gpu, {"techniques.mixed-precision.attention": "float32"}, "efficient"),
        # What is asked for in 32 bits is not rounded.
        *((machine, {"techniques.mixed-precision": "off"}, "efficient") for machine in (Gpu, Ampere, Turing)),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_auto_chooses(monkeypatch: pytest.MonkeyPatch, machine: Any, changes: dict[str, object], chosen: str) -> None:
    """By the GPU and the model."""
    monkeypatch.setattr(attention_kernel, "Machine", machine)
    technique = AttentionKernel(AttentionKernelSettings(kernel="auto"))
    mixed = {"techniques.mixed-precision.dtype": "bf16", "techniques.attention-kernel.kernel": "auto"}
    config = technique.configure(NO_DROPOUT.changed({**mixed, **changes}))
    assert config.techniques["attention-kernel"] == {"kernel": chosen}
    # As a resumed run does.
    again = AttentionKernel(AttentionKernelSettings(kernel=chosen))  # type: ignore[arg-type]
    assert again.configure(config) == config


@pytest.mark.parametrize(("dropout", "chosen"), [(0.0, "flash"), (0.1, "math")])
def test_auto_on_a_cpu_takes_what_torch_takes(tmp_path: Path, data: Path, dropout: float, chosen: str) -> None:
    config = TINY.changed({"model.dropout": dropout, "techniques.attention-kernel.kernel": "auto"})
    with opened(config, tmp_path / "run", data) as run:
        assert verified_step(run)["attention-kernel"]["kernel"] == chosen


@pytest.mark.parametrize(
    ("kernel", "machine", "lack"),
    [
        ("efficient", Turing, "None"),
        ("flash", Turing, "needs compute capability 8.0; a GPU has 7.5"),
        ("fa3", Gpu, "None"),
        ("fa3", Ampere, "needs compute capability 9.0; a GPU has 8.0"),
        ("fa3", Blackwell, "computes with fa3 on compute capability 9.0 only; this GPU has 10.0"),
        ("fa3", WithoutPackages, "needs the package 'flash_attn_interface', which is missing"),
    ],
)
def test_what_kernels_need(on_cuda: None, kernel: Any, machine: type[Machine], lack: str) -> None:
    technique = AttentionKernel(AttentionKernelSettings(kernel=kernel))
    assert str(technique.missing(machine(torch.device("cuda")))).startswith(lack)


def test_fa3_needs_a_version_of_torch_with_its_gradient(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    technique = AttentionKernel(AttentionKernelSettings(kernel="fa3"))
    assert technique.missing(Gpu(torch.device("cuda"))) == "needs torch 2.13 for fa3; torch is 2.12.1+cu130"


@pytest.fixture
def fa3(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand in for FlashAttention-3: an operator that is called beside torch's flash for CPUs; return what happens."""
    events: list[str] = []
    real = attention_kernel.scaled_dot_product_attention

    def with_operator(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        if events == ["FA3"]:
            torch.ops.flash_attn_3.fwd(query.detach())
        return real(query, *others, **options)

    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", with_operator)
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", events.append)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", lambda: events.append("restored"))
    monkeypatch.setattr(AttentionKernel, "missing", lambda technique, machine: None)
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define("fwd(Tensor query) -> Tensor")
        library.impl("fwd", lambda query: query.clone(), "CPU")
        yield events


def test_fa3_is_active_in_the_run_and_proved_by_its_operator(tmp_path: Path, data: Path, fa3: list[str]) -> None:
    with opened(WITH_FA3, tmp_path / "run", data) as run:
        assert fa3 == ["FA3"]
        assert verified_step(run)["attention-kernel"] == {"kernel": "fa3", "times": 4}
    assert fa3 == ["FA3", "restored"]


def test_fa3_that_does_not_compute_is_an_error(tmp_path: Path, data: Path, fa3: list[str]) -> None:
    """Without its operator, torch's own flash computes, which looks the same in the graph."""
    with opened(WITH_FA3, tmp_path / "run", data) as run:
        fa3.clear()
        with pytest.raises(TechniqueNotActiveError, match="of 4 calls of attention, FlashAttention-3 computed 0"):
            verified_step(run)


@pytest.mark.usefixtures("fa3")
def test_inputs_that_fa3_refuses_are_an_error(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*heads: torch.Tensor, **options: Any) -> torch.Tensor:
        raise RuntimeError("FA3 SDPA forward unsupported: inputs must share device")

    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", refuse)
    refused = pytest.raises(TechniqueNotActiveError, match=r"torch could not use it\. FA3 SDPA forward unsupported")
    with opened(WITH_FA3, tmp_path / "run", data) as run, refused:
        verified_step(run)
