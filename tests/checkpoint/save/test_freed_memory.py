"""Tensors whose memory was freed, as FSDP does between its forward passes: an error, not a crash."""

from pathlib import Path

import pytest
import torch

import tensorkeep


def freed() -> torch.Tensor:
    flat = torch.arange(2048.0)
    view = flat[1024:2048]
    flat.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("format", ["native", "safetensors", "torch", "dcp", "t5x"])
def test_a_save_is_refused_and_leaves_nothing(format: str, tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="freed or made smaller"):
        tensorkeep.save({"a": torch.ones(3), "w": freed()}, tmp_path / "c", format=format)
    assert not any(tmp_path.iterdir())


def test_a_background_save_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="freed or made smaller"):
        tensorkeep.save_async({"w": freed()}, tmp_path / "c").wait()
    assert not any(tmp_path.iterdir())


def test_a_load_into_it_is_refused(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.ones(1024)}, tmp_path / "c")
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="freed or made smaller"):
        tensorkeep.load(tmp_path / "c", into={"w": freed()})
