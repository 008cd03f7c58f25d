"""Conformance suite of CUDA graphs on a GPU, alone and with other techniques."""

from pathlib import Path

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, opened, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.cuda_graphs import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ON_CUDA = TINY.changed({"loop.device": "cuda"})


class TestCudaGraphs(TechniqueSuite):
    technique = CudaGraphs
    config: Config = ON_CUDA

    def break_on_purpose(self, run: Run) -> None:
        run.operations.loss = run.model.loss

    def test_gpu_runs_graphs_instead_of_single_matmuls(self, tmp_path: Path, data: Path) -> None:
        """After the first step, the CPU launches two graphs for each batch."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            take_step(run)
            with torch.profiler.profile() as profile:
                take_step(run)
            started = {each.key: each.count for each in profile.key_averages()}
        assert started["cudaGraphLaunch"] == 2 * run.config.loop.accumulate
        assert not {"aten::mm", "aten::addmm"} & set(started)


class TestInFloat16(TestCudaGraphs):
    config = with_techniques(ON_CUDA, {"mixed-precision": {"dtype": "fp16"}})


class TestCompiled(TestCudaGraphs):
    config = with_techniques(ON_CUDA, {"compile": {}})
