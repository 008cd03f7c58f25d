"""Saving in the background from CUDA devices."""

import time
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.storage.buffers import BufferPool, CudaPageLock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

MIB = 1024**2


def test_staging_buffers_are_page_locked_and_unlocked() -> None:
    pool = BufferPool(64 * MIB, page_lock=CudaPageLock())
    with pool.acquire(16 * MIB) as array:
        view = torch.from_numpy(array)
        assert view.is_pinned()
    pool.close()
    assert not view.is_pinned()


def test_the_state_at_the_call_is_saved(tmp_path: Path) -> None:
    weights = {f"w{n}": torch.full((4096, 1024), float(n), device="cuda") for n in range(16)}
    weights["strided"] = weights["w3"].T[::2]
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(200_000_000)
                for n in range(16):
                    weights[f"w{n}"].fill_(n + 100.0 * step)
                manager.save(step, weights)
                for n in range(16):
                    weights[f"w{n}"].zero_()
        manager.wait()
        for step in (1, 2):
            found = manager.restore(step)
            assert all((found[f"w{n}"] == n + 100.0 * step).all() for n in range(16))
            assert (found["strided"] == 3 + 100.0 * step).all()


def test_copying_does_not_wait_for_kernels_queued_meanwhile(tmp_path: Path) -> None:
    """Copies run on CUDA streams of their own, beside other work of the device."""
    weight = torch.ones(4096, 1024, device="cuda")
    busy = torch.cuda.Stream()
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": weight}).wait()  # memory is there, kernels are loaded
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(4_000_000_000)
        begin = time.perf_counter()
        manager.save(2, {"w": weight})
        held = time.perf_counter() - begin
        before = busy.query()
        busy.synchronize()
        whole = time.perf_counter() - begin
    assert not before, "the device was not busy long enough for this test"
    assert held < whole / 2


def test_a_state_larger_than_the_budget_streams_through(tmp_path: Path) -> None:
    weights = {f"w{n}": torch.randn(2048, 2048, device="cuda") for n in range(24)}
    expected = {name: tensor.cpu() for name, tensor in weights.items()}
    report = tensorkeep.save_async(weights, tmp_path / "c", memory_budget="192MiB").wait()
    assert report.peak_buffer_bytes <= 192 * MIB
    found = tensorkeep.load(tmp_path / "c", device="cpu")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
