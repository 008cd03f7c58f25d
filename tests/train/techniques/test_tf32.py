"""The exam of TF32, on a chip that is simulated where this one shortens nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.technique_suite import TINY, TechniqueSuite, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import tf32
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.tf32 import Tf32, Tf32Settings

CPU = Machine(torch.device("cpu"))
_KEPT = {"tf32": ~0x1FFF, "bf16": ~0xFFFF}


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a chip that shortens factors when it is told to."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        kept = _KEPT.get(tf32._setting(left.device), ~0)
        return torch.mm(*((each.view(torch.int32) & kept).view(torch.float32) for each in (left, right)))

    monkeypatch.setattr(tf32, "_product", product)
    monkeypatch.setattr(tf32, "measured_peak", lambda device: 1e9)


class TestTf32(TechniqueSuite):
    technique = Tf32

    def sabotage(self, run: Run) -> None:
        # Set, and overwritten by something else before the first step.
        torch.set_float32_matmul_precision("highest")

    def test_an_older_chip_is_caught(self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes the setting, reads it back, and multiplies as before."""
        with open_run(with_techniques(TINY, {"tf32": {}}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            monkeypatch.setattr(tf32, "_product", torch.mm)
            assert tf32._setting(run.device) == "tf32"
            if tf32._error(run.device) > tf32._SHORTENED:
                pytest.skip("this chip shortens float32 products")
            with (
                pytest.raises(TechniqueNotActiveError, match="exact to"),
                run.techniques.verified(run),
            ):
                take_step(run)

    def test_any_block_of_the_model_shows_it(self, tmp_path: Path, data: Path) -> None:
        """A process of a pipeline may have the last ones only."""
        with open_run(with_techniques(TINY, {"tf32": {}}), RunFolder(tmp_path / "run"), Dataset.open(data)) as run:
            run.model.blocks[0].forward = lambda x, *others: x  # type: ignore[method-assign]
            with run.techniques.verified(run):
                take_step(run)
            assert run.techniques.proofs["tf32"].figures["precision"] == "tf32"

    def test_the_precision_is_put_back(self, tmp_path: Path, data: Path) -> None:
        """Of all backends, also where it was not set at all."""
        before = [tf32._setting(torch.device(each)) for each in ("cpu", "cuda")]
        with open_run(with_techniques(TINY, {"tf32": {}}), RunFolder(tmp_path / "run"), Dataset.open(data)):
            assert tf32._setting(torch.device("cuda")) == "tf32"
            assert torch.get_float32_matmul_precision() == "high"
        assert [tf32._setting(torch.device(each)) for each in ("cpu", "cuda")] == before
        assert torch.get_float32_matmul_precision() == "highest"


def test_errors_tell_precisions_apart() -> None:
    exact = tf32._error(torch.device("cpu"))
    with tf32._restored():
        torch.set_float32_matmul_precision("high")
        short = tf32._error(torch.device("cpu"))
        torch.set_float32_matmul_precision("medium")
        shorter = tf32._error(torch.device("cpu"))
    assert exact < 1e-6 < tf32._SHORTENED < 1e-4 < short < 1e-3 < shorter < 1e-2


def test_a_chip_that_shortens_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tf32(Tf32Settings()).lacks(CPU) is None
    monkeypatch.setattr(tf32, "_product", lambda left, right: (left.double() @ right.double()).float())
    assert "they are exact to" in str(Tf32(Tf32Settings()).lacks(CPU))


class Turing(Machine):
    capability = (7, 5)  # type: ignore[assignment]


class Ampere(Machine):
    capability = (8, 0)  # type: ignore[assignment]


def test_a_gpu_before_ampere_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu = torch.device("cuda")
    assert Tf32(Tf32Settings()).lacks(Turing(gpu)) == "needs compute capability 8.0; Tesla T4 has 7.5"
    assert Tf32(Tf32Settings()).lacks(Ampere(gpu)) is None
    assert "CPU" in str(Tf32(Tf32Settings(precision="bf16")).lacks(Ampere(gpu)))
