"""Several processes that train together, each with a GPU of its own: by one process, and by two where there are two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import STEPS, last_state, losses, train_run
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.techniques.parallel import TOGETHER
from train.techniques.several_processes import EXACT, task, trained_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ON_CUDA = EXACT.changed({"loop.device": "cuda"})

sizes = pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"))],
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


def together(name: str) -> Config:
    return ON_CUDA.changed({f"techniques.{name}": "on"})


@sizes
@pytest.mark.parametrize("name", TOGETHER)
def test_processes_compute_what_one_does(name: str, size: int, tmp_path: Path, data: Path) -> None:
    train_run(ON_CUDA, tmp_path / "alone", data)
    trained_by(size, [task("train", together(name), tmp_path / "run", data)], tmp_path, cuda=True)
    alone, found = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert [each[2] for each in found] == pytest.approx([each[2] for each in alone], rel=1e-3)


@sizes
@pytest.mark.parametrize("name", TOGETHER)
def test_a_run_goes_on_exactly(name: str, size: int, tmp_path: Path, data: Path) -> None:
    config = together(name).changed({"model.dropout": 0.1})
    tasks = [
        task("train", config, tmp_path / "whole", data),
        task("train", config, tmp_path / "parts", data, stop_after=STEPS // 2),
        task("train", config, tmp_path / "parts", data, resume=True),
    ]
    trained_by(size, tasks, tmp_path, cuda=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


@pytest.mark.parametrize("name", TOGETHER)
def test_it_works_in_16_bits_and_with_the_fused_optimizer(name: str, tmp_path: Path, data: Path) -> None:
    config = together(name).changed({"techniques.mixed-precision.dtype": "bf16"})
    if name != "pipeline-parallel":
        config = config.changed({"techniques.fused-optimizer": "on"})
    said = trained_by(1, [task("step", config, tmp_path / "run", data)], tmp_path, cuda=True)
    assert set(said[0][0]["proofs"]) == set(config.techniques)
