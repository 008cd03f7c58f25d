"""Techniques on a GPU: their conformance suites, and what only a GPU shows."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from chatgot.config.config import Config
from chatgot.data.prepare import prepare
from chatgot.model.gpt import token_loss
from chatgot.optim.optimizers import build_optimizers
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.attention_kernel import AttentionKernel
from chatgot.techniques.compile import Compile
from chatgot.techniques.cuda_graphs import CudaGraphs
from chatgot.techniques.experimental.activation_swapping import ActivationSwapping, Swapper
from chatgot.techniques.experimental.quantised_forward import QuantisedForward
from chatgot.techniques.experimental.sparse_attention import TopBlocks, count_kept_pairs
from chatgot.techniques.fused_cross_entropy import FusedCrossEntropy, linear_cross_entropy
from chatgot.techniques.fused_optimizer import FusedOptimizer
from chatgot.techniques.low_bit_optimizer import LowBitOptimizer
from chatgot.techniques.optimizer_offload import HostOptimizer, OptimizerOffload
from chatgot.techniques.tf32 import Tf32
from chatgot.techniques.triton_kernel import TritonKernel
from chatgot.testing import (
    TINY,
    TechniqueSuite,
    losses,
    opened,
    train_run,
    trained,
    verified_step,
    with_techniques,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

ON_CUDA = TINY.changed({"loop.device": "cuda"})
IN_32_BITS = ON_CUDA.changed({"model.dropout": 0, "model.context_length": 128, "model.d_model": 128})
IN_16_BITS = IN_32_BITS.changed({"techniques.mixed-precision.dtype": "bf16"})
TOKENS, WIDTH, VOCABULARY = 8192, 256, 32000


class Suite(TechniqueSuite):
    config: Config = ON_CUDA


class OfPlainLoss(Suite):
    def break_on_purpose(self, run: StepState) -> None:
        """Compute the loss of the model, without hooks, graphs or compiled code."""
        run.operations.loss = run.model.loss


class OfOptimizer(Suite):
    def break_on_purpose(self, run: StepState) -> None:
        """Use torch's optimizer, with its states on the GPU."""
        run.optimizers["adamw"] = build_optimizers(run.model, run.config.optim)["adamw"]


class TestActivationSwapping(OfPlainLoss):
    technique = ActivationSwapping
    variants: tuple[Mapping[str, Any], ...] = ({"least": 64}, {"least": 64, "ahead": 0}, {"pool": False})


class TestOptimizerOffload(OfOptimizer):
    technique = OptimizerOffload


class TestLowBitOptimizer(OfOptimizer):
    """Compiled."""

    technique = LowBitOptimizer
    variants = ({}, {"bits": 4})


@pytest.mark.exhaustive
class TestCompile(OfPlainLoss):
    technique = Compile
    variants = ({}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"fullgraph": True})
    config = ON_CUDA.changed({"loop.gradient_accumulation_steps": 1})


@pytest.mark.exhaustive
class TestCompileOfSeveralBatches(OfPlainLoss):
    technique = Compile
    variants = ({}, {"mode": "max-autotune"})


class TestCudaGraphs(OfPlainLoss):
    technique = CudaGraphs

    def test_gpu_runs_graphs_instead_of_single_matmuls(self, tmp_path: Path, data: Path) -> None:
        """After the first step, the CPU launches two graphs for each batch."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            take_step(run)
            with torch.profiler.profile() as profile:
                take_step(run)
            started = {each.key: each.count for each in profile.key_averages()}
        assert started["cudaGraphLaunch"] == 2 * run.config.loop.gradient_accumulation_steps
        assert not {"aten::mm", "aten::addmm"} & set(started)


class TestCudaGraphsInFloat16(TestCudaGraphs):
    config = with_techniques(ON_CUDA, {"mixed-precision": {"dtype": "fp16"}})


class TestCudaGraphsOfCompiledCode(TestCudaGraphs):
    config = with_techniques(ON_CUDA, {"compile": {}})


class TestFusedCrossEntropy(Suite):
    technique = FusedCrossEntropy

    def break_on_purpose(self, run: StepState) -> None:
        """Call the model's own loss."""
        del run.model.loss


class TestFusedOptimizer(Suite):
    technique = FusedOptimizer

    def break_on_purpose(self, run: StepState) -> None:
        """Make one group use the implementation with many kernels."""
        group = run.optimizers["adamw"].param_groups[-1]
        group["fused"], group["foreach"] = False, True

    def test_it_works_with_a_scaler(self, tmp_path: Path, data: Path) -> None:
        """Whose first update is skipped."""
        both = {"fused-optimizer": {}, "mixed-precision": {"dtype": "fp16"}}
        train_run(with_techniques(self.config, both), tmp_path / "run", data)
        assert losses(tmp_path / "run")[-1][0] == self.config.loop.steps


class TestFloat8(Suite):
    technique = QuantisedForward
    variants = ({"mode": "float8"},)
    config = with_techniques(ON_CUDA.changed({"model.d_model": 64, "model.context_length": 64}), {"compile": {}})

    def config_with(self, variant: Mapping[str, Any]) -> Config:
        return with_techniques(self.config, {"quantised-forward": variant})

    def break_on_purpose(self, run: StepState) -> None:
        """Restore the plain layer in one place."""
        mlp: Any = run.model.blocks[0].mlp
        up = nn.Linear(mlp.up.in_features, mlp.up.out_features, device="meta")
        up.weight, up.bias = mlp.up.weight, mlp.up.bias
        mlp.up = up

    def test_losses_are_close_to_float32(self, data: Path) -> None:
        configs = (self.config, self.config_with(self.variants[0]))
        plain, found = ([loss for *_, loss in losses(trained(each, data))] for each in configs)
        assert found != plain
        assert found == pytest.approx(plain, rel=0.03)


class TestTf32(Suite):
    technique = Tf32
    # Without dropout: its kernels may draw other numbers.
    config = ON_CUDA.changed({"model.dropout": 0})

    def break_on_purpose(self, run: StepState) -> None:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


class TestTritonKernel(Suite):
    technique = TritonKernel
    config = ON_CUDA.changed({"model.activation": "swiglu"})

    def break_on_purpose(self, run: StepState) -> None:
        """Leave the kernel on in the last block only."""
        for block in list(run.model.blocks)[:-1]:
            del block.mlp.forward  # type: ignore[union-attr]


class TestAttentionIn16Bits(Suite):
    technique = AttentionKernel
    variants: tuple[Mapping[str, Any], ...] = (
        {"kernel": "flash"},
        {"kernel": "cudnn"},
        {"kernel": "efficient"},
        {"kernel": "flex"},
    )
    config = IN_16_BITS

    def break_on_purpose(self, run: StepState) -> None:
        """Make one block use another kernel."""
        asked = run.config.techniques["attention-kernel"]["kernel"]
        other = SDPBackend.EFFICIENT_ATTENTION if asked == "math" else SDPBackend.MATH

        def kernel(*heads: torch.Tensor, **how: object) -> torch.Tensor:
            with sdpa_kernel([other]):
                return scaled_dot_product_attention(*heads, **how)  # type: ignore[arg-type]

        run.model.attentions[-1].kernel = kernel


class TestAttentionIn32Bits(TestAttentionIn16Bits):
    # Flash and cudnn round the operands themselves.
    variants = ({"kernel": "efficient"}, {"kernel": "math"}, {"kernel": "flash"}, {"kernel": "cudnn"})
    config = IN_32_BITS


class TestFlashAttention3(Suite):
    """Skipped unless the package is installed, on Hopper."""

    technique = AttentionKernel
    variants = ({"kernel": "fa3"},)
    config = IN_16_BITS

    def break_on_purpose(self, run: StepState) -> None:
        """Restore torch's own flash, which looks the same in the graph."""
        torch_attention.restore_flash_attention_impl()


@pytest.mark.parametrize("compiled", [{}, {"compile": {}}])
def test_auto_chooses_a_kernel_that_computes(
    tmp_path: Path, data: Path, compiled: dict[str, dict[str, object]]
) -> None:
    auto = {"mixed-precision": {"dtype": "bf16"}, "attention-kernel": {"kernel": "auto"}}
    with opened(with_techniques(IN_32_BITS, {**auto, **compiled}), tmp_path / "run", data) as run:
        chosen = run.config.techniques["attention-kernel"]["kernel"]
        assert chosen in ("fa3", "cudnn", "flash")
        assert verified_step(run)["attention-kernel"]["kernel"] == chosen


@pytest.mark.exhaustive
def test_compilation_proof_takes_no_more_memory_than_later_steps(tmp_path: Path, data: Path) -> None:
    """A whole batch in plain Python would need what a run without compilation needs."""
    wide = {
        "model.vocab_size": 8192,
        "model.context_length": 256,
        "loop.batch_size": 64,
        "loop.gradient_accumulation_steps": 1,
    }
    config = with_techniques(TestCompile.config.changed(wide), {"compile": {}, "fused-optimizer": {}})
    with opened(config, tmp_path / "run", data) as run:
        peaks = []
        for step in (verified_step, take_step):
            torch.cuda.reset_peak_memory_stats()
            step(run)  # type: ignore[operator]
            peaks.append(torch.cuda.max_memory_allocated())
        assert peaks[0] < 1.1 * peaks[1]


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
    del found, live
    assert torch.cuda.memory_allocated() == before
    assert all(each.gradient.is_pinned() and each.master.is_pinned() for each in host._weights)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh(), nn.LayerNorm(512))]
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
        inputs = torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        expected = gradients(model, inputs, nullcontext())
        with torch.cuda.stream(getattr(swapper, lagging)):
            torch.cuda._sleep(100_000_000)
        found = gradients(model, inputs, swapper.hooks())
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_gpu_memory_of_activations_is_freed() -> None:
    model = network()
    inputs = torch.randn(4096, 512, device="cuda")
    kept = []
    for hooks in (nullcontext(), Swapper(torch.device("cuda"), list(model.parameters()), least=1, ahead=2).hooks()):
        before = torch.cuda.memory_allocated()
        with hooks:
            loss = model(inputs).square().sum()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss
    assert kept[1] < kept[0] / 4


@pytest.mark.parametrize(("block", "keep"), [(64, 4), (128, 2), (48, 3)])
def test_compiled_tiles_equal_the_mask(block: int, keep: int) -> None:
    generator = torch.Generator().manual_seed(block)
    kernel = TopBlocks(block, keep)
    kernel.pairs = []
    inputs = torch.randn(3, 2, 4, 2048, 64, generator=generator).cuda().requires_grad_()
    query, key, value = inputs
    expected = scaled_dot_product_attention(query, key, value, attn_mask=kernel.visible(query, key))
    found = kernel(query, key, value, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(each.square().sum(), inputs, retain_graph=True)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    assert (kernel.pairs[0] == count_kept_pairs(2048, block, keep)).all()


PLAIN = {
    "relu2": lambda gate, up: functional.relu(gate).square(),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PLAIN)
def test_values_and_gradients_equal_torch(kind: str, dtype: torch.dtype) -> None:
    from chatgot.techniques.triton_activations import activation

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


TRAIN = """
import os, sys, torch
torch.ones(1, device="cuda")
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
from pathlib import Path
from chatgot.testing import TINY, verified_step, with_techniques
from chatgot.data.dataset import Dataset
from chatgot.step.train_step import take_step
from chatgot.run.setup import open_run
from chatgot.run.folder import RunFolder
config = with_techniques(TINY.changed({"loop.device": "cuda"}), {"allocator": {}})
with open_run(config, RunFolder(Path(sys.argv[2])), Dataset.open(Path(sys.argv[1]))) as run:
    verified_step(run)
    print(run.techniques.proofs["allocator"].summary)
"""


def trained_by_a_process(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "data", tokenizer="char")
    command = [sys.executable, "-c", TRAIN, str(folder / "data"), str(folder / "run")]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_segments_are_expandable_with_the_environment(tmp_path: Path) -> None:
    found = trained_by_a_process(tmp_path, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert "segments are expandable" in found.stdout, found.stderr


def test_environment_that_is_set_too_late_is_an_error(tmp_path: Path) -> None:
    found = trained_by_a_process(tmp_path, {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""})
    assert "expandable_segments=False instead of True" in found.stderr
