"""Saving and loading inside a CUDA stream of the caller."""

from pathlib import Path

import pytest
import torch

import tensorkeep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


def busy() -> None:
    """Keep the current stream busy for some tenths of a second."""
    torch.cuda._sleep(1_000_000_000)


def test_save_on_a_side_stream_has_the_last_step(tmp_path: Path) -> None:
    weight = torch.zeros(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        weight.fill_(3)
        tensorkeep.save({"w": weight, "t": weight.T[:7]}, tmp_path / "c")
    found = tensorkeep.load(tmp_path / "c")
    assert (found["w"] == 3).all()
    assert (found["t"] == 3).all()


def test_load_waits_for_kernels_that_use_the_tensors(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.full((1024, 1024), 5.0)}, tmp_path / "c")
    weight = torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        before = weight * 2
        weight.zero_()
        tensorkeep.load(tmp_path / "c", into={"w": weight})
        after = weight + 1
    torch.cuda.synchronize()
    assert (before == 2).all()
    assert (after == 6).all()


def test_strided_tensors_are_complete_when_load_returns(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.arange(1024.0 * 1024).reshape(1024, 1024)}, tmp_path / "c")
    weight = torch.zeros(1024, 1024, device="cuda").T
    with torch.cuda.stream(torch.cuda.Stream()):
        tensorkeep.load(tmp_path / "c", into={"w": weight})
        found = weight.clone()
    torch.cuda.synchronize()
    assert torch.equal(found.cpu(), torch.arange(1024.0 * 1024).reshape(1024, 1024))
