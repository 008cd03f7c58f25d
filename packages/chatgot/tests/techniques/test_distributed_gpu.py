"""Techniques for several processes on GPUs: with one process, and with two where there are two GPUs."""

from pathlib import Path

import pytest
import torch

from chatgot.config.config import Config
from chatgot.techniques.distributed import PARALLEL_TECHNIQUES
from chatgot.testing import STEPS, last_state, losses, train_run
from techniques.several_processes import EXACT, ProcessPool, task
from tensorkeep.testing.equality import difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ON_CUDA = EXACT.changed({"loop.device": "cuda"})

sizes = pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"))],
)


def together(name: str, size: int = 1) -> Config:
    if name == "hsdp" and size == 2:
        pytest.skip("hsdp needs four GPUs")
    return ON_CUDA.changed({f"techniques.{name}": "on"})


@sizes
@pytest.mark.parametrize("name", PARALLEL_TECHNIQUES)
def test_processes_compute_the_same_as_one(name: str, size: int, tmp_path: Path, data: Path) -> None:
    config = together(name, size)
    train_run(ON_CUDA, tmp_path / "alone", data)
    with ProcessPool(size, tmp_path, cuda=True) as pool:
        pool.run({"run": task("train", config, tmp_path / "run", data)})
    alone, found = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert [each[2] for each in found] == pytest.approx([each[2] for each in alone], rel=1e-3)


@sizes
@pytest.mark.parametrize("name", PARALLEL_TECHNIQUES)
def test_resume_is_exact(name: str, size: int, tmp_path: Path, data: Path) -> None:
    config = together(name, size).changed({"model.dropout": 0.1})
    tasks = {
        "whole": task("train", config, tmp_path / "whole", data),
        "first half": task("train", config, tmp_path / "parts", data, stop_after=STEPS // 2),
        "second half": task("train", config, tmp_path / "parts", data, resume=True),
    }
    with ProcessPool(size, tmp_path, cuda=True) as pool:
        pool.run(tasks)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


@pytest.mark.parametrize("name", PARALLEL_TECHNIQUES)
def test_it_works_in_16_bits_and_with_the_fused_optimizer(name: str, tmp_path: Path, data: Path) -> None:
    config = together(name).changed({"techniques.mixed-precision.dtype": "bf16"})
    if name != "pipeline-parallel":
        config = config.changed({"techniques.fused-optimizer": "on"})
    with ProcessPool(1, tmp_path, cuda=True) as pool:
        (results,) = pool.run({"step": task("step", config, tmp_path / "run", data)})
    assert set(results["step"]["proofs"]) == set(config.techniques)
