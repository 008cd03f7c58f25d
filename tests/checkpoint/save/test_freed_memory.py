"""Tensors whose memory was freed, as FSDP does between its forward passes: an error, not a crash."""

from functools import partial
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.testing.cases import case


def freed() -> torch.Tensor:
    flat = torch.arange(2048.0)
    view = flat[1024:2048]
    flat.untyped_storage().resize_(0)
    return view


def test_a_save_and_a_load_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    refused = partial(pytest.raises, tensorkeep.UnsupportedLeafError, match="freed or made smaller")
    for format in ("native", "safetensors", "torch", "dcp", "t5x"):
        for save in (tensorkeep.save, tensorkeep.save_async):
            with case((format, save.__name__)), refused():
                save({"a": torch.ones(3), "w": freed()}, tmp_path / "c", format=format)
    assert not any(tmp_path.iterdir())
    tensorkeep.save({"w": torch.ones(1024)}, tmp_path / "c")
    with refused():
        tensorkeep.load(tmp_path / "c", into={"w": freed()})
