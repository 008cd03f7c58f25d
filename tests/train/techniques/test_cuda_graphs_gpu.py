"""The exam of CUDA graphs on a GPU, alone and with what it records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, with_techniques
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
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

    def sabotage(self, run: Run) -> None:
        run.operations.loss = run.model.loss

    def test_the_gpu_is_given_graphs_and_no_single_products(self, tmp_path: Path, data: Path) -> None:
        """In a step after the first one, the CPU starts two graphs for each batch."""
        with open_run(self.on({}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
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
