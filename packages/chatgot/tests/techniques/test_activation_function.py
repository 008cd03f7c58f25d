"""Activation functions of the MLPs: which one runs, at equal size of the model."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from chatgot.config.config import Config
from chatgot.run.folder import RunFolder
from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.activation_function import ActivationFunction, ActivationSettings
from chatgot.testing import TINY, TechniqueSuite, opened, trained, verified_step, whole_run
from tensorkeep.errors import TechniqueNotActiveError


def configured(wanted: str, /, **model: object) -> Config:
    """Return a configuration with the technique on."""
    config = TINY.changed({f"model.{name}": value for name, value in model.items()})
    return ActivationFunction(ActivationSettings(activation=wanted)).configure(config)  # type: ignore[arg-type]


class TestActivationFunction(TechniqueSuite):
    technique = ActivationFunction
    variants = ({"activation": "relu2"}, pytest.param({"activation": "swiglu"}, marks=pytest.mark.exhaustive))

    def break_on_purpose(self, run: StepState) -> None:
        """Give one block another activation."""
        run.model.blocks[1].mlp.activation = torch.tanh

    def test_each_activation_is_proved_and_trains_differently(self, tmp_path: Path, data: Path) -> None:
        second_losses = set()
        for name in ("gelu", "relu2", "swiglu", "geglu"):
            with opened(self.config_with({"activation": name}), tmp_path / name, data) as run:
                verified_step(run)
                second_losses.add(take_step(run)["loss"])
                assert run.techniques.proofs["activation-function"].figures["activation"] == name
        assert len(second_losses) == 4

    def test_mlp_without_a_gate_is_not_swiglu(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"activation": "swiglu"}), tmp_path / "run", data) as run:
            run.model.blocks[0].mlp.gate = None
            with pytest.raises(TechniqueNotActiveError, match="blocks 0 of 2"):
                verified_step(run)

    def test_silu_is_not_geglu_even_near_zero(self, tmp_path: Path, data: Path) -> None:
        with opened(self.config_with({"activation": "geglu"}), tmp_path / "run", data) as run:
            for block in run.model.blocks:
                block.mlp.activation = functional.silu
            with pytest.raises(TechniqueNotActiveError, match="did not compute geglu"):
                verified_step(run)

    def test_proof_counts_the_parameters(self, data: Path) -> None:
        config = self.config_with({"activation": "swiglu"})
        figures = whole_run(config, data).proofs["activation-function"].figures
        model = RunFolder(trained(config, data)).record().config.model
        assert (figures["parameters"], figures["width"]) == (model.parameter_count(), model.mlp_width)


@pytest.mark.parametrize("d_model", [64, 128, 768, 3200])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated_model_is_as_large_as_an_ungated_one(activation: str, d_model: int) -> None:
    gated, plain = configured(activation, d_model=d_model).model, configured("gelu", d_model=d_model).model
    assert gated.mlp_width < plain.mlp_width == 4 * d_model
    assert gated.parameter_count() == pytest.approx(plain.parameter_count(), rel=0.05)
    assert gated.flops_per_token() == pytest.approx(plain.flops_per_token(), rel=0.05)


def test_default_width_changes_with_the_activation_and_any_other_is_kept() -> None:
    assert configured("swiglu", d_model=256, d_ff=1024).model.d_ff is None
    assert configured("swiglu", d_model=256, d_ff=1024).model.mlp_width == 688
    assert configured("geglu", d_model=256, d_ff=672).model.mlp_width == 672
    assert configured("relu2", d_model=256, d_ff=512).model.mlp_width == 512
    once = configured("swiglu", d_model=256, d_ff=1024)
    assert ActivationFunction(ActivationSettings()).configure(once) == once
