"""Batches that fill the memory of a GPU: the largest that fits is chosen, and training then stays within the memory."""

import gc
from pathlib import Path

import pytest
import torch

from chatgot.config.config import Config
from chatgot.data.prepare import prepare
from chatgot.model.config import ModelConfig
from chatgot.run.auto_batch_size import GpuMemory
from chatgot.run.folder import RunFolder
from tiny_training import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

CONFIG = Config(
    recipe="filling", model=ModelConfig(vocab_size=8192, context_length=512, n_layers=8, n_heads=8, d_model=512)
).changed(
    {
        "loop.batch_size": 4,
        "loop.gradient_accumulation_steps": 32,
        "loop.steps": 2,
        "loop.device": "cuda",
        "loop.auto_batch_size": True,
    }
    | {"eval.every": 0, "checkpoint.every": 0, "techniques.mixed-precision.dtype": "bf16"}
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 2000)
    return prepare(folder / "text.txt", folder / "prepared", tokenizer="byte").path


@pytest.mark.parametrize("techniques", [{}, {"techniques.compile": "on"}, {"techniques.cuda-graphs": "on"}])
def test_training_stays_within_the_memory(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, techniques: dict[str, object]
) -> None:
    limit = 6 * 1000**3
    monkeypatch.setattr(GpuMemory, "available", lambda memory: limit)
    run(CONFIG.changed(techniques), tmp_path / "run", data)
    chosen = RunFolder(tmp_path / "run").record().config.loop
    assert 4 < chosen.batch_size < 128 and chosen.batch_size * chosen.accumulate == 128
    # The next divisor would not have fitted.
    assert 0.4 * limit < torch.cuda.max_memory_allocated() < limit


def test_memory_is_given_back(tmp_path: Path, data: Path) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    run(CONFIG.changed({"loop.gradient_accumulation_steps": 1}), tmp_path / "run", data)
    assert RunFolder(tmp_path / "run").record().config.loop.batch_size == 4
    # A run is garbage in cycles.
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 64 * 1000**2
