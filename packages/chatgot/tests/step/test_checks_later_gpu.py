"""Steps on a GPU: the CPU does not wait for it within a step."""

from pathlib import Path

import pytest
import torch

from chatgot.step.device import BatchTransfer
from chatgot.step.train_step import train_step
from chatgot.testing import TINY, losses, opened, prepared_text, train_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.getbasetemp() / "technique-suite")


FUSED = TINY.changed({"loop.device": "cuda", "optim.implementation": "fused"})


@pytest.mark.parametrize(
    "changes",
    [
        {"loop.on_divergence": "stop"},
        {"loop.on_divergence": "skip"},
        {"techniques.mixed-precision.dtype": "bf16", "techniques.fused-cross-entropy": "on"},
        {"techniques.compile": "on", "techniques.cuda-graphs": "on"},
    ],
)
def test_no_step_waits_for_the_gpu(tmp_path: Path, data: Path, changes: dict[str, object]) -> None:
    with opened(FUSED.changed(changes), tmp_path / "run", data) as run:
        for _ in range(3):
            train_step(run)
        try:
            torch.cuda.set_sync_debug_mode("error")
            train_step(run)
            # What waits is an error in this mode.
            with pytest.raises(RuntimeError, match="synchronizing"):
                torch.ones((), device="cuda").item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_skipped_updates_are_the_same_as_with_checks_in_each_step(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FUSED.changed({"loop.on_divergence": "skip"})
    train_run(config, tmp_path / "later", data)
    monkeypatch.setattr("chatgot.run.setup.can_check_later", lambda run: False)
    train_run(config, tmp_path / "now", data)
    assert losses(tmp_path / "later") == losses(tmp_path / "now")


def test_batches_arrive_complete() -> None:
    move, tokens = BatchTransfer(torch.device("cuda")), torch.arange(1 << 20)
    for number in range(20):
        (moved,) = move(tokens + number)
        assert torch.equal(moved.cpu(), tokens + number)
