"""Conformance suites of attention kernels on a GPU, in 16 and in 32 bits."""

from pathlib import Path

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, opened, verified_step, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.model.attention import Attention
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.attention_kernel import AttentionKernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

IN_32 = TINY.changed({"loop.device": "cuda", "model.dropout": 0, "model.context_length": 128, "model.d_model": 128})


def other_kernel(run: Run) -> None:
    """Make one block use another kernel."""
    attention: Attention = run.model.blocks[-1].attention  # type: ignore[assignment, union-attr]
    asked = run.config.techniques["attention-kernel"]["kernel"]
    other = SDPBackend.EFFICIENT_ATTENTION if asked == "math" else SDPBackend.MATH

    def kernel(*heads: torch.Tensor, **how: object) -> torch.Tensor:
        with sdpa_kernel([other]):
            return functional.scaled_dot_product_attention(*heads, **how)  # type: ignore[arg-type]

    attention.kernel = kernel


class TestIn16Bits(TechniqueSuite):
    technique = AttentionKernel
    variants = ({"kernel": "flash"}, {"kernel": "cudnn"}, {"kernel": "efficient"}, {"kernel": "flex"})
    config: Config = IN_32.changed({"techniques.mixed-precision.dtype": "bf16"})

    def break_on_purpose(self, run: Run) -> None:
        other_kernel(run)


class TestIn32Bits(TechniqueSuite):
    technique = AttentionKernel
    # Flash and cudnn round the operands themselves.
    variants = ({"kernel": "efficient"}, {"kernel": "math"}, {"kernel": "flash"}, {"kernel": "cudnn"})
    config = IN_32

    def break_on_purpose(self, run: Run) -> None:
        other_kernel(run)


class TestFlashAttention3(TechniqueSuite):
    """Skipped unless the package is installed, on Hopper."""

    technique = AttentionKernel
    variants = ({"kernel": "fa3"},)
    config: Config = IN_32.changed({"techniques.mixed-precision.dtype": "bf16"})

    def break_on_purpose(self, run: Run) -> None:
        """Restore torch's own flash, which looks the same in the graph."""
        torch_attention.restore_flash_attention_impl()


@pytest.mark.parametrize("compiled", [{}, {"compile": {}}])
def test_auto_chooses_a_kernel_that_computes(
    tmp_path: Path, data: Path, compiled: dict[str, dict[str, object]]
) -> None:
    auto = {"mixed-precision": {"dtype": "bf16"}, "attention-kernel": {"kernel": "auto"}}
    config = with_techniques(IN_32, {**auto, **compiled})
    with opened(config, tmp_path / "run", data) as run:
        chosen = run.config.techniques["attention-kernel"]["kernel"]
        assert chosen in ("fa3", "cudnn", "flash")
        assert verified_step(run)["attention-kernel"]["kernel"] == chosen
