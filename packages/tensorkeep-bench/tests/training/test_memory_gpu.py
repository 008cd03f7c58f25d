"""The ledger against what the CUDA allocator counts: the peak, and what checkpointing and 8-bit states spare of it."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.config.config import Config
from chatgot.data.prepare import prepare
from chatgot.memory import predict
from chatgot.model.config import ModelConfig
from tensorkeep_bench.training.cell import train_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

CONFIG = Config(
    recipe="ledger", model=ModelConfig(vocab_size=8192, context_length=512, n_layers=8, n_heads=8, d_model=512)
).changed({"loop.batch_size": 16, "loop.device": "cuda", "checkpoint.every": 0})
BF16 = {"techniques.mixed-precision.dtype": "bf16"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    # As many characters as the model has tokens: logits of more are left out of the loss.
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + CONFIG.model.vocab_size)))
    (folder / "text.txt").write_text(characters * 12)
    return prepare(folder / "text.txt", folder / "prepared", tokenizer="char").path


def peak(settings: dict[str, Any], data: Path, folder: Path) -> tuple[int, int]:
    """Return the peak that was predicted, and the one of a few steps."""
    config = CONFIG.changed(settings)
    # An earlier run is garbage in cycles, which would be added to this peak, or taken off it.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    losses = train_steps(config, data, 1, folder / "first")
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    losses += train_steps(config, data, 3, folder / "then")
    assert all(loss < 20 for loss in losses)
    return predict(config, device="cuda").peak, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("settings", [{}, BF16, {"model.dropout": 0.1}, {**BF16, "model.activation": "swiglu"}])
def test_the_peak_is_predicted_within_a_tenth(settings: dict[str, Any], data: Path, tmp_path: Path) -> None:
    predicted, measured = peak(settings, data, tmp_path)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "technique", [{"techniques.activation-checkpointing": "on"}, {"techniques.low-bit-optimizer.bits": 8}]
)
def test_saving_of_a_technique_is_predicted_within_a_tenth_of_the_peak(
    technique: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    if "techniques.low-bit-optimizer.bits" in technique:
        pytest.importorskip("torchao")
    plain, on = (peak({**BF16, **each}, data, tmp_path / str(len(each))) for each in ({}, technique))
    spared = plain[0] - on[0]
    assert spared > 0
    assert spared == pytest.approx(plain[1] - on[1], abs=0.1 * plain[1])
