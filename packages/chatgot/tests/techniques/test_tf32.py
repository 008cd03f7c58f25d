"""TF32, on a simulated device where this one does not round."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatgot.step.state import StepState
from chatgot.techniques import tf32
from chatgot.techniques.base import Machine
from chatgot.techniques.tf32 import Tf32, Tf32Settings
from chatgot.testing import TechniqueSuite, opened, verified_step
from tensorkeep.errors import TechniqueNotActiveError

CPU = Machine(torch.device("cpu"))
_KEPT = {"tf32": ~0x1FFF, "bf16": ~0xFFFF}


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device that rounds operands when the setting is on."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        kept = _KEPT.get(tf32._precision(left.device), ~0)
        return torch.mm(*((each.view(torch.int32) & kept).view(torch.float32) for each in (left, right)))

    monkeypatch.setattr(tf32, "_matmul", product)
    monkeypatch.setattr(tf32, "measured_peak", lambda device: 1e9)


class TestTf32(TechniqueSuite):
    technique = Tf32

    def break_on_purpose(self, run: StepState) -> None:
        # Set, and overwritten before the first step.
        torch.set_float32_matmul_precision("highest")

    def test_ignored_setting_is_an_error(self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The device accepts the setting, and multiplies as before."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            monkeypatch.setattr(tf32, "_matmul", torch.mm)
            assert tf32._precision(run.device) == "tf32"
            if tf32._matmul_error(run.device) > tf32._ROUNDED:
                pytest.skip("this device rounds the operands of float32 matmuls")
            with pytest.raises(TechniqueNotActiveError, match="exact to"):
                verified_step(run)

    def test_any_block_of_the_model_is_enough(self, tmp_path: Path, data: Path) -> None:
        """A process of a pipeline may have only the last ones."""
        with opened(self.config_with({}), tmp_path / "run", data) as run:
            run.model.blocks[0].forward = lambda x, *others: x  # type: ignore[method-assign]
            assert verified_step(run)["tf32"]["precision"] == "tf32"

    def test_precision_is_restored(self, tmp_path: Path, data: Path) -> None:
        """For all backends, also if it was not set."""
        before = [tf32._precision(torch.device(each)) for each in ("cpu", "cuda")]
        with opened(self.config_with({}), tmp_path / "run", data):
            assert tf32._precision(torch.device("cuda")) == "tf32"
            assert torch.get_float32_matmul_precision() == "high"
        assert [tf32._precision(torch.device(each)) for each in ("cpu", "cuda")] == before
        assert torch.get_float32_matmul_precision() == "highest"


def test_errors_differ_by_precision() -> None:
    errors = []
    with tf32._restored_precision():
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            errors.append(tf32._matmul_error(torch.device("cpu")))
    exact, short, shorter = errors
    assert exact < 1e-6 < tf32._ROUNDED < 1e-4 < short < 1e-3 < shorter < 1e-2


def test_device_that_does_not_round_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tf32(Tf32Settings()).missing(CPU) is None
    monkeypatch.setattr(tf32, "_matmul", lambda left, right: (left.double() @ right.double()).float())
    assert "they are exact to" in str(Tf32(Tf32Settings()).missing(CPU))


Turing, Ampere = (type("Gpu", (Machine,), {"capability": each}) for each in ((7, 5), (8, 0)))


def test_gpu_before_ampere_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu = torch.device("cuda")
    assert Tf32(Tf32Settings()).missing(Turing(gpu)) == "needs compute capability 8.0; Tesla T4 has 7.5"
    assert Tf32(Tf32Settings()).missing(Ampere(gpu)) is None
    assert "CPU" in str(Tf32(Tf32Settings(precision="bf16")).missing(Ampere(gpu)))
